"""Base class of the three image tasks: what is derived from the data, the model, and its input pixels."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.data.dataset import member_of
from lockstep.core.errors import DataError
from lockstep_recipes.look.finding import Extent, Finder, of_error
from lockstep_recipes.tasks.class_weights import OnDevice, class_weights
from lockstep_recipes.tasks.metadata import MetadataTask
from lockstep_recipes.tasks.vision.batch_norm import exchange_batch_norm
from lockstep_recipes.tasks.vision.faults import copies, files, formats, labels, name_groups, near_copies
from lockstep_recipes.tasks.vision.faults.view import ImageSplit, ImageView
from lockstep_recipes.tasks.vision.image_models import Models, Pixels
from lockstep_recipes.tasks.vision.images.decode import WHITE, levels_of
from lockstep_recipes.tasks.vision.images.normalise import normalise
from lockstep_recipes.tasks.vision.readers.decoded_images import ImageDataset
from lockstep_recipes.tasks.vision.size_check import check_image_sizes


@dataclass(frozen=True)
class ImageTaskMetadata:
    """What a task derives from its data and its model, and stores with the run."""

    classes: list[str]
    """Names of the classes by number, which is the order of the logits."""
    counts: list[int]
    """Number of training samples, boxes or pixels of each class."""
    mean: list[float]
    """Mean of each channel, from 0 to 1."""
    std: list[float]
    """Standard deviation of each channel, from 0 to 1."""
    size: int
    """Height and width in pixels that suit the model."""
    levels: int = field(default=WHITE, kw_only=True)
    """The value that becomes white in grey images of 16 bits."""


class ImageTask(MetadataTask):
    """An image task. Subclasses add `learn`, `read`, `models`, and the computation from a sample to a loss.

    Args:
        options: an object of `ImageOptions` with `model`.
        train, eval: sources of images.
        cache: options of the disk cache of decoded images (`data.cache`).
    """

    finders: tuple[Finder, ...] = (
        files.refused,
        files.unreadable,
        files.blank,
        formats.odd_format,
        formats.several_frames,
        formats.dark_rgb,
        formats.other_range,
        formats.floats,
        copies.equal_images,
        near_copies.across,
        near_copies.groups_across,
        name_groups.ids_across,
        labels.counts,
        labels.names,
    )
    """What `lockstep look` looks for: see `lockstep_recipes.look`."""

    def __init__(self, options: Any, train: str, eval: str | None, cache: CacheOptions | None) -> None:
        super().__init__(options, train, eval)
        self.cache = cache

    def data_to_look_at(self, extent: Extent) -> ImageView:
        """The images of both splits for the finders. What the task refuses is a finding."""
        splits, refused = [], []
        for name, get in (("training", self.train_data), ("evaluation", self.eval_data)):
            try:
                data = get()
            except DataError as error:
                refused.append(of_error(error))
                data = self.unchecked(name)
            splits += [] if data is None else self.split_to_look_at(name, data, extent)
        return ImageView(splits, refused)

    def unchecked(self, split: str) -> Any:
        """The data of a split that the task refuses, as far as it can be read. None: it cannot."""
        source: Any = self.train_source if split == "training" else self.eval_source
        with contextlib.suppress(DataError):
            return None if source is None else self.read(source, "train" if split == "training" else "eval", None)
        return None

    def split_to_look_at(self, name: str, data: Any, extent: Extent) -> list[ImageSplit]:
        """A split for the finders. Empty: it has no files."""
        pictures = getattr(data, "pictures", None)
        if pictures is None:
            return []
        if isinstance(pictures, ImageDataset):  # windows of images
            return self.split_to_look_at(name, pictures, extent)
        known = {name: getattr(data, name, None) for name in ("masks", "annotations")}
        labels = data.records.labels if hasattr(data, "records") else None
        classes = data.records.classes if labels is not None else data.classes
        return [ImageSplit(name, pictures, extent, labels, classes=classes, levels=data.levels, **known)]

    def save(self, folder: Path) -> None:
        self.models.save(self.about.classes, size=self._largest, folder=folder)

    @property
    def names(self) -> list[str]:
        names: list[str] = self.about.classes
        return names

    classes = names

    def described(self, pixels: Pixels, data: Any, **learned: Any) -> Any:
        """`about`, from the images that a model expects, the training data, and what was derived from it."""
        mean, std = pixels.mean_and_std(self.options)
        pictures = getattr(data, "pictures", None)
        levels = self.options.levels or (WHITE if pictures is None else levels_of(pictures))
        return self.about_type(**{"mean": mean, "std": std, "size": pixels.size, "levels": levels, **learned})

    @property
    def reading_options(self) -> Any:
        """The options to read data with: `levels` is that of the training data."""
        return self.options.model_copy(update={"levels": self.about.levels})

    @contextlib.contextmanager
    def partner(self, index: int, purpose: str) -> Iterator[None]:
        """A training sample that is combined with another one: a DataError in the block names the sample and the
        purpose."""
        try:
            yield
        except DataError as error:
            where = member_of(self._train, "where", str)(index)
            raise DataError(f"the partner for {purpose}: {error.what}", where=where, remedy=error.remedy) from error

    # ---- the model

    @property
    def models(self) -> Models:
        """The object that makes the model."""
        raise NotImplementedError

    @property
    def _largest(self) -> int:
        sizes: list[int] = self.options.all_sizes(self.about.size)
        return sizes[-1]

    def model(self) -> nn.Module:
        options, about = self.options, self.about
        model, self.new_weights = self.models.make(about.classes, size=self._largest, trained=self._trained)
        model = exchange_batch_norm(model, options.batch_norm)
        sizes = options.all_sizes(about.size)
        check_image_sizes(model, sizes, channels=options.channels, forward=self.trial, where="task.image_size")
        return model

    def trial(self, model: nn.Module, images: Tensor) -> Any:
        """The outputs of a new model for normalised images, to try image sizes."""
        return logits_of(model, images)

    def normalised(self, model: nn.Module, images: Tensor) -> Tensor:
        """Images uint8 (batch, channels, height, width), normalised for the model, in its number format."""
        return normalise(images, self.about.mean, self.about.std, dtype=next(model.parameters()).dtype)

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """The class scores of images, uint8 (batch, channels, height, width), in float32 or float64."""
        logits = logits_of(model, self.normalised(model, images))
        return logits if logits.dtype == torch.float64 else logits.float()

    @cached_property
    def _weights(self) -> OnDevice:
        """The weights of the classes in the loss."""
        wanted, about = self.options.class_weights, self.about
        root = wanted == "balanced_sqrt"
        counts = dict(zip(about.classes, about.counts, strict=True))
        found = class_weights("balanced" if root else wanted, about.classes, lambda: counts)
        return OnDevice(found.sqrt() if root and found is not None else found)


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """The class scores of normalised images (batch, channels, height, width): (batch, classes), or for segmentation
    (batch, classes, h, w), where h and w may be smaller than those of the images.

    Position embeddings of transformers models are interpolated to the size of the images.
    """
    options = {"interpolate_pos_encoding": True} if _interpolates(type(model).forward) else {}
    output = model(images, **options)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


@cache
def _interpolates(forward: Callable[..., Any]) -> bool:
    return "interpolate_pos_encoding" in inspect.signature(forward).parameters
