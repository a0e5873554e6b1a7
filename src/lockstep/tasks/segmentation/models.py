"""The model of a segmentation: the small U-Net, or pretrained or new from transformers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.tasks import hugging_face
from lockstep.tasks.image_models import Pixels, check_channels, processor_of, side_of
from lockstep.tasks.segmentation.options import UNET, SegmentationOptions
from lockstep.tasks.segmentation.unet import UNet

_WHAT = "semantic segmentation"
_KIND = "segmentation"
_SIZE = 512  # pixels, where nothing says another size
_UNET_SIZE = 256
_UNUSED = ("mask_token", "dpt.layernorm.", "neck.fusion_stage.layers.0.residual_layer1.")
"""Parts of the names of parameters that have no part in the logits: the mask token is for pretraining, and DPT has a
normalisation and a first residual layer that its head does not use. Without a gradient, DDP would refuse them."""


class Preparation(NamedTuple):
    """How pictures are prepared for a trained model."""

    size: int | None
    """Shorter side in pixels, or with `square` both sides. None: the pictures' own size."""
    square: bool
    """Whether pictures are resized to squares."""
    mean: list[float]
    """Mean of each channel, from 0 to 1."""
    std: list[float]
    """Standard deviation of each channel, from 0 to 1."""
    interpolation: str
    """bilinear or bicubic."""


class Models(Protocol):
    """Makes models of one library by name."""

    def classes(self, names: Sequence[str]) -> list[str]:
        """The classes in the order of the logits; `names` are those of the data.

        Raises:
            UsageError: the pretrained model has another number of classes.
        """
        ...

    def pixels(self) -> Pixels:
        """What the model expects of pictures."""
        ...

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        """The model, and names of the weights that the pretrained model lacks.

        Args:
            size: height and width in pixels of the largest training pictures.
            trained: whether a checkpoint provides the weights, so that pretrained weights are not needed.
        """
        ...

    def save(self, classes: Sequence[str], *, size: int, folder: Path) -> None:
        """Write what `make` needs of a pretrained model besides its weights into `folder`."""
        ...

    def export(self, model: nn.Module, preparation: Preparation, folder: Path) -> list[str]:
        """Write what the library needs to load the weights of `model` into `folder`. Returns warnings."""
        ...


def models_for(options: SegmentationOptions, folder: Path | None) -> Models:
    """What makes the models that `options` ask for.

    Args:
        folder: where an earlier start of the run has kept the model's config. None: there is none.
    """
    if options.model is None and options.scratch.architecture == UNET:
        return UNetModels(options)
    return TransformersModels(options, folder)


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """The class scores (batch, classes, h, w) of normalised images (batch, channels, height, width).

    The scores of many models have fewer rows and columns than the images. Their softmax are the probabilities of the
    classes. Position embeddings of transformers' models are interpolated to the size of the images.
    """
    options = {"interpolate_pos_encoding": True} if _interpolates(type(model).forward) else {}
    output = model(images, **options)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


@functools.cache
def _interpolates(forward: Callable[..., Any]) -> bool:
    return "interpolate_pos_encoding" in inspect.signature(forward).parameters


@dataclass(frozen=True)
class UNetModels:
    """The small U-Net."""

    options: SegmentationOptions

    def classes(self, names: Sequence[str]) -> list[str]:
        return list(names)

    def pixels(self) -> Pixels:
        return Pixels(_UNET_SIZE, None, None)

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        sizes = self.options.scratch.sizes
        known = [key for key in inspect.signature(UNet).parameters if key not in ("channels", "classes")]
        for key, value in sizes.items():
            if key not in known:
                remedy = f"{UNET} takes: {', '.join(known)}; for another model, set task.scratch.architecture"
                raise UsageError("unknown key", where=f"task.scratch.sizes.{key}", remedy=remedy)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (value in ("group", "batch") if key == "norm" else is_number):
                remedy = "use group or batch" if key == "norm" else "use a whole number, at least 1"
                raise UsageError(f"{value!r} does not suit", where=f"task.scratch.sizes.{key}", remedy=remedy)
        return UNet(self.options.channels, len(classes), **sizes), []

    def save(self, classes: Sequence[str], *, size: int, folder: Path) -> None:
        pass

    def export(self, model: nn.Module, preparation: Preparation, folder: Path) -> list[str]:
        return []


@dataclass(frozen=True)
class TransformersModels:
    """Every `AutoModelForSemanticSegmentation`."""

    options: SegmentationOptions
    folder: Path | None

    @functools.cached_property
    def _transformers(self) -> Any:
        return hugging_face.import_transformers(_KIND, "images")

    def config(self, size: int) -> Any:
        """The config of the model.

        Args:
            size: height and width in pixels of the largest training pictures, for a new model.
        """
        options = self.options
        source = self.folder if self.folder and (self.folder / "config.json").is_file() else options.model
        if source:
            config = hugging_face.load(self._transformers.AutoConfig.from_pretrained, "config", source)
        else:
            config = self._new_config(size)
        if getattr(config, "use_auxiliary_head", False):
            # The auxiliary head has no part in the logits, so it would get no gradient, which DDP refuses.
            config.use_auxiliary_head = False
        return config

    def _new_config(self, size: int) -> Any:
        # A dict of names: a loop over the mapping of classes would import every architecture.
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES as KNOWN

        def defaults(kind: Any, names: Sequence[str]) -> dict[str, Any]:
            values = {"image_size": size, "num_channels": self.options.channels}
            return {key: value for key, value in values.items() if key in names or key in kind.attribute_map}

        return hugging_face.new_config(
            self.options.scratch.architecture,
            known=[UNET, *sorted(KNOWN)],
            what=_WHAT,
            sizes=self.options.scratch.sizes,
            defaults=defaults,
        )

    def classes(self, names: Sequence[str]) -> list[str]:
        if not self.options.model:
            return list(names)
        head, new_head = "ForSemanticSegmentation", self.options.new_head
        config = self.config(_SIZE)
        return hugging_face.check_labels(config, names, head=head, name=self.options.model, new_head=new_head)

    def pixels(self) -> Pixels:
        said = processor_of(self.options.model)
        size = said.get("size") or getattr(self.config(_SIZE), "image_size", None) or _SIZE
        return Pixels(side_of(size, default=_SIZE), said.get("image_mean"), said.get("image_std"))

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        config = self.config(size)
        _set_classes(config, classes)
        check_channels(config, self.options.channels)
        model, new = hugging_face.make_model(
            self._transformers.AutoModelForSemanticSegmentation,
            config,
            None if trained else self.options.model,
            what=_WHAT,
            new_head=self.options.new_head,
        )
        for name, parameter in model.named_parameters():
            if any(part in name for part in _UNUSED):
                parameter.requires_grad_(False)
        return model, new

    def save(self, classes: Sequence[str], *, size: int, folder: Path) -> None:
        config = self.config(size)
        _set_classes(config, classes)
        config.save_pretrained(folder)

    def export(self, model: nn.Module, preparation: Preparation, folder: Path) -> list[str]:
        size = preparation.size
        sides = {"height": size, "width": size} if preparation.square else {"shortest_edge": size}
        processor = {
            "image_processor_type": "SegformerImageProcessor",  # it takes any size, and enlarges logits as we do
            "do_resize": size is not None,
            "resample": {"bilinear": 2, "bicubic": 3}[preparation.interpolation],
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "do_reduce_labels": False,
            "image_mean": preparation.mean,
            "image_std": preparation.std,
            "do_convert_rgb": len(preparation.mean) == 3,
            **({} if size is None else {"size": sides}),
        }
        return hugging_face.save_for_image_pipeline(model, processor, folder)


def _set_classes(config: Any, classes: Sequence[str]) -> None:
    """Write the class names into a model's config. `problem_type`, which is for classification, stays empty."""
    hugging_face.set_labels(config, classes)
    config.problem_type = None


def dtype_of(model: nn.Module) -> torch.dtype:
    """The number format of the first parameter."""
    return next(model.parameters()).dtype
