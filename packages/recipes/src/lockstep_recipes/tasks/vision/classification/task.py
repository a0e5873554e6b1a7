"""Image classification: the embedded digits, or labelled images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import DataError, UsageError
from lockstep.core.task import Metrics
from lockstep_recipes.recipes.digits import Digits
from lockstep_recipes.tasks.readers.labels import check_groups_apart, count_labels, split_groups
from lockstep_recipes.tasks.readers.labels import split as split_labels
from lockstep_recipes.tasks.vision.classification.models import median_side, models_for, size_for
from lockstep_recipes.tasks.vision.classification.options import AUTO, CONVNET4, RESNET9, ClassificationOptions, Decided
from lockstep_recipes.tasks.vision.classification.presenter import ClassificationPresenter, ClassificationTask, Sample
from lockstep_recipes.tasks.vision.faults import classes
from lockstep_recipes.tasks.vision.image_models import Models
from lockstep_recipes.tasks.vision.image_task import ImageTaskMetadata
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, stack_images
from lockstep_recipes.tasks.vision.images.augment import eval_image, train_image
from lockstep_recipes.tasks.vision.images.cache import reduced
from lockstep_recipes.tasks.vision.images.decode import decode
from lockstep_recipes.tasks.vision.images.mix import draw_partner, mix
from lockstep_recipes.tasks.vision.readers.decoded_images import DecodedImages
from lockstep_recipes.tasks.vision.readers.image_records import evaluation_source, read_image_records

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Batch = dict[str, Tensor]

_DIGITS = "digits"
_DIGITS_SIZE = 8


@dataclass(frozen=True)
class ClassificationMetadata(ImageTaskMetadata):
    """What the task stores with the run. `counts` are numbers of samples."""

    side: int | None = None
    """The median of the shorter sides of the training images in pixels. None: no option depends on it."""


@final
class Classification(ClassificationTask):
    """Each image has a label. The loss is the cross-entropy, summed over samples.

    The metrics are accuracy, top-k accuracy, macro F1 and the confusion matrix. A batch is a dict of `images`: uint8
    (samples, channels, height, width), and `labels`: int64 (samples). With mixup or cutmix, training batches also have
    `partner_labels`: int64 (samples), and `label_share`: float32 (samples), the weight of `labels` in the target.

    Args:
        train, eval: `digits`, or a source of images: see `readers.image_records.read_image_records`. Without `eval`,
            the evaluation split of the folder `train` is used, if there is one; otherwise the fraction
            `options.eval_fraction` of the images in `train` is held back.
        cache: options of the disk cache of decoded images (`data.cache`).
    """

    presenter = ClassificationPresenter
    finders = (*ClassificationTask.finders, classes.rare_class, classes.given_away)
    kept = "classification.json"
    about_type = ClassificationMetadata

    def __init__(
        self, options: ClassificationOptions, train: str, eval: str | None = None, cache: CacheOptions | None = None
    ) -> None:
        eval = eval or (None if train == _DIGITS else evaluation_source(train))
        super().__init__(options, train, eval, cache)

    def learn(self) -> Any:
        records, options = self._records(self.train_source, "train", None), self.options
        if len(records.classes) < 2:
            what = f"there is only the class {records.classes[0]!r}" if records.classes else "there are no classes"
            raise DataError(what, where=self.train_source, remedy="give images of two classes or more")
        models = models_for(options, None)
        classes, pixels = models.classes(records.classes), models.pixels()
        rows = self._rows(records)[0]
        counts = count_labels(records.classes, records.labels if rows is None else records.labels[rows])
        small_model = options.model is None and options.scratch.architecture in (AUTO, CONVNET4, RESNET9)
        by_data = small_model and options.image_size is None
        digits = self.train_source == _DIGITS
        side = None
        if by_data or options.asks_the_images:
            side = _DIGITS_SIZE if digits else median_side(records)
        return self.described(
            pixels,
            records,
            classes=classes,
            counts=[counts.get(name, 0) for name in classes],
            size=_DIGITS_SIZE if digits else size_for(side) if by_data and side else pixels.size,
            side=side,
        )

    @cached_property
    def decided(self) -> Decided:
        """The options with `auto` replaced for the training images."""
        return self.options.decided(self.about.side)

    # ---- data

    def _records(self, source: str, split: Literal["train", "eval"], classes: list[str] | None) -> Any:
        if source == _DIGITS:
            return Digits(training=split == "train")
        return read_image_records(source, split, self.options, classes=classes)

    def _rows(self, records: Any) -> tuple[Any, Any]:
        """The rows of the training source to train with, and those held back. (None, None): no split.

        Args:
            records: the training source, with its own classes: their order decides which class contributes one more.
        """
        if not self.options.eval_fraction or self.eval_source is not None or isinstance(records, Digits):
            return None, None
        fraction, seed = self.options.eval_fraction, self.options.split_seed
        if records.groups is not None:
            return split_groups(records.labels, records.groups, fraction, seed)
        return split_labels(records.labels, fraction, seed)

    @cached_property
    def _split(self) -> tuple[Any, Any]:
        if not self.options.eval_fraction or self.eval_source is not None:
            return None, None  # the source does not have to be read again
        return self._rows(self._records(self.train_source, "train", None))

    def read(self, source: str, split: Literal["train", "eval"], names: list[str] | None) -> Any:
        records = self._records(source, split, names)
        return records if isinstance(records, Digits) else DecodedImages(records, channels=self.options.channels)

    def _data(self, source: str, split: Literal["train", "eval"], rows: Any = None) -> Digits | DecodedImages:
        records = self._records(source, split, self.classes)
        if isinstance(records, Digits):
            return records
        records = records if rows is None else records.part(rows)
        return DecodedImages(records, channels=self.options.channels, levels=self.about.levels, cache=self.cache)

    @cached_property
    def _train(self) -> Digits | DecodedImages:
        return self._data(self.train_source, "train", self._split[0])

    @cached_property
    def _eval(self) -> Digits | DecodedImages | None:
        if self.eval_source is not None:
            data = self._data(self.eval_source, "eval")
            if self.options.columns.group is not None and not self._trained:
                assert isinstance(self._train, DecodedImages)
                assert isinstance(data, DecodedImages)
                groups = self._train.records.groups, data.records.groups
                check_groups_apart(*groups, where=self.eval_source)
            return data
        held = self._split[1]
        return None if held is None or not len(held) else self._data(self.train_source, "train", held)

    @property
    def held_back(self) -> str | None:
        """A sentence about the images that are held back for evaluation. None: none should be held back."""
        rows, held = self._split
        if held is None:
            return None
        options = self.options
        of = f"of the {len(rows) + len(held):,} images in {self.train_source}"
        keys = f"task.eval_fraction={options.eval_fraction:g}, task.split_seed={options.split_seed}"
        if not len(held):
            return f"no images {of} are held back for evaluation ({keys}): there are too few images, or one per class"
        return f"{len(held):,} {of} are held back for evaluation ({keys})"

    # ---- the model

    @cached_property
    def models(self) -> Models:
        return models_for(self.options, self.folder, architecture=self.decided.architecture)

    def model(self) -> nn.Module:
        options, about = self.options, self.about
        size = options.size_for_evaluation(about.size)
        if options.eval_resize and options.eval_resize < size:
            what = f"images are resized to {options.eval_resize} pixels, but the crop needs {size}"
            remedy = f"set it to {size} or more, or set task.eval_size"
            raise UsageError(what, where="task.eval_resize", remedy=remedy)
        return super().model()

    # ---- from an image to a batch

    def prepare(self, sample: Sample, epoch: int, training: bool) -> dict[str, Any]:
        """The image, uint8 (channels, size, size), and its label. In training, it is augmented and mixed with a
        partner."""
        image, label = self._labelled(sample, epoch, training)
        item = {"images": image, "labels": label}
        if training and (self.options.mixup_alpha or self.decided.cutmix_alpha):
            self._mix(item, epoch)
        return item

    def _labelled(self, sample: Sample, epoch: int, training: bool) -> tuple[Tensor, int]:
        options, default = self.options, self.about.size
        pixels = sample[0]
        if isinstance(pixels, bytes):
            # Files to predict are not cached: reduce them as the cache reduces training images.
            side = self.cache.shorter_side if self.cache else None
            pixels = reduced(decode(pixels, channels=options.channels, levels=self.about.levels), side)
        picture = AnnotatedImage(pixels) if isinstance(pixels, Tensor) else AnnotatedImage.from_pixels(pixels)
        if training:
            picture = train_image(picture, options.size_at(epoch, default), self.decided.augment)
        else:
            size = options.size_for_evaluation(default)
            resize, interpolation = options.eval_resize, options.augment.interpolation
            picture = eval_image(picture, size, resize=resize, interpolation=interpolation)
        label, classes = int(sample[1]), len(self.about.classes)
        if not -1 <= label < classes:
            raise DataError(f"label {label} is out of range", remedy=f"labels are 0 to {classes - 1}")
        return picture.image, label

    def _mix(self, item: dict[str, Any], epoch: int) -> None:
        """Mix a prepared sample with another training sample, which is drawn, read and augmented here.

        All random numbers belong to the sample, so the result does not depend on ranks or micro-batches.
        """
        item |= {"partner_labels": item["labels"], "label_share": 1.0}
        data, options = self._train, self.options
        index = draw_partner(len(data), options.mix_probability)
        if index is None:
            return
        with self.partner(index, "mixing"):
            image, label = self._labelled(data[index], epoch, training=True)
        item["images"], item["label_share"] = mix(
            item["images"], image, mixup_alpha=options.mixup_alpha, cutmix_alpha=self.decided.cutmix_alpha
        )
        item["partner_labels"] = label

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        batch = {"images": stack_images([sample["images"] for sample in samples])}
        for name in samples[0]:
            if name != "images":
                kind = torch.float32 if name == "label_share" else torch.int64
                batch[name] = torch.tensor([sample[name] for sample in samples], dtype=kind)
        return batch

    # ---- from a batch to a loss

    def weight(self, batch: Batch) -> Tensor | None:
        """With class weights, the weights of the samples' labels. A mixed sample has the weighted mean of both."""
        weights = self._weights.tensor
        if weights is None:
            return None
        if "partner_labels" not in batch:
            return weights[batch["labels"]].sum()
        share = batch["label_share"]
        return (share * weights[batch["labels"]] + (1 - share) * weights[batch["partner_labels"]]).sum()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self._logits(model, batch["images"])
        loss = self._loss(logits, batch, smoothing=self.options.label_smoothing if model.training else 0.0)
        return loss, logits.detach().softmax(dim=-1)

    def _loss(self, logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
        """The sum of the cross-entropies. A mixed sample has the weighted mean of the cross-entropies for its own and
        its partner's label. That equals the cross-entropy with the mixed target, because it is linear in the target."""
        weights = self._weights.like(logits)

        def cross_entropy(labels: Tensor, reduction: str) -> Tensor:
            options: dict[str, Any] = {"weight": weights, "label_smoothing": smoothing}
            return functional.cross_entropy(logits, labels, reduction=reduction, **options)

        if "partner_labels" not in batch:
            return cross_entropy(batch["labels"], "sum")
        share = batch["label_share"].to(logits)
        own, partner = (cross_entropy(batch[name], "none") for name in ("labels", "partner_labels"))
        return (share * own + (1 - share) * partner).sum()

    # ---- outputs

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Probabilities by class: (samples, classes)."""
        return self._logits(model, batch["images"]).softmax(dim=-1)

    def metrics(self) -> Metrics:
        """`accuracy`, `accuracy_top5` (if there are more than 5 classes), `macro_f1`, and the matrix `confusion`."""
        from lockstep_recipes.tasks.class_metrics import class_metrics

        return Metrics(class_metrics(len(self.classes), top_k=self.options.top_k), self._update)

    @staticmethod
    def _update(metrics: MetricCollection, output: Tensor, batch: Batch) -> None:
        """Update with a batch. A mixed image counts as the class with the larger weight."""
        from lockstep_recipes.tasks.class_metrics import update_class_metrics

        labels = batch["labels"]
        if "partner_labels" in batch:
            labels = torch.where(batch["label_share"] < 0.5, batch["partner_labels"], labels)
        update_class_metrics(metrics, output, labels)
