"""Options for object detection."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from lockstep.core.config.config_section import Section
from lockstep_recipes.tasks.vision.image_options import BatchNormChoice, ImageOptions
from lockstep_recipes.tasks.vision.images.options import AugmentOptions, Probability

CENTER = "center"
MOST_COUNTED = 100
"""By COCO's rules, this many boxes per image and class count: the last of pycocotools' `maxDets`."""


class DetectionScratchOptions(Section):
    """A new model."""

    architecture: str = CENTER
    """`center` (a small detector without anchors, see `center_detector`), or a model type of transformers such as
    `detr`, `rt_detr`, `d_fine` or `yolos`."""
    sizes: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's config. `center` has the keys `width`, `depth` and `levels`."""


class DetectionOptions(ImageOptions):
    """Object detection with a transformers model, or with a small detector that does not need pretrained weights.

    Images are resized so that the whole image fits into a square, with padding at the right and at the bottom.
    """

    task: ClassVar[str] = "lockstep_recipes.tasks.vision.detection.task:Detection"

    model: str | None = None
    """A pretrained model: its name on the Hugging Face hub, or a local folder. None: a new model, described by
    `scratch`."""
    scratch: DetectionScratchOptions = DetectionScratchOptions()
    new_head: bool = False
    """Replace the last layers of a model that was trained for different classes."""
    classes: str | list[str] | None = None
    """Names of the classes in the order of their numbers, or a YAML, JSON or text file with the names. None: those of
    the training data."""
    images: str | None = None
    """The folder of the training images, if `data.train` is an annotation file. None: next to the annotations."""
    eval_images: str | None = None
    """The same for evaluation images. None: `images`."""
    on_bad_boxes: Literal["raise", "skip"] = "raise"
    """What to do with a box that is not finite, has no area, or is outside its image: `raise` an error, or `skip` the
    box in training and evaluation. `skip` also accepts many boxes that extend beyond the edge."""
    difficult: bool = False
    """Pascal VOC: treat difficult objects as ordinary objects. Otherwise they are ignored regions."""
    augment: AugmentOptions = AugmentOptions(crop="scale_jitter", jitter=(0.6, 1.5))
    mosaic: Probability = 0.0
    """Probability that a training image is a mosaic of four images: itself, and three drawn from the training data."""
    batch_norm: BatchNormChoice = "group"
    """Statistics that BatchNorm layers use, as in all image tasks. Default for a transformers model: `frozen` with
    pretrained weights and `batch` without, because its exported files cannot express that GroupNorm replaces
    BatchNorm."""
    most_boxes: PositiveInt = 300
    """Maximum number of boxes of a prediction. In evaluations, 100 per image and class count, as by COCO's rules, or as
    many as an image has."""
    score_threshold: Probability = 0.3
    """Boxes with a lower score are neither drawn nor shown, and do not count as false positives. Metrics, and
    predictions in files, include boxes of every score."""
    nms: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Non-maximum suppression for `center` and for images in tiles: of two boxes of a class whose intersection over
    union is above this number, the one with the lower score is removed."""
    tile: PositiveInt | None = None
    """In evaluations and predictions, an image with a side of more than this many pixels is split into tiles of at most
    this side, and the boxes of the tiles are merged. None: every image is processed as a whole."""
    tile_overlap: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Minimum fraction of a tile that overlaps the next tile. An object that is larger than the overlap may only be
    detected in pieces."""

    def images_of(self, split: Literal["train", "eval"]) -> str | None:
        """The folder of the images of a split, from `images` or `eval_images`."""
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
