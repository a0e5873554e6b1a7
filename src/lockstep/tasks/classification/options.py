"""Options of image classification."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lockstep.config_section import Section
from lockstep.tasks.image_options import ImageOptions
from lockstep.tasks.options import TableOptions

CONVNET = "convnet"
TIMM = "timm:"
"""Names of models and architectures of timm begin with this."""


class ScratchOptions(Section):
    """A new model."""

    architecture: str = CONVNET
    """`convnet` (the small network of the demo), a model type of transformers such as `resnet`, or `timm:NAME`."""
    sizes: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's config, such as `depths`. `convnet` has the key `width`."""


class ColumnsOptions(Section):
    """Columns of a table or a data set, by name or by place counted from 0. None: the column with a usual name."""

    image: str | int | None = None
    """The pictures, or their paths."""
    label: str | int | None = None
    """The labels. For tar shards: the field of KEY.json."""


class ClassificationOptions(TableOptions, ImageOptions):
    """Image classification with a model of transformers or timm, or with a small convolutional network."""

    task: ClassVar[str] = "lockstep.tasks.classification.task:Classification"

    model: str | None = None
    """A pretrained model: its name on the Hugging Face hub, a local folder, or `timm:NAME`. None: a new model, which
    `scratch` describes."""
    scratch: ScratchOptions = ScratchOptions()
    new_head: bool = False
    """Whether to replace the last layer of a model that already classifies."""
    columns: ColumnsOptions = ColumnsOptions()
    subset: str | None = None
    """Configuration of a data set on the hub."""
    mixup_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Shares of mixup are drawn from Beta(alpha, alpha). 0: no mixup."""
    cutmix_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Shares of cutmix are drawn from Beta(alpha, alpha). 0: no cutmix. With mixup too, each is drawn half the time."""
    mix_probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The probability that a training sample is mixed with a partner, if `mixup_alpha` or `cutmix_alpha` is set."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """In training, this share of each label is spread evenly over all classes."""
    class_weights: Literal["balanced"] | dict[str, PositiveFloat] | None = None
    """`balanced`, or a weight by class. The loss is then a weighted mean, as in torch's cross_entropy."""
    top_k: PositiveInt = 5
    """Number of classes that a prediction lists, and the k of the metric top-k accuracy."""
