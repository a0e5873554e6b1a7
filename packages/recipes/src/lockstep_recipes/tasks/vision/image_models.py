"""Models of image tasks: the images that they expect, their config, and their weights."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import nn

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks import hugging_face
from lockstep_recipes.tasks.readers.hub import offline_without_network
from lockstep_recipes.tasks.vision.image_options import ImageOptions
from lockstep_recipes.tasks.vision.images.normalise import usual_mean_and_std


class Pixels(NamedTuple):
    """Properties of images that a model expects."""

    size: int
    """Height and width in pixels."""
    mean: list[float] | None = None
    """Mean of each channel, from 0 to 1. None: the model does not define it."""
    std: list[float] | None = None
    """Standard deviation of each channel. None: the model does not define it."""

    def mean_and_std(self, options: ImageOptions) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel: those of the options, of the model, of ImageNet, or 0.5 for grey
        images."""
        usual = usual_mean_and_std(options.channels)
        return options.mean or self.mean or usual[0], options.std or self.std or usual[1]


def processor_of(model: str | None) -> dict[str, Any]:
    """The config of a pretrained model's image processor. Empty without a model, or if there is no such file."""
    if model is None:
        return {}
    mixin = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    try:
        with contextlib.nullcontext() if Path(model).is_dir() else offline_without_network():
            said: dict[str, Any] = mixin.get_image_processor_dict(model)[0]
    except OSError:
        return {}
    return said


def side_of(size: Any, *, keys: Sequence[str] = ("shortest_edge", "height"), default: int) -> int:
    """The side in pixels of a size in transformers' format: a number, a list, or a dict with one of `keys`."""
    if isinstance(size, dict):
        size = next((size[key] for key in keys if size.get(key)), None)
    if isinstance(size, list | tuple):
        size = size[0]
    return int(size or default)


def check_channels(config: Any, channels: int) -> None:
    """Compare the channels of a model with those of the images.

    Args:
        config: the config of a transformers model.

    Raises:
        UsageError: they differ.
    """
    places = (config, getattr(config, "backbone_config", None))
    wanted = next(
        (place.num_channels for place in places if place is not None and hasattr(place, "num_channels")), channels
    )
    if wanted != channels:
        what = f"the model takes images with {wanted} channels, but task.channels is {channels}"
        raise UsageError(what, where="task.channels", remedy=f"set task.channels={wanted}")


@dataclass(frozen=True)
class Models:
    """Makes models of one library by name. By default, a model does not define classes, and does not need files.

    Args:
        options: the options of the task, with `model`, `new_head`, `scratch` and `channels`.
    """

    options: Any

    def classes(self, names: Sequence[str]) -> list[str]:
        """The classes in the order of the logits; `names` are those of the data.

        Raises:
            UsageError: the pretrained model has a different number of classes.
        """
        return list(names)

    def pixels(self) -> Pixels:
        """Properties of images that the model expects."""
        raise NotImplementedError

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        """The model, and names of the weights that the pretrained model lacks.

        Args:
            size: height and width in pixels of the largest training images.
            trained: whether a checkpoint provides the weights, so that pretrained weights are not needed.
        """
        raise NotImplementedError

    def save(self, classes: Sequence[str], *, size: int, folder: Path) -> None:
        """Write what `make` needs from a pretrained model, other than its weights, to `folder`."""

    def export(self, model: nn.Module, about: Mapping[str, Any], folder: Path) -> list[str]:
        """Write what the library needs to load the weights of `model` to `folder`. Returns warnings.

        Args:
            about: how evaluations prepare images: see `ImagePresenter.preparation`.
        """
        return []


@dataclass(frozen=True)
class AutoModels(Models):
    """The models of one class `AutoModelFor...` of transformers. Tasks add the methods `pixels` and `processor`.

    Args:
        folder: the folder in which an earlier start of the run saved the model's config. None: there is none.
    """

    folder: Path | None

    kind: ClassVar[str]
    """`task.kind`."""
    what: ClassVar[str]
    """The purpose of the models, for error messages."""
    head: ClassVar[str]
    """`For...`, as transformers names classes of models that do it."""
    known_names: ClassVar[str] = ""
    """The dict of transformers whose keys are the types of models."""
    own: ClassVar[tuple[str, ...]] = ()
    """The architectures of `task.scratch` that are not from transformers."""
    not_new: ClassVar[frozenset[str]] = frozenset()
    """Types of models that cannot be made without pretrained weights."""
    usual_size: ClassVar[int]
    """Default height and width in pixels."""
    size_keys: ClassVar[tuple[str, ...]] = ("size",)
    """The keys of a processor for the size of images; the first one that exists is used."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Substrings of the names of parameters that the logits do not depend on. They get no gradient, which DDP would
    refuse."""
    problem: ClassVar[str | None] = None
    """`problem_type` of the config, which is for classification."""

    @property  # an attribute with a module could not be sent to loader workers
    def _transformers(self) -> Any:
        return hugging_face.import_transformers(self.kind, "images")

    def config(self, size: int) -> Any:
        """The config of the model.

        Args:
            size: height and width in pixels of the largest training images, for a new model.
        """
        source = self.folder if self.folder and (self.folder / "config.json").is_file() else self.options.model
        if source:
            return hugging_face.load(self._transformers.AutoConfig.from_pretrained, "config", source)

        def defaults(kind: Any, names: Sequence[str]) -> dict[str, Any]:
            return self.defaults(kind, names, size)

        return hugging_face.new_config(self.options.scratch, self.architectures(), what=self.what, defaults=defaults)

    def architectures(self) -> list[str]:
        """The model types that a new model may have."""
        # A dict of names: a loop over the mapping of classes would import every architecture.
        known = set(getattr(importlib.import_module("transformers.models.auto.modeling_auto"), self.known_names))
        return [*self.own, *sorted(known - self.not_new)]

    def defaults(self, kind: Any, names: Sequence[str], size: int) -> dict[str, Any]:
        """Values for keys of a new model's config.

        Args:
            kind: the class of the config.
            names: its keys.
            size: height and width in pixels of the largest training images.
        """
        values = {"image_size": size, "num_channels": self.options.channels}
        return {key: value for key, value in values.items() if key in names or key in kind.attribute_map}

    def _config_of(self, classes: Sequence[str], size: int) -> Any:
        """The config of a model of these classes."""
        config = self.config(size)
        hugging_face.set_labels(config, classes)
        config.problem_type = self.problem
        return config

    def classes(self, names: Sequence[str]) -> list[str]:
        name, new_head = self.options.model, self.options.new_head
        if not name:
            return list(names)
        config = self.config(self.usual_size)
        return hugging_face.check_labels(config, names, head=self.head, name=name, new_head=new_head)

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        config = self._config_of(classes, size)
        check_channels(config, self.options.channels)
        model, new = hugging_face.make_model(
            getattr(self._transformers, f"AutoModel{self.head}"),
            config,
            None if trained else self.options.model,
            what=self.what,
            new_head=self.options.new_head,
        )
        for name, parameter in model.named_parameters():
            if any(part in name for part in self.unused):
                parameter.requires_grad_(False)
        return model, new

    def save(self, classes: Sequence[str], *, size: int, folder: Path) -> None:
        self._config_of(classes, size).save_pretrained(folder)

    def pixels(self) -> Pixels:
        said, usual = processor_of(self.options.model), self.usual_size
        size = next((said[key] for key in self.size_keys if said.get(key)), None)
        size = size or getattr(self.config(usual), "image_size", None) or usual
        return Pixels(side_of(size, default=usual), said.get("image_mean"), said.get("image_std"))

    def processor(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of `preprocessor_config.json` that the task adds: the class, and sizes."""
        raise NotImplementedError

    def export(self, model: nn.Module, about: Mapping[str, Any], folder: Path) -> list[str]:
        processor = {
            "do_resize": True,
            "resample": {"bilinear": 2, "bicubic": 3}[about["interpolation"]],
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": about["mean"],
            "image_std": about["std"],
            **self.processor(about),
        }
        return hugging_face.save_for_image_pipeline(model, processor, folder)
