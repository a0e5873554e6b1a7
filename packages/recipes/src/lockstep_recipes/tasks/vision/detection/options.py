"""Options of object detection."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from lockstep.core.config.config_section import Section
from lockstep_recipes.tasks.vision.image_options import BatchNormChoice, ImageOptions
from lockstep_recipes.tasks.vision.images.options import AugmentOptions, Probability

CENTER = "center"


class ScratchOptions(Section):
    """A new model."""

    architecture: str = CENTER
    """`center` (a small detector without anchors, see `center_detector`), or a model type of transformers such as
    `detr`, `rt_detr`, `d_fine` or `yolos`."""
    sizes: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's config. `center` has the keys `width`, `depth` and `levels`."""


class DetectionOptions(ImageOptions):
    """Object detection with a model of transformers, or with a small detector that needs no pretrained weights.

    Images are resized so that the whole image fits into a square, with padding at the right and at the bottom.
    """

    task: ClassVar[str] = "lockstep_recipes.tasks.vision.detection.task:Detection"

    model: str | None = None
    """A pretrained model: its name on the Hugging Face hub, or a local folder. None: a new model, which `scratch`
    describes."""
    scratch: ScratchOptions = ScratchOptions()
    new_head: bool = False
    """Replace the last layers of a model that already detects other classes."""
    classes: str | list[str] | None = None
    """Names of the classes in the order of their numbers, or a YAML, JSON or text file with the names. None: those of
    the training data."""
    images: str | None = None
    """The folder of the training images, where `data.train` is an annotation file. None: beside the annotations."""
    eval_images: str | None = None
    """The same for evaluation images. None: `images`."""
    on_bad_boxes: Literal["raise", "skip"] = "raise"
    """The treatment of a box that is not finite, has no area, or lies outside of its image: an error, or the box is
    left out of training and evaluation. `skip` also goes on with many boxes that reach over the edge."""
    difficult: bool = False
    """Pascal VOC: whether difficult objects are ordinary objects. Otherwise they are regions that do not count."""
    augment: AugmentOptions = AugmentOptions(crop="scale_jitter", jitter=(0.6, 1.5))
    mosaic: Probability = 0.0
    """Probability that a training image is put together of four images: itself, and three drawn from the training
    data."""
    batch_norm: BatchNormChoice = "group"
    """Statistics that BatchNorm layers use, as for every task on images. If this is not given, a model of transformers
    has `frozen` with pretrained weights and `batch` without: its exported files cannot say that GroupNorm took their
    place."""
    most_boxes: PositiveInt = 300
    """The greatest number of boxes of a prediction. pycocotools uses at most 100 of an image and class."""
    score_threshold: Probability = 0.3
    """Boxes with a smaller score are neither drawn nor shown, and do not count as invented. Metrics, and predictions in
    files, have boxes of every score."""
    nms: Annotated[float, Field(gt=0, le=1)] = 0.6
    """`center`, and images in tiles: of two boxes of a class whose overlap (intersection over union) is above this
    number, the box with the smaller score is left out."""
    tile: PositiveInt | None = None
    """For evaluations and predictions, an image with a longer side than this number of pixels is cut into tiles of at
    most this side, and the boxes of the tiles are put together. None: every image is seen as a whole."""
    tile_overlap: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """The least share of a tile that the next tile covers too. An object that is larger than the common part may be
    found in parts only."""

    def images_of(self, split: Literal["train", "eval"]) -> str | None:
        """The folder of the images of a part of the data, as `images` or `eval_images` gives it."""
        return self.images if split == "train" else self.eval_images or self.images

    @model_validator(mode="before")
    @classmethod
    def _batch_norm_of_transformers(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "batch_norm" in values:
            return values
        scratch = values.get("scratch") or {}
        named = scratch.get("architecture", CENTER) if isinstance(scratch, dict) else CENTER
        if values.get("model"):
            return {**values, "batch_norm": "frozen"}
        return values if named == CENTER else {**values, "batch_norm": "batch"}
