"""Models for classification: pretrained or new, from transformers or timm, or Lockstep's small networks."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.core.errors import DataError, UsageError
from lockstep.core.foreign_errors import optional
from lockstep_recipes.tasks.vision.classification.convnet import ConvNet
from lockstep_recipes.tasks.vision.classification.options import (
    AUTO,
    CONVNET,
    CONVNET4,
    RESNET9,
    TIMM,
    ClassificationOptions,
)
from lockstep_recipes.tasks.vision.classification.resnet9 import ConvNet4, ResNet9
from lockstep_recipes.tasks.vision.image_models import AutoModels, Models, Pixels
from lockstep_recipes.tasks.vision.images.decode import image_size
from lockstep_recipes.tasks.vision.readers.image_records import ImageRecords

_SIZE = 224  # default size in pixels
_CONVNET_SIZE = 32
_SIDES = (32, 48)  # smallest and largest size in pixels that `convnet4` and `resnet9` take from the data
_LOOKED_AT = 100
# The default width, and what a width must be a multiple of.
_WIDTHS = {CONVNET: (32, 4), CONVNET4: (32, 16), RESNET9: (16, 16)}


def models_for(options: ClassificationOptions, folder: Path | None, *, architecture: str | None = None) -> Models:
    """The object that makes the models for `options`.

    Args:
        folder: the folder in which an earlier start of the run saved the model's config. None: there is none.
        architecture: the value that replaces `auto`. None: no model is made.
    """
    name = options.model or options.scratch.architecture
    if name.startswith(TIMM):
        return TimmModels(options, name.removeprefix(TIMM))
    if options.model is None and (name in _WIDTHS or name == AUTO):
        return SmallModels(options, architecture or name)
    return TransformersClassifiers(options, folder)


def median_side(records: ImageRecords) -> int:
    """The median of the shorter sides of images in pixels. It uses the headers of about 100 evenly spaced images. 32 if
    none can be read."""
    sides = []
    for index in range(0, len(records), max(1, len(records) // _LOOKED_AT)):
        with contextlib.suppress(DataError):  # when the image is read, this is an error, or the image is skipped
            sides.append(min(image_size(records.pictures.read(index), where=records.where(index))))
    return round(statistics.median(sides or [_SIDES[0]]))


def size_for(side: int) -> int:
    """The size in pixels that suits images, for a new small model: a multiple of 8 from 32 to 48.

    Args:
        side: the median of the images' shorter sides in pixels.
    """
    low, high = _SIDES
    return min(max(8 * round(side / 8), low), high)


@dataclass(frozen=True)
class SmallModels(Models):
    """The small networks of Lockstep: that of the demo, and those of `image_folder`."""

    name: str

    def pixels(self) -> Pixels:
        return Pixels(_CONVNET_SIZE)

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        name, channels, sizes = self.name, self.options.channels, dict(self.options.scratch.sizes)
        default, multiple = _WIDTHS[name]
        width = sizes.pop("width", default)
        if sizes:
            remedy = f"{name} takes: width; for a different model, set task.scratch.architecture, such as resnet"
            raise UsageError("unknown key", where=f"task.scratch.sizes.{next(iter(sizes))}", remedy=remedy)
        if not isinstance(width, int) or isinstance(width, bool) or width < multiple or width % multiple:
            remedy = f"use a multiple of {multiple}, at least {multiple}"
            raise UsageError(f"the width is {width!r} channels", where="task.scratch.sizes.width", remedy=remedy)
        if name == RESNET9:
            return ResNet9(channels, len(classes), width), []
        if name == CONVNET4:
            return ConvNet4(channels, len(classes), width), []
        return ConvNet(channels, len(classes), self.options.all_sizes(size)[0], width), []


class TransformersClassifiers(AutoModels):
    """Every `AutoModelForImageClassification`."""

    kind = "classification"
    what = "image classification"
    head = "ForImageClassification"
    known_names = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    problem = "single_label_classification"
    own = (CONVNET, CONVNET4, RESNET9, AUTO)
    not_new = frozenset({"timm_wrapper"})
    usual_size = _SIZE
    size_keys = ("crop_size", "size")
    unused = ("mask_token",)  # only for pretraining

    def processor(self, about: Mapping[str, Any]) -> dict[str, Any]:
        side, resize = about["size"], about["eval_resize"]
        square = {"height": side, "width": side}
        cut = {"size": {"shortest_edge": resize}, "crop_size": square}
        return {
            # It resizes, crops the centre and normalises, as Lockstep does.
            "image_processor_type": "BitImageProcessor",
            "do_convert_rgb": len(about["mean"]) == 3,
            "do_center_crop": resize is not None,
            **({"size": square} if resize is None else cut),
        }


@dataclass(frozen=True)
class TimmModels(Models):
    """Every model of timm."""

    name: str

    @property
    def _timm(self) -> Any:
        remedy = "pip install timm. timm needs a torchvision that matches the installed torch"
        return optional("timm", where=f"{TIMM}{self.name}", remedy=remedy, kind=UsageError)

    def pixels(self) -> Pixels:
        config = self._timm.get_pretrained_cfg(self.name) if self.options.model else None
        if config is None:
            return Pixels(_SIZE)
        return Pixels(int(config.input_size[-1]), list(config.mean), list(config.std))

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        timm, options = self._timm, self.options
        if not timm.is_model(self.name.partition(".")[0]):
            near = ", ".join(timm.list_models(f"*{self.name.partition('.')[0][:6]}*")[:8])
            key = "task.model" if options.model else "task.scratch.architecture"
            remedy = f"there are: {near}, ..." if near else "timm.list_models() lists the names"
            raise UsageError(f"timm has no model {self.name!r}", where=key, remedy=remedy)
        pretrained = bool(options.model)
        arguments = {
            "pretrained": pretrained and not trained and torch.empty(0).device.type != "meta",
            "num_classes": len(classes),
            "in_chans": options.channels,
            **({} if pretrained else options.scratch.sizes),
        }
        model = self._create(arguments, size)
        config = getattr(model, "pretrained_cfg", None) or {}
        if not pretrained or config.get("num_classes") == len(classes):
            return model, []
        head = config.get("classifier") or "the last layer"
        return model, [head] if isinstance(head, str) else list(head)

    def _create(self, arguments: dict[str, Any], size: int) -> nn.Module:
        # timm's transformers interpolate position embeddings only with these keys. Other models refuse the keys.
        for extra in ({"img_size": size, "dynamic_img_size": True}, {"img_size": size}):
            with contextlib.suppress(TypeError):
                model: nn.Module = self._timm.create_model(self.name, **extra, **arguments)
                return model
        try:
            model = self._timm.create_model(self.name, **arguments)
        except TypeError as error:
            remedy = f"give keys that timm's {self.name} takes"
            raise UsageError(str(error), where="task.scratch.sizes", remedy=remedy) from error
        return model
