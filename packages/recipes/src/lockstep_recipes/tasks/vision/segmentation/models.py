"""Models for segmentation: the small U-Net, or a transformers model, pretrained or new."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.vision.image_models import AutoModels, Models, Pixels
from lockstep_recipes.tasks.vision.segmentation.options import UNET, SegmentationOptions
from lockstep_recipes.tasks.vision.segmentation.unet import UNet

_SIZE = 512  # default size in pixels
_UNET_SIZE = 256


def models_for(options: SegmentationOptions, folder: Path | None) -> Models:
    """The object that makes the models for `options`.

    Args:
        folder: the folder in which an earlier start of the run saved the model's config. None: there is none.
    """
    if options.model is None and options.scratch.architecture == UNET:
        return UNetModels(options)
    return TransformersSegmenters(options, folder)


@dataclass(frozen=True)
class UNetModels(Models):
    """The small U-Net."""

    def pixels(self) -> Pixels:
        return Pixels(_UNET_SIZE)

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        sizes = self.options.scratch.sizes
        known = [key for key in inspect.signature(UNet).parameters if key not in ("channels", "classes")]
        for key, value in sizes.items():
            if key not in known:
                remedy = f"{UNET} takes: {', '.join(known)}; for a different model, set task.scratch.architecture"
                raise UsageError("unknown key", where=f"task.scratch.sizes.{key}", remedy=remedy)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (value in ("group", "batch") if key == "norm" else is_number):
                remedy = "use group or batch" if key == "norm" else "use an integer of at least 1"
                raise UsageError(f"{value!r} is not valid", where=f"task.scratch.sizes.{key}", remedy=remedy)
        return UNet(self.options.channels, len(classes), **sizes), []


class TransformersSegmenters(AutoModels):
    """Every `AutoModelForSemanticSegmentation`."""

    kind = "segmentation"
    what = "semantic segmentation"
    head = "ForSemanticSegmentation"
    known_names = "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"
    own = (UNET,)
    usual_size = _SIZE
    # The mask token is for pretraining. DPT has a normalisation and a first residual layer that its head does not use.
    unused = ("mask_token", "dpt.layernorm.", "neck.fusion_stage.layers.0.residual_layer1.")

    def config(self, size: int) -> Any:
        config = super().config(size)
        if getattr(config, "use_auxiliary_head", False):
            # The logits do not depend on the auxiliary head, so it would get no gradient, which DDP refuses.
            config.use_auxiliary_head = False
        return config

    def processor(self, about: Mapping[str, Any]) -> dict[str, Any]:
        size, square = about["size"], about["eval_shape"] == "square"
        return {
            # It takes any size, and enlarges logits as Lockstep does.
            "image_processor_type": "SegformerImageProcessor",
            "do_resize": size is not None,
            "do_reduce_labels": False,
            "do_convert_rgb": len(about["mean"]) == 3,
            **(
                {} if size is None else {"size": {"height": size, "width": size} if square else {"shortest_edge": size}}
            ),
        }
