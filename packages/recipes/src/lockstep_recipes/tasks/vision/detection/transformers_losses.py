"""Losses of transformers' detectors, as sums over units that depend only on the labels.

The detectors in transformers match each true box with a query, and divide their losses by the number of boxes of a
batch on one rank. Here, the same matching and the same terms give sums instead, over all decoder layers. The engine
divides them by the number of boxes of the global batch.

Sources: Carion et al., DETR, arXiv:2005.12872; Zhu et al., Deformable DETR, arXiv:2010.04159; Zhao et al., RT-DETR,
arXiv:2304.08069; Peng et al., D-FINE, arXiv:2410.13842.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import UsageError
from lockstep.core.foreign_errors import optional

Layer = dict[str, Tensor]
Labels = list[dict[str, Tensor]]
"""For each image: `class_labels`, int64 (boxes), and `boxes` (boxes, 4): centre, width and height, as fractions of the
image's width and height."""
Matches = list[tuple[Tensor, Tensor]]
"""For each image: numbers of queries, and numbers of the true boxes that belong to them."""

_DISTILLATION_TEMPERATURE = 5


@dataclass(frozen=True)
class Predictions:
    """The arguments that a transformers model passes to its loss."""

    logits: Tensor
    """(images, queries, logits) of the last decoder layer."""
    boxes: Tensor
    """(images, queries, 4) of the last decoder layer: centre, width and height, as fractions of the image."""
    all_logits: Tensor | None = None
    """The logits of all decoder layers. The dimension of the layers differs from model to model."""
    all_boxes: Tensor | None = None
    """The boxes of all decoder layers."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that only some models pass."""

    def full_precision(self) -> Predictions:
        """The same in float32 if it has 16 bits: sums over many boxes need more precision."""
        more = {key: _full(value) for key, value in self.more.items()}
        return Predictions(
            _full(self.logits), _full(self.boxes), _full(self.all_logits), _full(self.all_boxes), more=more
        )


def keep_predictions(
    logits: Tensor,
    labels: Labels,
    device: torch.device,
    pred_boxes: Tensor,
    config: Any,
    outputs_class: Tensor | None = None,
    outputs_coord: Tensor | None = None,
    **more: Any,
) -> tuple[None, dict[str, Predictions], None]:
    """A loss function for a transformers model that does not compute a loss. The model's `loss_dict` then contains the
    predictions of all its layers."""
    kept = {key: value for key, value in more.items() if value is not None}
    return None, {"predictions": Predictions(logits, pred_boxes, outputs_class, outputs_coord, more=kept)}, None


class SetLosses:
    """The losses of one family of detectors. This class is for those with DETR's layers.

    Heads: `class`; `box`, the L1 distance; `giou`, 1 - generalised IoU. The unit of all heads is the box.

    Args:
        kind: the transformers module with the losses.
        matcher: the class in it that matches boxes.
    """

    criterion: Any

    def __init__(self, config: Any, *, kind: str, matcher: str) -> None:
        self.module = _import(kind)
        box, giou = float(config.bbox_loss_coefficient), float(config.giou_loss_coefficient)
        self._coefficients = {"class": 1.0, "box": box, "giou": giou}
        costs = {"class_cost": config.class_cost, "bbox_cost": config.bbox_cost, "giou_cost": config.giou_cost}
        self.matcher = getattr(self.module, matcher)(**costs)

    def coefficients(self) -> dict[str, float]:
        """The factor of each head in the model's own loss."""
        return dict(self._coefficients)

    def weights(self, counts: Tensor) -> dict[str, Tensor]:
        """The units of each head: float64 scalars.

        Args:
            counts: int64 (images): the number of true boxes of each image.
        """
        boxes = counts.sum().double()
        return {"class": boxes, "box": boxes, "giou": boxes}

    def sums(self, predictions: Predictions, labels: Labels) -> dict[str, Tensor]:
        """The sum of each head over its units, for all layers together. The number of classes comes from the logits."""
        heads = _Heads()
        for layer in _detr_layers(predictions):
            matches = match(self.criterion.matcher, layer, labels)
            heads.add("class", self._class(layer, labels, matches))
            heads.add_boxes(self.criterion.loss_boxes(layer, labels, matches, 1))
        return heads.sums

    def _class(self, layer: Layer, labels: Labels, matches: Matches) -> Tensor:
        loss: Tensor = self.criterion.loss_labels(layer, labels, matches, 1)["loss_ce"]
        return loss


class SoftmaxLosses(SetLosses):
    """DETR, Table Transformer and YOLOS: each query has one class or none.

    `class` is weighted cross-entropy over all queries. Its unit is a query with a box. A query without a box counts as
    `eos_coefficient` units.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, kind="loss_for_object_detection", matcher="HungarianMatcher")
        self.queries = int(getattr(config, "num_detection_tokens", None) or config.num_queries)
        self.no_object = float(config.eos_coefficient)
        self.criterion = self.module.ImageLoss(self.matcher, config.num_labels, self.no_object, [])

    def weights(self, counts: Tensor) -> dict[str, Tensor]:
        return {**super().weights(counts), "class": self._query_units(counts)}

    def sums(self, predictions: Predictions, labels: Labels) -> dict[str, Tensor]:
        # transformers keeps this weight in float32. Cross-entropy requires the type of the logits.
        class_weight = predictions.logits.new_ones(predictions.logits.shape[-1])
        class_weight[-1] = self.no_object
        self.criterion.empty_weight = class_weight
        self.criterion.num_classes = len(class_weight) - 1
        return super().sums(predictions, labels)

    def _class(self, layer: Layer, labels: Labels, matches: Matches) -> Tensor:
        units = self._query_units(torch.tensor([len(label["class_labels"]) for label in labels])).item()
        return super()._class(layer, labels, matches) * units

    def _query_units(self, counts: Tensor) -> Tensor:
        matched = counts.clamp(max=self.queries).sum().double()
        return matched + self.no_object * (self.queries * len(counts) - matched)


class FocalLosses(SetLosses):
    """Deformable DETR, Conditional DETR and DAB-DETR: each class of each query is a binary decision, with focal
    loss."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, kind="loss_deformable_detr", matcher="DeformableDetrHungarianMatcher")
        self.criterion = self.module.DeformableDetrImageLoss(self.matcher, config.num_labels, config.focal_alpha, [])

    def sums(self, predictions: Predictions, labels: Labels) -> dict[str, Tensor]:
        self.criterion.num_classes = predictions.logits.shape[-1]
        return super().sums(predictions, labels)


class VarifocalLosses(SetLosses):
    """RT-DETR, versions 1 and 2.

    Heads: `class`, varifocal loss; `box` and `giou` as in DETR. The unit of all heads is the box. The layers are
    those of the decoder, the queries that the encoder chose, and the denoised boxes, divided by their number of copies.
    """

    def __init__(self, config: Any) -> None:
        self.criterion = _import("loss_rt_detr").RTDetrLoss(config)
        self._auxiliary = bool(config.auxiliary_loss)

    def coefficients(self) -> dict[str, float]:
        names = {"class": "loss_vfl", "box": "loss_bbox", "giou": "loss_giou"}
        return {head: float(self.criterion.weight_dict[name]) for head, name in names.items()}

    def sums(self, predictions: Predictions, labels: Labels) -> dict[str, Tensor]:
        self.criterion.num_classes = predictions.logits.shape[-1]
        heads = _Heads()
        layers, denoised = _two_stage_layers(predictions, auxiliary=self._auxiliary)
        for layer in layers:
            self._add(heads, layer, labels, match(self.criterion.matcher, layer, labels), 1)
        if denoised:
            meta = predictions.more["denoising_meta_values"]
            matches = self.criterion.get_cdn_matched_indices(meta, labels)
            for layer in denoised:
                self._add(heads, layer, labels, matches, meta["dn_num_group"])
        return heads.sums

    def _add(self, heads: _Heads, layer: Layer, labels: Labels, matches: Matches, copies: int) -> None:
        """Add the sums of a layer.

        Args:
            copies: how often each true box occurs in this layer.
        """
        heads.add("class", self.criterion.loss_labels_vfl(layer, labels, matches, copies)["loss_vfl"])
        heads.add_boxes(self.criterion.loss_boxes(layer, labels, matches, copies))


class FineLosses(VarifocalLosses):
    """D-FINE. Its boxes are distributions over distances from a reference point.

    Heads: those of RT-DETR; `corners`, the fine-grained localisation loss, whose unit is the box; and `distillation`,
    the decoupled distillation focal loss, whose unit is the image.

    transformers balances queries with and without a box by square roots of their numbers in a batch, which are not sums
    over images. Here, the numbers of each image are used. The two are equal if all images of a batch have the same
    number of boxes.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.criterion = _import("loss_d_fine").DFineLoss(config)

    def coefficients(self) -> dict[str, float]:
        own = {"corners": "loss_fgl", "distillation": "loss_ddf"}
        return super().coefficients() | {head: float(self.criterion.weight_dict[name]) for head, name in own.items()}

    def weights(self, counts: Tensor) -> dict[str, Tensor]:
        units = super().weights(counts)
        return {**units, "corners": units["box"], "distillation": torch.tensor(float(len(counts)), dtype=torch.float64)}

    def sums(self, predictions: Predictions, labels: Labels) -> dict[str, Tensor]:
        # The head `corners` exists even if no layer has distributions, so that all ranks have the same heads.
        sums = super().sums(predictions, labels)
        nothing = predictions.logits.sum() * 0
        return {"corners": nothing, "distillation": nothing, **sums}

    def _add(self, heads: _Heads, layer: Layer, labels: Labels, matches: Matches, copies: int) -> None:
        layer = {**layer, "pred_boxes": layer["pred_boxes"].clamp(min=0, max=1)}
        super()._add(heads, layer, labels, matches, copies)
        if "pred_corners" not in layer:
            return
        # transformers computes distances in float32, and refuses to mix them with float64.
        self.criterion.to(device=layer["logits"].device, dtype=torch.float32)
        for picture, (label, found) in enumerate(zip(labels, matches, strict=True)):
            one = {key: value[picture : picture + 1] for key, value in layer.items()}
            one["ref_points"] = one["ref_points"].float()
            terms = self.criterion.loss_local(
                one, [{**label, "boxes": label["boxes"].float()}], [found], copies, T=_DISTILLATION_TEMPERATURE
            )
            heads.add("corners", terms["loss_fgl"])
            heads.add("distillation", terms["loss_ddf"])


def match(matcher: Any, layer: Layer, labels: Labels) -> Matches:
    """The queries of true boxes with the smallest total cost (Hungarian algorithm, on the CPU)."""
    if any(len(label["boxes"]) for label in labels):
        found: Matches = matcher(layer, labels)
        return found
    empty = torch.zeros(0, dtype=torch.int64)  # transformers' matcher cannot reshape a cost matrix without elements
    return [(empty, empty) for _ in labels]


class _Heads:
    """Sums by head."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, head: str, value: Tensor) -> None:
        self.sums[head] = self.sums[head] + value if head in self.sums else value

    def add_boxes(self, losses: Mapping[str, Tensor]) -> None:
        self.add("box", losses["loss_bbox"])
        self.add("giou", losses["loss_giou"])


def _detr_layers(predictions: Predictions) -> list[Layer]:
    """The last layer, and the earlier layers if the model's config has `auxiliary_loss`."""
    layers = [{"logits": predictions.logits, "pred_boxes": predictions.boxes}]
    if predictions.all_logits is not None and predictions.all_boxes is not None:
        before = zip(predictions.all_logits[:-1], predictions.all_boxes[:-1], strict=True)
        layers += [{"logits": logits, "pred_boxes": boxes} for logits, boxes in before]
    return layers


def _two_stage_layers(predictions: Predictions, *, auxiliary: bool) -> tuple[list[Layer], list[Layer]]:
    """The layers of RT-DETR and D-FINE without denoised boxes, and the layers of denoised boxes."""
    more = predictions.more
    meta = more.get("denoising_meta_values")
    last = {"logits": predictions.logits, "pred_boxes": predictions.boxes}
    if meta is not None:
        last = {key: torch.split(value, meta["dn_num_split"], dim=1)[1] for key, value in last.items()}
    if not auxiliary or predictions.all_logits is None or predictions.all_boxes is None:
        return [last], []
    stacked = {"logits": predictions.all_logits, "pred_boxes": predictions.all_boxes}
    if "predicted_corners" in more:
        stacked |= {"pred_corners": more["predicted_corners"], "ref_points": more["initial_reference_points"]}
    denoised: dict[str, Tensor] = {}
    if meta is not None:
        halves = {key: torch.split(value, meta["dn_num_split"], dim=2) for key, value in stacked.items()}
        denoised = {key: half[0] for key, half in halves.items()}
        stacked = {key: half[1] for key, half in halves.items()}
    chosen = {"logits": more["enc_topk_logits"], "pred_boxes": more["enc_topk_bboxes"]}
    return [last, *_unstack(stacked, but_last=True), chosen], _unstack(denoised, but_last=False)


def _unstack(stacked: Mapping[str, Tensor], *, but_last: bool) -> list[Layer]:
    """The layers of tensors (images, layers, ...). In D-FINE, the last layer is also the teacher of each layer.

    D-FINE has one more layer of boxes than of distributions: that of its initial boxes. As in transformers, the first
    boxes are paired with the first distributions, and the rest is dropped.

    Args:
        but_last: leave out the last layer of each tensor.
    """
    if not stacked:
        return []
    by_key = {key: value.unbind(1)[: -1 if but_last else None] for key, value in stacked.items()}
    layers = [dict(zip(by_key, values, strict=True)) for values in zip(*by_key.values(), strict=False)]
    if "pred_corners" in stacked:
        teacher = {"teacher_corners": stacked["pred_corners"][:, -1], "teacher_logits": stacked["logits"][:, -1]}
        layers = [layer | teacher for layer in layers]
    return layers


def _full(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


def _import(name: str) -> Any:
    """A module of `transformers.loss`.

    Raises:
        UsageError: scipy is not installed, which matches boxes with queries.
    """
    remedy = "pip install scipy; transformers' detectors match boxes with scipy"
    optional("scipy.optimize", where="task.model", remedy=remedy, kind=UsageError)
    return importlib.import_module(f"transformers.loss.{name}")
