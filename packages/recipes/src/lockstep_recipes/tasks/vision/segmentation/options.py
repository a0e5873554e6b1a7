"""Options for semantic segmentation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lockstep.core.config.config_section import Section
from lockstep_recipes.tasks.vision.image_options import ImageOptions

UNET = "unet"
LossName = Literal["cross_entropy", "focal", "dice", "lovasz"]


class SegmentationScratchOptions(Section):
    """A new model."""

    architecture: str = UNET
    """`unet` (the small network of Lockstep), or a model type of transformers such as `segformer`."""
    sizes: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's config. `unet` has the keys `width`, `depth`, `blocks`, `stride` and `norm`."""


class SegmentationColumnsOptions(Section):
    """Columns of a data set, by name or by index from 0. None: the column with a usual name."""

    image: str | int | None = None
    """The images."""
    mask: str | int | None = None
    """The masks."""


class SegmentationOptions(ImageOptions):
    """Each pixel has a class. Evaluation compares classes at the original resolution of every image."""

    task: ClassVar[str] = "lockstep_recipes.tasks.vision.segmentation.task:Segmentation"

    model: str | None = None
    """A pretrained model: its name on the Hugging Face hub, or a local folder. None: a new model, described by
    `scratch`."""
    scratch: SegmentationScratchOptions = SegmentationScratchOptions()
    new_head: bool = False
    """Replace the last layer of a model that already segments."""

    classes: list[str] | dict[str | int, Any] | str | None = None
    """Names of the classes in the order of their ids, a mapping of names to ids or colours `[r, g, b]`, or the path of
    a class file. None: those of the data. lockstep --explain segmentation lists the forms."""
    ignore: list[int | str | list[int]] = Field(default_factory=list)
    """Ids, names or colours in the masks that loss and metrics ignore."""
    images: str | None = None
    """The folder of the training images, if `data.train` is a COCO file. None: next to the annotations."""
    eval_images: str | None = None
    """The same for evaluation images. None: `images`."""
    columns: SegmentationColumnsOptions = SegmentationColumnsOptions()
    subset: str | None = None
    """Configuration of a data set on the hub."""

    losses: Annotated[dict[LossName, PositiveFloat], Field(min_length=1)] = {"cross_entropy": 1.0}  # noqa: RUF012
    """Losses with their factors in the total loss: `cross_entropy`, `focal`, `dice`, `lovasz`. A single loss is named
    `loss` in the log; several have their own names."""
    focal_gamma: Annotated[float, Field(ge=0)] = 2.0
    """The exponent of the focal loss. 0: cross-entropy."""
    class_weights: Literal["balanced", "balanced_sqrt"] | dict[str, PositiveFloat] | None = None
    """`balanced`: pixels / (classes x pixels of the class), counted in the training masks. `balanced_sqrt`: its square
    root, which is more stable for rare classes. Or a weight by class. Cross-entropy and focal loss are then weighted
    means over pixels."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing: in training, cross-entropy spreads this fraction of each label evenly over all classes."""

    eval_shape: Literal["keep", "square"] = "keep"
    """`keep`: evaluation images keep their aspect ratio, and `eval_size` is their shorter side. `square`: they are
    resized to a square of `eval_size`, for models with a fixed size."""
    eval_window: PositiveInt | None = None
    """Side in pixels of the windows for evaluation and prediction at the original resolution. None: images are
    processed as a whole."""
    eval_overlap: Annotated[float, Field(ge=0, le=0.9)] = 0.25
    """Minimum overlap of neighbouring windows, as a fraction of `eval_window`."""
    flip_at_evaluation: bool = False
    """In evaluations, average the probabilities of each image and its mirror image. This takes twice the time."""
    boundary_tolerance: Annotated[float, Field(ge=0, le=0.1)] | None = 0.0075
    """The tolerance of the boundary F1, as a fraction of the image's diagonal. None: no boundary F1."""

    def images_of(self, split: Literal["train", "eval"]) -> str | None:
        """The folder of the images of a split, from `images` or `eval_images`."""
        return self.images if split == "train" else self.eval_images or self.images

    def never_reached(self, epochs: int) -> dict[str, str]:
        # Only square evaluation images have a size of `image_size`.
        return super().never_reached(epochs) if self.eval_shape == "square" else {}

    @field_validator("losses", mode="before")
    @classmethod
    def _with_factors(cls, losses: Any) -> Any:
        if isinstance(losses, str | list | tuple):
            names = [losses] if isinstance(losses, str) else losses
            example = ", ".join(f"{name}: 1.0" for name in names) or "cross_entropy: 1.0"
            raise ValueError(f"{losses!r} does not give factors; write {{{example}}}")
        return losses

    @model_validator(mode="after")
    def _one_way_to_evaluate(self) -> Self:
        if self.eval_window and self.eval_size:
            raise ValueError("eval_window uses images at their own resolution; remove eval_size or eval_window")
        if self.eval_resize:
            what = "eval_resize crops the centre, but every pixel is evaluated; use eval_size, the shorter side"
            raise ValueError(what)
        if self.eval_shape == "square" and self.eval_window:
            raise ValueError("eval_window needs eval_shape: keep")
        return self
