"""Predict risks from CT volumes with the exported model next to this file. Needs only torch and NumPy.

    python use_model.py VOLUME.npz...     a line of JSON for each volume

    import use_model
    use_model.predict("volume.npz")       a dict; use_model.predict((slices, positions)) does the same

A volume is `slices`: (n, rows, columns) in Hounsfield units from feet to head, rows from front to back, columns from
the right of the patient to the left; and `positions`: (n) in millimetres. `lockstep export` copies this file. Slices
are prepared as in an evaluation, according to `volume_risk.json`. `model.pt2` computes the rest.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent


def predict(volume: Any, *, folder: str | Path = HERE, device: str = "cpu") -> dict[str, Any]:
    """`risks` by question, and `slices`: number, position in mm and weight of each slice that the model saw.

    Args:
        volume: the path of a .npz file, or a pair of slices and positions.
        device: the device that runs the model: `cpu`, `cuda`, `mps`.
    """
    about, run = _loaded(Path(folder), device)
    if isinstance(volume, str | Path):
        with np.load(volume) as file:
            volume = file["slices"], file["positions"]
    slices, positions = np.asarray(volume[0], np.int16), np.asarray(volume[1], np.float32)
    if about["slice_distance_mm"] is not None:
        resample = runpy.run_path(str(Path(folder) / "resample.py"))
        slices, positions = resample["resampled_slices"](slices, positions, about["slice_distance_mm"])
    logits, seen = [], []
    groups = _groups(len(slices), about)
    for places in groups:
        pictures = torch.stack([_picture(slices[place], about) for place in places])
        found, attention = run(slices=pictures, positions=torch.from_numpy(positions[places]))
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
def _loaded(folder: Path, device: str) -> tuple[dict[str, Any], Callable[..., tuple[Tensor, Tensor]]]:
    exported = torch.export.load(folder / "model.pt2")
    if device != "cpu":
        from torch.export.passes import move_to_device_pass

        exported = move_to_device_pass(exported, device)
    program = exported.module()

    def run(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits, attention = program(**{name: value.to(device) for name, value in inputs.items()})
        return logits.cpu(), attention.cpu()

    return json.loads((folder / "volume_risk.json").read_text()), run


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


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0)
    if missing := [name for name in sys.argv[1:] if not Path(name).is_file()]:
        sys.exit(f"error: there is no such file: {', '.join(missing)}")
    for name in sys.argv[1:]:
        print(json.dumps({"input": name, **predict(name)}))
