"""Options for image classification."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from lockstep.configs.task_options import TableOptions
from lockstep.core.config.config_section import Section
from lockstep_recipes.tasks.vision.image_options import ImageOptions
from lockstep_recipes.tasks.vision.images.options import AugmentOptions, Crop

CONVNET = "convnet"
RESNET9 = "resnet9"
CONVNET4 = "convnet4"
AUTO: Final = "auto"
TIMM = "timm:"
"""The prefix of names of timm models and architectures."""


SMALL = 64
"""Images are small if their shorter side (the median of about 100 training images) has at most this many pixels."""


class ClassificationAugmentOptions(AugmentOptions):
    """Augmentation of training images: crop, flips, one policy, colour, erasing, in this order."""

    crop: Crop | Literal["auto"] = "random_resized"  # type: ignore[assignment]
    """As in all image tasks, or `auto`: `shift` if the training images are small, that is, if the median of
    their shorter sides is 64 pixels or less; otherwise `random_resized`."""


class Decided(NamedTuple):
    """The values that replace `auto`."""

    architecture: str
    """`scratch.architecture`."""
    augment: AugmentOptions
    cutmix_alpha: float


class ClassificationScratchOptions(Section):
    """A new model."""

    architecture: str = CONVNET
    """`convnet` (the small network of the demo), `convnet4` and `resnet9` (those of `image_folder`), `auto` (`convnet4`
    if the training images are small, as for `augment.crop`, otherwise `resnet9`), a model type of transformers such
    as `resnet`, or `timm:NAME`."""
    sizes: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's config, such as `depths`. `convnet`, `convnet4` and `resnet9` have the key `width`."""


class ClassificationColumnsOptions(Section):
    """Columns of a table or a data set, by name or by index from 0. None: the column with a usual name."""

    image: str | int | None = None
    """The images, or their paths."""
    label: str | int | None = None
    """The labels. For tar shards: the field of KEY.json."""
    group: str | int | None = None
    """What images share if they must be on one side of the split, such as a patient or a video. `folder`, without such
    a column: the folder of the image."""


class ClassificationOptions(TableOptions, ImageOptions):
    """Image classification with a model of transformers or timm, or with a small convolutional network."""

    task: ClassVar[str] = "lockstep_recipes.tasks.vision.classification.task:Classification"

    model: str | None = None
    """A pretrained model: its name on the Hugging Face hub, a local folder, or `timm:NAME`. None: a new model,
    described by `scratch`."""
    scratch: ClassificationScratchOptions = ClassificationScratchOptions()
    new_head: bool = False
    """Replace the last layer of a model that already classifies."""
    columns: ClassificationColumnsOptions = ClassificationColumnsOptions()
    augment: ClassificationAugmentOptions = ClassificationAugmentOptions()
    """Random augmentation of training images."""
    subset: str | None = None
    """Configuration of a data set on the hub."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Without evaluation data: the fraction of every class that is held back for evaluation."""
    split_seed: Annotated[int, Field(ge=0)] = 0
    """Seed for choosing the images that are held back."""
    mixup_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of mixup: the mixing ratio is drawn from Beta(alpha, alpha). 0: no mixup."""
    cutmix_alpha: Annotated[float, Field(ge=0)] | Literal["auto"] = 0.0
    """Alpha of cutmix: the mixing ratio is drawn from Beta(alpha, alpha). 0: no cutmix. `auto`: 0 if the training
    images are small, as for `augment.crop`, otherwise 1. If mixup is also set, each is used half the time."""
    mix_probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The probability that a training sample is mixed with a partner, if `mixup_alpha` or `cutmix_alpha` is set."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing: in training, this fraction of each label is spread evenly over all classes."""
    class_weights: Literal["balanced"] | dict[str, PositiveFloat] | None = None
    """`balanced`, or a weight by class. The loss is then a weighted mean, as in torch's cross_entropy."""
    top_k: PositiveInt = 5
    """Number of classes that a prediction lists, and the k of the metric top-k accuracy."""

    @property
    def asks_the_images(self) -> bool:
        """True if any option is `auto`, so that the size of the training images decides."""
        new = self.scratch.architecture if self.model is None else None
        return AUTO in (new, self.augment.crop, self.cutmix_alpha)

    def decided(self, side: int | None) -> Decided:
        """These options with `auto` replaced by values that suit the training images.

        Small images have few pixels to lose, so they are shifted instead of cropped, and cutmix is off.

        Args:
            side: the median of the shorter sides of the training images in pixels, before they are resized. None:
                unknown, because no option is `auto`.
        """
        small = side is not None and side <= SMALL
        architecture, crop, alpha = self.scratch.architecture, self.augment.crop, self.cutmix_alpha
        if architecture == AUTO:
            architecture = CONVNET4 if small else RESNET9
        if crop == AUTO:
            crop = "shift" if small else "random_resized"
        if alpha == AUTO:
            alpha = 0.0 if small else 1.0
        return Decided(architecture, AugmentOptions(**self.augment.model_dump() | {"crop": crop}), alpha)
