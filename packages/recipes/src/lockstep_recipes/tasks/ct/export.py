"""The files that users need in addition to the weights: questions, how slices are prepared, sizes of the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from lockstep.core.program import Program
from lockstep_recipes.tasks.ct.interface import VolumeRiskTask
from lockstep_recipes.tasks.ct.model import VolumeRiskModel
from lockstep_recipes.tasks.ct.volume_table import horizons
from lockstep_recipes.tasks.ct.volumes import resample

FILE = "volume_risk.json"


class _RisksOfVolume(nn.Module):
    """Called as `module(slices=..., positions=...)`. See `risks_of_volume`."""

    def __init__(self, model: VolumeRiskModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, slices: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.ones_like(positions, dtype=torch.int64).sum()[None]
        found = self.model.of_volumes(self.model.features_at_once(slices), counts, positions, positions.shape[0])
        return found.logits[0].float(), found.attention.float()


def risks_of_volume(task: VolumeRiskTask, model: nn.Module) -> Program:
    """The program of a trained model: logits (questions) and weights (slices) of one volume.

    The inputs are `slices`, uint8 (slices, windows, size, size), and `positions`, float32 (slices), in millimetres.
    """
    assert isinstance(model, VolumeRiskModel)
    draw = torch.Generator().manual_seed(0)
    size = task.options.image_size
    slices = torch.randint(0, 256, (3, len(task.windows), size, size), dtype=torch.uint8, generator=draw)
    positions = torch.tensor([0.0, 3.0, 6.0])
    return Program(
        _RisksOfVolume(model),
        {"slices": slices, "positions": positions},
        {"slices": {0: Dim("slices", min=1)}, "positions": {0: Dim("slices", min=1)}},
        {"slices": slices[:2], "positions": positions[:2]},
        script=Path(__file__).with_name("use_volumes.py"),
    )


def write_export(task: VolumeRiskTask, model: nn.Module, folder: Path) -> None:
    """Write `volume_risk.json`, the code that resamples the slice distance, and the config of the backbone as
    `config.json` for transformers.

    Args:
        model: as `task.model` makes it.
        folder: exists.
    """
    backbone: Any = model.backbone
    backbone.network.config.save_pretrained(folder)
    (folder / FILE).write_text(json.dumps(_about(task, backbone), indent=1))
    if task.options.slice_distance_mm is not None:
        shutil.copyfile(resample.__file__, folder / "resample.py")


def _about(task: VolumeRiskTask, backbone: Any) -> dict[str, Any]:
    options, about = task.options, task.about
    return {
        "questions": about.questions,
        "outcomes": task.outcomes,
        "horizons_years": {
            event: {about.questions[place]: years for years, place in times}
            for event, times in horizons(about.questions).items()
        },
        "windows": [{"center": window.center, "width": window.width} for window in task.windows],
        "mean": about.mean,
        "std": about.std,
        "image_size": options.image_size,
        "keep_shape": options.keep_shape,
        "slice_distance_mm": options.slice_distance_mm,
        "max_slices": options.max_slices,
        "eval_slices": options.eval_slices,
        "train_slices": options.train_slices,
        "pooling": backbone.pooling,
        "special_tokens": backbone.special_tokens,
        "aggregator": options.aggregator.model_dump(),
        "head": options.head,
    }
