"""Options for risks from CT volumes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lockstep.configs.task_options import TaskOptions
from lockstep.core.config.config_section import DOES_NOT_DETERMINE, Section
from lockstep.core.errors import number_of
from lockstep_recipes.tasks.vision.images.options import AugmentOptions

HuWindow = str | Annotated[list[float], Field(min_length=2, max_length=2)]


class VolumeRiskScratchOptions(Section):
    """A new backbone."""

    architecture: str = "vit"
    """A model type of transformers, such as `vit` or `dinov2`."""
    sizes: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's config, such as `hidden_size`."""


class AggregatorOptions(Section):
    """The part of the model that combines all slices of a volume into one prediction."""

    name: Literal["transformer", "attention", "mean"] = "transformer"
    """`transformer`: an encoder with a class token and positions in millimetres. `attention`: gated attention pooling.
    `mean`: the mean of the slices."""
    width: PositiveInt = 256
    """Length of the vector of a volume. `mean` has the width of the backbone."""
    layers: PositiveInt = 2
    """Layers of the transformer."""
    heads: PositiveInt = 4
    """Attention heads of the transformer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout in the transformer."""


class VolumeRiskColumnsOptions(Section):
    """Columns of the table, by name or by index from 0. None: the column with a usual name."""

    image: str | int | None = None
    """The paths of the volumes: NIfTI and NumPy files, and folders of DICOM series."""
    patient: str | int | None = None
    """The patients. A patient is never in both training and evaluation data."""


class VolumeRiskOptions(TaskOptions):
    """Yes/no questions about the patient of a CT volume. Answers may be unknown."""

    task: ClassVar[str] = "lockstep_recipes.tasks.ct.task:VolumeRisk"
    preload: ClassVar[tuple[str, ...]] = ("transformers",)

    # ---- data

    columns: VolumeRiskColumnsOptions = VolumeRiskColumnsOptions()
    labels: Annotated[list[str], Field(min_length=1)] | None = None
    """Label columns, by name or pattern such as `death_*`. None: the columns whose names end in a time, such as
    `death_5y`."""
    leaks: list[str] = Field(default_factory=list)
    """Columns, or patterns, that reveal the outcome. They are refused as inputs of the model."""
    fold_seed: int = 0
    """Seed of the folds of `data.fold`. It is separate from `seed`, so that several runs have the same folds."""
    slice_distance_mm: PositiveFloat | None = None
    """Distance in millimetres to which slices are resampled. None: slices are not resampled."""
    allow_gaps: bool = False
    """Report missing slices of a DICOM series in the log instead of raising an error."""
    keep_volumes: Annotated[bool, DOES_NOT_DETERMINE] = True
    """Keep decoded volumes in Lockstep's cache folder. A sample then reads only its own slices."""
    check_volumes: Annotated[bool, DOES_NOT_DETERMINE] = True
    """Read all volumes before the first step, so that unusable volumes are reported at once. This also fills the cache.
    Otherwise an unusable volume is an error when it is first used."""

    # ---- slices

    windows: Annotated[list[HuWindow], Field(min_length=1)] = ["lung", "soft_tissue", "bone"]  # noqa: RUF012
    """The channels of a slice: Hounsfield windows by name (`lung`, `soft_tissue`, `mediastinum`, `bone`, `brain`), or
    `[center, width]`."""
    image_size: PositiveInt = 448
    """Height and width of slices in pixels."""
    max_slices: PositiveInt = 28
    """Maximum number of slices of a volume that pass through the model together."""
    train_slices: Literal["window", "stratified", "even"] = "stratified"
    """Slices of a training sample. `window`: consecutive slices from a random position. `stratified`: a random slice
    from each of `max_slices` equal sections. `even`: evenly spaced slices, as in evaluations."""
    eval_slices: Literal["even", "all"] = "even"
    """Slices of an evaluation sample. `even`: evenly spaced. `all`: all slices, in groups of at most `max_slices`; the
    logits of the groups are averaged."""
    keep_shape: bool = False
    """Pad slices that are not square, instead of stretching them to a square."""
    mean: list[float] | None = None
    """Mean of each channel, from 0 to 1, which is subtracted from pixels. None: ImageNet's for three channels,
    otherwise 0.5."""
    std: list[PositiveFloat] | None = None
    """Standard deviation of each channel, by which pixels are divided. None: as for `mean`."""
    augment: AugmentOptions | None = AugmentOptions(scale=(0.6, 1.0), flip=0.0)
    """Random augmentation of training volumes. All slices of a sample are changed in the same way. None: no
    augmentation."""

    # ---- the model

    model: str | None = None
    """A pretrained backbone: its name on the Hugging Face hub, or a local folder. None: a new backbone, described by
    `scratch`."""
    scratch: VolumeRiskScratchOptions = VolumeRiskScratchOptions()
    pooling: Literal["class_token", "mean"] | None = None
    """The feature vector of a slice. None: the class token if the backbone has one, otherwise the mean of the
    patches."""
    aggregator: AggregatorOptions = AggregatorOptions()
    head: Literal["question", "monotone", "hazard"] = "monotone"
    """`monotone`: the risk of an event never decreases from a horizon to the next. `hazard`: a probability of the event
    in each interval between horizons. `question`: a logit for each question, so that a risk within five years may be
    lower than that within one year."""
    slices_per_chunk: PositiveInt | None = None
    """Maximum number of slices that pass through a trainable backbone together. Their activations are recomputed in the
    backward pass. None: all slices pass together, and activations stay in memory."""
    frozen_epochs: Annotated[int, Field(ge=0)] = 0
    """Epochs, counted from 0, in which `train.unfreeze` leaves the whole backbone frozen. In these epochs slices are
    not augmented, so the features of a slice do not change, and are computed once and cached."""
    keep_features: Annotated[bool, DOES_NOT_DETERMINE] = True
    """Cache features during `frozen_epochs`. The result is the same without the cache."""

    # ---- the loss and the metrics

    loss: Literal["answers", "survival"] = "answers"
    """`answers`: binary cross-entropy of known labels. `survival`: the likelihood of the time of the event in discrete
    time, with censoring; for the heads `hazard` and `monotone`."""
    reduction: Literal["question", "patient"] = "question"
    """Unit of the loss. `question`: the known label (with `survival`: the event with a known label). `patient`: the
    volume with a known label, whose terms are averaged."""
    positive_weights: Literal["balanced"] | dict[str, PositiveFloat] | None = None
    """Factor of the loss of positive labels: `balanced` (negatives / positives of the question in the training data),
    or a factor by question. None: 1. Only for the loss `answers`."""
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The risk from which sensitivity and specificity count a prediction as positive."""
    resamples: Annotated[int, Field(ge=0)] = 1000
    """Number of resamples for the bootstrap intervals. 0: no intervals."""

    @property
    def channels(self) -> int:
        """Channels of a slice."""
        return len(self.windows)

    @model_validator(mode="after")
    def _one_number_for_each_channel(self) -> Self:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.windows):
                raise ValueError(
                    f"{name} has {number_of(len(values), 'number')}, but there are "
                    f"{number_of(len(self.windows), 'window')}"
                )
        return self

    @model_validator(mode="after")
    def _loss_suits_the_head(self) -> Self:
        if self.loss == "survival" and self.head == "question":
            raise ValueError("loss: survival needs risks that never decrease: use head: hazard or head: monotone")
        if self.loss == "survival" and self.positive_weights is not None:
            raise ValueError("positive_weights need loss: answers; remove them, or use loss: answers")
        return self
