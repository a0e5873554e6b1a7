"""Risks from CT volumes by the exported model that lies beside this file. It needs torch and NumPy, and nothing else.

    python use_model.py VOLUME.npz...     a line of JSON for each volume

    import use_model
    use_model.predict("volume.npz")       a dict; use_model.predict((slices, positions)) does the same

A volume is `slices`: (n, rows, columns) in Hounsfield units from feet to head, rows from front to back, columns from
the right of the patient to the left; and `positions`: (n) in millimetres. `lockstep export` copies this file. Slices
are prepared as an evaluation prepares them, as `volume_risk.json` says. `model.pt2` computes the rest.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent


def predict(volume: Any, *, folder: str | Path = HERE) -> dict[str, Any]:
    """`risks` by question, and `slices`: number, position in mm and weight of each slice that the model saw.

    Args:
        volume: the path of a .npz file, or a pair of slices and positions.
    """
    about, program = _loaded(Path(folder))
    if isinstance(volume, str | Path):
        with np.load(volume) as file:
            volume = file["slices"], file["positions"]
    slices, positions = np.asarray(volume[0], np.int16), np.asarray(volume[1], np.float32)
    if about["slice_distance_mm"] is not None and len(slices) > 1:
        slices, positions = _resampled(slices, positions, about["slice_distance_mm"])
    logits, seen = [], []
    groups = _groups(len(slices), about)
    for places in groups:
        pictures = torch.stack([_picture(slices[place], about) for place in places])
        with torch.no_grad():
            found, attention = program(slices=pictures, positions=torch.from_numpy(positions[places]))
        logits.append(found)
        shares = (attention / len(groups)).tolist()
        rows = zip(places.tolist(), positions[places].tolist(), shares, strict=True)
        seen += [{"slice": place, "mm": position, "attention": weight} for place, position, weight in rows]
    risks = torch.stack(logits).mean(0).sigmoid().tolist()
    return {
        "risks": dict(zip(about["questions"], risks, strict=True)),
        "slices": sorted(seen, key=lambda row: int(row["slice"])),
    }


@functools.cache
def _loaded(folder: Path) -> tuple[dict[str, Any], Callable[..., tuple[Tensor, Tensor]]]:
    about = json.loads((folder / "volume_risk.json").read_text())
    return about, torch.export.load(folder / "model.pt2").module()


def _groups(count: int, about: dict[str, Any]) -> list[Any]:
    """The slices that the model sees: evenly spaced ones, or all in groups."""
    most, places = about["max_slices"], np.arange(count)
    if about["eval_slices"] == "even":
        edges = count * np.arange(most + 1) // most
        return [(edges[:-1] + edges[1:] - 1) // 2 if count > most else places]
    groups = -(-count // most)
    if about["train_slices"] == "window":
        return np.array_split(places, groups)
    return [places[first::groups] for first in range(groups)]


def _picture(hounsfield: Any, about: dict[str, Any]) -> Tensor:
    """A slice as uint8 (windows, size, size)."""
    values, size = hounsfield.astype(np.float64), about["image_size"]
    levels = [(2 * (values - w["center"]) + w["width"]) * 255 / (2 * w["width"]) for w in about["windows"]]
    pixels = torch.from_numpy(np.rint(np.clip(np.stack(levels, -1), 0, 255)).astype(np.uint8))
    picture = pixels.permute(2, 0, 1)
    height, width = picture.shape[1:]
    factor = min(size / height, size / width)
    inner = (size, size)
    if about["keep_shape"]:
        inner = min(size, max(1, round(height * factor))), min(size, max(1, round(width * factor)))
    if inner != (height, width):
        by_rows = pixels[None].permute(0, 3, 1, 2)
        picture = functional.interpolate(by_rows, size=inner, mode="bilinear", antialias=True, align_corners=False)[0]
    return functional.pad(picture, (0, size - inner[1], 0, size - inner[0]))


def _resampled(slices: Any, positions: Any, distance: float) -> tuple[Any, Any]:
    """Slices `distance` millimetres apart: interpolated, or averaged under a triangle where they were closer."""
    if np.abs(np.diff(positions) - distance).max() < 1e-3 * distance:
        return slices, positions
    old = positions.astype(np.float64)
    length = float(old[-1] - old[0])
    count = math.floor(length / distance + 1e-3) + 1
    fine = min(64, max(1, math.ceil(distance / float(np.diff(old).min()) * (1 - 1e-3))))
    places = np.minimum(distance / fine * np.arange((count - 1) * fine + 1), length) + old[0]
    left = np.clip(np.searchsorted(old, places, side="right") - 1, 0, len(old) - 2)
    share = (places - old[left]) / (old[left + 1] - old[left])
    linear = np.zeros((len(places), len(old)))
    linear[np.arange(len(places)), left] = 1 - share
    linear[np.arange(len(places)), left + 1] += share
    away = np.abs(np.arange(len(places)) - fine * np.arange(count)[:, None])
    triangle = np.maximum(0.0, 1 - away / fine)
    weights = triangle @ linear / triangle.sum(axis=1, keepdims=True)
    found = np.empty((count, *slices.shape[1:]), np.int16)
    for number, row in enumerate(weights):
        used = np.flatnonzero(row)
        values = np.tensordot(row[used].astype(np.float32), slices[used].astype(np.float32), axes=1)
        found[number] = np.rint(values)
    return found, (distance * np.arange(count)).astype(np.float32)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        print(json.dumps({"input": name, **predict(name)}))
