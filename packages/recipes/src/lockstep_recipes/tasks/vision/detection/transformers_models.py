"""transformers' detectors: DETR and its relatives, RT-DETR, D-FINE and YOLOS."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.vision.detection import transformers_losses
from lockstep_recipes.tasks.vision.detection.models import DetectionModels, Detections, Targets
from lockstep_recipes.tasks.vision.detection.options import CENTER
from lockstep_recipes.tasks.vision.detection.transformers_boxes import Outputs, boxes_of, inside_of, labels_of, stretch
from lockstep_recipes.tasks.vision.detection.transformers_losses import Labels, Predictions, SetLosses
from lockstep_recipes.tasks.vision.image_models import AutoModels, Pixels, processor_of, side_of

_SIZE = 640  # default size in pixels
_TIMM_BACKBONE = "timm_backbone"

Padding = Literal["masked", "stretched"]
"""How to handle an image that does not fill its square. `masked`: the padding is masked. `stretched`: the image
is stretched to the whole square, because the model's anchors and position embeddings cover all of it."""


class _Family(NamedTuple):
    """The differences between the kinds of detectors."""

    losses: Callable[[Any], SetLosses]
    """Makes the losses from the model's config."""
    padding: Padding
    scores: Literal["softmax", "sigmoid"]
    processor: str
    """The class of transformers that prepares images for an exported model."""


_Losses = transformers_losses
_FAMILIES: Mapping[str, _Family] = {
    "detr": _Family(_Losses.SoftmaxLosses, "masked", "softmax", "DetrImageProcessor"),
    "table-transformer": _Family(_Losses.SoftmaxLosses, "masked", "softmax", "DetrImageProcessor"),
    "conditional_detr": _Family(_Losses.FocalLosses, "masked", "sigmoid", "ConditionalDetrImageProcessor"),
    "deformable_detr": _Family(_Losses.FocalLosses, "masked", "sigmoid", "DeformableDetrImageProcessor"),
    "yolos": _Family(_Losses.SoftmaxLosses, "stretched", "softmax", "YolosImageProcessor"),
    "rt_detr": _Family(_Losses.VarifocalLosses, "stretched", "sigmoid", "RTDetrImageProcessor"),
    "rt_detr_v2": _Family(_Losses.VarifocalLosses, "stretched", "sigmoid", "RTDetrImageProcessor"),
    "d_fine": _Family(_Losses.FineLosses, "stretched", "sigmoid", "RTDetrImageProcessor"),
}


@dataclass(frozen=True)
class TransformersDetectors(AutoModels, DetectionModels):
    """The transformers detectors that `AutoModelForObjectDetection` makes."""

    kind = "detection"
    what = "object detection"
    head = "ForObjectDetection"
    usual_size = _SIZE

    @functools.cached_property
    def _loaded(self) -> Any:
        """The config of the model. Copy it before changing it."""
        config = super().config(_SIZE)
        key = "task.model" if self.options.model else "task.scratch.architecture"
        if config.model_type not in _FAMILIES:
            remedy = f"there are: {', '.join(_FAMILIES)}"
            raise UsageError(f"a detector of type {config.model_type!r} is not supported", where=key, remedy=remedy)
        if config.model_type == "yolos" and config.auxiliary_loss:
            remedy = "set auxiliary_loss to false"
            raise UsageError("YOLOS of transformers has no auxiliary losses", where=key, remedy=remedy)
        self._check_backbone(config, key)
        return config

    @staticmethod
    def _check_backbone(config: Any, key: str) -> None:
        backbone = getattr(config, "backbone_config", None)
        if getattr(backbone, "model_type", None) == _TIMM_BACKBONE and importlib.util.find_spec("timm") is None:
            name = getattr(backbone, "backbone", "unnamed")
            remedy = "use a detector with a transformers backbone, or pip install timm"
            what = f"its backbone ({name}) is a timm model, but timm is not installed"
            raise UsageError(what, where=key, remedy=remedy)

    def config(self, size: int) -> Any:
        return self._loaded.__class__.from_dict(self._loaded.to_dict())

    def architectures(self) -> list[str]:
        return [CENTER, *_FAMILIES]

    def defaults(self, kind: Any, names: Sequence[str], size: int) -> dict[str, Any]:
        side = self.options.all_sizes(size)[-1]
        values: dict[str, Any] = {"num_channels": self.options.channels, "image_size": [side, side]}
        # Without pretrained weights, frozen statistics would never match the data.
        values["freeze_backbone_batch_norms"] = False
        known = {key: value for key, value in values.items() if key in names}
        return known | ({} if "backbone_config" not in names else {"use_timm_backbone": False})

    @property
    def _family(self) -> _Family:
        return _FAMILIES[self._loaded.model_type]

    @functools.cached_property
    def _losses(self) -> SetLosses:
        return self._family.losses(self._loaded)

    def pixels(self) -> Pixels:
        said = processor_of(self.options.model)
        size = said.get("pad_size") or said.get("size") or _SIZE
        size = side_of(size, keys=("height", "max_height", "shortest_edge"), default=_SIZE)
        if said.get("do_normalize", True):
            return Pixels(size, said.get("image_mean"), said.get("image_std"))
        return Pixels(size, [0.0] * self.options.channels, [1.0] * self.options.channels)

    def make(self, classes: Sequence[str], *, size: int, trained: bool) -> tuple[nn.Module, list[str]]:
        model, new = super().make(classes, size=size, trained=trained)
        _choose_trainable(model, pretrained=bool(self.options.model))
        made: Any = model
        made.loss_function = transformers_losses.keep_predictions
        return model, new

    def coefficients(self) -> Mapping[str, float]:
        return self._losses.coefficients()

    def weights(self, targets: Targets) -> dict[str, Tensor]:
        return self._losses.weights(targets.counts)

    def forward(self, model: nn.Module, images: Tensor, shapes: Tensor, targets: Targets | None) -> Outputs:
        images = stretch(images, shapes) if self.stretches else images
        return self._outputs(model, images, shapes, targets)

    @property
    def stretches(self) -> bool:
        return self._family.padding == "stretched"

    def _outputs(self, model: nn.Module, images: Tensor, shapes: Tensor, targets: Targets | None) -> Outputs:
        """The outputs for images that are already stretched, if necessary."""
        inputs: dict[str, Tensor] = {}
        if not self.stretches:
            inside = inside_of(shapes, size=(images.shape[-2], images.shape[-1]))
            images = images * inside[:, None]  # transformers pads images after it has normalised them
            inputs["pixel_mask"] = inside.long()
        # Given labels, the model passes the predictions of all its layers to its loss function.
        labels: Labels = [] if targets is None else labels_of(targets, images.dtype)
        predictions: Predictions = model(pixel_values=images, labels=labels, **inputs).loss_dict["predictions"]
        return Outputs(predictions.full_precision(), shapes)

    def losses(self, model: nn.Module, outputs: Outputs, targets: Targets) -> dict[str, Tensor]:
        predictions = outputs.predictions
        labels = labels_of(targets, predictions.logits.dtype)
        with torch.autocast(predictions.logits.device.type, enabled=False):
            sums = self._losses.sums(predictions, labels)
        # A micro-batch without boxes does not denoise any, but DDP requires a gradient of every parameter on every
        # rank.
        embedding = getattr(getattr(model, "model", None), "denoising_class_embed", None)
        if embedding is not None and model.training and "denoising_meta_values" not in predictions.more:
            sums["class"] = sums["class"] + embedding.weight.sum() * 0
        return sums

    def detections(self, model: nn.Module, outputs: Outputs, *, size: tuple[int, int], most: int) -> Detections:
        return boxes_of(outputs, scores=self._family.scores, most=most)

    def candidates(self, model: nn.Module, images: Tensor, shapes: Tensor, *, most: int) -> Detections:
        return boxes_of(self._outputs(model, images, shapes, None), scores=self._family.scores, most=most)

    def processor(self, about: Mapping[str, Any]) -> dict[str, Any]:
        size = about["size"]
        square, fitted = {"height": size, "width": size}, {"max_height": size, "max_width": size}
        stretched = self.stretches
        return {
            "image_processor_type": self._family.processor,
            "resample": 2,  # bilinear
            "size": square if stretched else fitted,
            "do_pad": not stretched,
            **({} if stretched else {"pad_size": square}),
        }


def _choose_trainable(model: Any, *, pretrained: bool) -> None:
    """Choose the weights of the backbone that train.

    Detectors of the DETR family train stages 2 to 4 of a pretrained ResNet (arXiv:2005.12872, appendix A.4).
    transformers intends the same, but freezes every weight of transformers' ResNet, because it looks for the names of a
    different library. A new model does not have pretrained weights to preserve, so its whole backbone trains.
    """
    encoder = getattr(getattr(model, "model", None), "backbone", None)
    backbone: Any = getattr(encoder, "model", None)
    if getattr(getattr(backbone, "config", None), "model_type", "") != "resnet":
        return
    for name, parameter in backbone.named_parameters():
        early = name.startswith(("embedder.", "encoder.stages.0."))
        parameter.requires_grad_(not (pretrained and early))
