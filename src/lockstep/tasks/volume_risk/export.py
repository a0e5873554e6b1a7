"""What users of the weights need besides them: the questions, how slices are made, and the sizes of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.sources.volume_table import horizons

if TYPE_CHECKING:
    from lockstep.tasks.volume_risk.task import VolumeRisk

FILE = "volume_risk.json"


def write_export(task: VolumeRisk, model: nn.Module, folder: Path) -> None:
    """Write `volume_risk.json`, and the config of the backbone as `config.json` of transformers.

    `docs/load_ct_model.py` computes risks from these files and the weights, without Lockstep.

    Args:
        model: as `task.model` makes it.
        folder: exists.
    """
    backbone: Any = model.backbone
    backbone.network.config.save_pretrained(folder)
    (folder / FILE).write_text(json.dumps(_about(task, backbone), indent=1))


def _about(task: VolumeRisk, backbone: Any) -> dict[str, Any]:
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
