"""Risks from a CT volume with an exported model, without Lockstep.

    lockstep export RUN_DIR FOLDER
    python load_ct_model.py FOLDER VOLUME.npz

VOLUME.npz holds `slices`, (n, rows, columns) in Hounsfield units from feet to head, rows from front to back, columns
from the right of the patient to the left; and `positions`, (n) in millimetres.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as f
from transformers import AutoConfig, AutoModel


def pictures(about, slices):
    """Slices in HU as normalised pictures (n, windows, size, size)."""
    levels = [(2 * (slices - w["center"]) + w["width"]) * 255 / (2 * w["width"]) for w in about["windows"]]
    levels = torch.from_numpy(np.rint(np.clip(np.stack(levels, 1), 0, 255)).astype(np.uint8))
    levels = f.interpolate(levels, (about["image_size"],) * 2, mode="bilinear", antialias=True, align_corners=False)
    mean, std = (torch.tensor(about[name]).view(-1, 1, 1) for name in ("mean", "std"))
    return (levels.float() / 255 - mean) / std


def layer(kind, weights, name, x):
    weight, bias = weights[f"aggregator.{name}.weight"], weights[f"aggregator.{name}.bias"]
    return f.linear(x, weight, bias) if kind == "linear" else f.layer_norm(x, x.shape[-1:], weight, bias)


def aggregate(about, weights, features, positions):
    """The vector of a volume from the features of its slices."""
    linear, norm = partial(layer, "linear", weights), partial(layer, "norm", weights)
    width, heads = about["aggregator"]["width"], about["aggregator"]["heads"]
    steps = torch.arange(width // 2) / max(1, width // 2 - 1)
    angles = (positions - (positions[0] + positions[-1]) / 2)[:, None] * 0.001**steps
    tokens = linear("project", features) + torch.cat([angles.sin(), angles.cos()], dim=1)
    tokens = torch.cat([weights["aggregator.class_token"][None], tokens])
    for at in (f"layers.{number}." for number in range(about["aggregator"]["layers"])):
        parts = linear(at + "query_key_value", norm(at + "norm_attention", tokens))
        query, key, value = parts.view(len(tokens), 3, heads, -1).permute(1, 2, 0, 3)
        mixed = f.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        tokens = tokens + linear(at + "out", mixed.transpose(0, 1).flatten(1))
        tokens = tokens + linear(at + "linear.3", f.gelu(linear(at + "linear.0", norm(at + "norm_linear", tokens))))
    return norm("norm", tokens[0])


@torch.no_grad()
def risks(folder, slices, positions):
    folder = Path(folder)
    about, weights = json.loads((folder / "volume_risk.json").read_text()), load_file(folder / "model.safetensors")
    plain = {"eval_slices": "even", "keep_shape": False, "slice_distance_mm": None}
    if about["aggregator"]["name"] != "transformer" or any(about[name] != value for name, value in plain.items()):
        raise NotImplementedError(f"this example is for the transformer aggregator and {plain}")
    backbone = AutoModel.from_config(AutoConfig.from_pretrained(folder)).eval()
    backbone.pooler = None  # risks do not use it
    start = "backbone.network."
    backbone.load_state_dict({name[len(start) :]: weights[name] for name in weights if name.startswith(start)})
    edges = len(slices) * np.arange(about["max_slices"] + 1) // about["max_slices"]
    chosen = (edges[:-1] + edges[1:] - 1) // 2 if len(slices) > about["max_slices"] else np.arange(len(slices))
    hidden = backbone(pictures(about, slices[chosen].astype(np.float64))).last_hidden_state
    features = hidden[:, 0] if about["pooling"] == "class_token" else hidden[:, about["special_tokens"] :].mean(1)
    vector = aggregate(about, weights, features, torch.from_numpy(positions[chosen]).float())
    raw = f.linear(vector, weights["head.linear.weight"], weights["head.linear.bias"])
    found = raw.sigmoid()
    for group in about["outcomes"]:
        if about["head"] == "monotone":
            found[group] = torch.cat([raw[group[:1]], f.softplus(raw[group[1:]])]).cumsum(0).sigmoid()
        elif about["head"] == "hazard":
            found[group] = 1 - (1 - raw[group].sigmoid()).cumprod(0)
    return dict(zip(about["questions"], found.tolist(), strict=True))


if __name__ == "__main__":
    print(json.dumps(risks(sys.argv[1], *(np.load(sys.argv[2])[name] for name in ("slices", "positions"))), indent=1))
