"""Options of all image tasks: the size of images as a function of the epoch, and how pixels are read."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from lockstep.configs.task_options import TaskOptions
from lockstep_recipes.tasks.vision.images.options import AugmentOptions


def _from_epoch_0(sizes: dict[int | float, int]) -> dict[int | float, int]:
    if 0 not in sizes or min(sizes) < 0:
        raise ValueError("does not give a size for epoch 0; write {0: 128, 20: 160}, with epochs counted from 0")
    shares = [place for place in sizes if isinstance(place, float)]
    if shares and (max(sizes) >= 1 or len(shares) < len(sizes) - 1):
        what = (
            "the keys are neither epochs nor fractions; write {0: 128, 20: 160} or {0: 128, 0.5: 160}, with "
            "fractions below 1"
        )
        raise ValueError(what)
    return dict(sorted(sizes.items()))


_SizeByEpoch = Annotated[
    dict[int | Annotated[float, Field(allow_inf_nan=False)], PositiveInt],
    Field(min_length=1),
    AfterValidator(_from_epoch_0),
]
ImageSize = PositiveInt | _SizeByEpoch | None
BatchNormChoice = Literal["batch", "sync", "frozen", "group"]


class ImageOptions(TaskOptions):
    """Sizes of images, their channels, augmentation and normalisation.

    The size is a pure function of the epoch, so a run that resumes at any step has the same sizes as an uninterrupted
    run. Small images in the first epochs save time: Howard, https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html.
    """

    image_size: ImageSize = None
    """Height and width of training images in pixels. `{0: 128, 20: 160}`: 128 pixels from epoch 0, and 160 pixels from
    epoch 20. `{0: 128, 0.4: 160}`: 160 pixels after 0.4 of the epochs, rounded to whole epochs; the run stores these
    epochs. None: the size that suits the model."""
    image_size_between: Literal["step", "linear"] = "step"
    """How the size changes between the epochs of `image_size`: in steps, or linearly."""
    image_size_multiple: PositiveInt = 32
    """With `linear`, sizes between are rounded to multiples of this number of pixels."""
    eval_size: PositiveInt | None = None
    """Height and width of evaluation images in pixels. None: the last size of `image_size`."""
    eval_resize: PositiveInt | None = None
    """In evaluations, the shorter side of an image is resized to this many pixels, and the centre is cropped. None: the
    whole image is resized to `eval_size`, whatever its aspect ratio."""

    channels: Literal[1, 3] = 3
    """1 for grey images, 3 for RGB."""
    levels: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The value that becomes white in grey images of 16 bits, such as 4095 for 12 bits. None: 255, 1023, 4095, 16383 or
    65535, the smallest that no training image exceeds."""
    mean: list[float] | None = None
    """Mean of each channel, from 0 to 1, which is subtracted from pixels. None: that of the pretrained model; for a new
    model ImageNet's, or 0.5 for grey images."""
    std: list[PositiveFloat] | None = None
    """Standard deviation of each channel, by which pixels are divided. None: as for `mean`."""
    augment: AugmentOptions = AugmentOptions()
    """Random augmentation of training images."""
    batch_norm: BatchNormChoice = "batch"
    """Statistics that BatchNorm layers use. `batch`: those of the micro-batch of a rank. `sync`: those of all ranks, on
    CUDA. `frozen`: the running statistics of the pretrained model. `group`: replace BatchNorm by GroupNorm."""

    @model_validator(mode="after")
    def _one_number_for_each_channel(self) -> Self:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.channels:
                raise ValueError(f"{name} has {len(values)} numbers, but channels is {self.channels}")
        return self

    @model_validator(mode="after")
    def _crop_fits(self) -> Self:
        size = self.size_for_evaluation(0)  # 0: the size of the model
        if self.eval_resize and self.eval_resize < size:
            what = f"eval_resize ({self.eval_resize}) is below the size of evaluation images ({size})"
            raise ValueError(f"{what}; use eval_resize >= {size}, or set eval_size")
        return self

    def for_epochs(self, epochs: int | None) -> Self:
        """Convert fractions of the run in `image_size` to epochs, so that the last size has at least one epoch.

        Raises:
            ValueError: the number of epochs is not known.
        """
        if not self._shares:
            return self
        if epochs is None:
            what = f"image_size: {self._shares[-1]} is a fraction of the run, but the number of epochs is unknown here"
            raise ValueError(f"{what}; write epochs, or set train.epochs and train.min_steps=null")
        assert isinstance(self.image_size, dict)
        sizes = {min(math.floor(share * epochs + 0.5), epochs - 1): size for share, size in self.image_size.items()}
        return self.model_copy(update={"image_size": sizes})

    @property
    def _shares(self) -> list[float]:
        sizes = self.image_size if isinstance(self.image_size, dict) else {}
        return [place for place in sizes if isinstance(place, float)]

    @property
    def _by_epoch(self) -> dict[int, int]:
        """Sizes by their first epoch, if `image_size` has several."""
        assert isinstance(self.image_size, dict)
        if self._shares:
            raise ValueError("task.image_size contains fractions of the run: call ImageOptions.for_epochs first")
        return {int(epoch): size for epoch, size in self.image_size.items()}

    def size_at(self, epoch: int, default: int) -> int:
        """Height and width in pixels of training images in `epoch`, counted from 0.

        Args:
            default: the size if `image_size` is None.
        """
        if not isinstance(self.image_size, dict):
            return self.image_size or default
        between = self.image_size_between == "linear"
        return size_at(self._by_epoch, epoch, multiple=self.image_size_multiple if between else None)

    def all_sizes(self, default: int) -> list[int]:
        """Every size that images have in training or evaluation, sorted."""
        sizes = {self.size_at(epoch, default) for epoch in self._changes()}
        return sorted(sizes | {self.size_for_evaluation(default)})

    def size_for_evaluation(self, default: int) -> int:
        """Height and width in pixels of evaluation images."""
        if isinstance(self.image_size, dict):
            return self.eval_size or list(self.image_size.values())[-1]
        return self.eval_size or self.image_size or default

    def never_reached(self, epochs: int) -> dict[str, str]:
        last = self._changes()[-1]
        if self.eval_size or last < epochs:
            return {}
        size = self.size_for_evaluation(0)
        what = f"{size} pixels from epoch {last} (counted from 0), but the run ends after {epochs} epochs"
        remedy = f"evaluations would use {size} pixels anyway; set task.eval_size, or remove this size"
        return {"image_size": f"{what}; {remedy}"}

    def _changes(self) -> list[int]:
        """The epochs in which the size may change."""
        if not isinstance(self.image_size, dict):
            return [0]
        if self.image_size_between == "linear":
            return list(range(max(self._by_epoch) + 1))
        return list(self._by_epoch)


def size_at(sizes: dict[int, int], epoch: int, *, multiple: int | None) -> int:
    """The size in pixels in `epoch`.

    Args:
        sizes: sizes by their first epoch, sorted. The first key is 0.
        multiple: between two epochs, the size changes linearly, and is rounded (half up) to a multiple of this many
            pixels. At the epochs of `sizes` it is not rounded. None: the size is a step function.
    """
    before = max(start for start in sizes if start <= epoch)
    after = min((start for start in sizes if start > epoch), default=None)
    if multiple is None or after is None or before == epoch:
        return sizes[before]
    length = after - before
    exact = sizes[before] * (after - epoch) + sizes[after] * (epoch - before)  # times `length`: integers are exact
    rounded = (2 * exact + length * multiple) // (2 * length * multiple) * multiple
    low, high = sorted((sizes[before], sizes[after]))
    return min(max(rounded, low), high)
