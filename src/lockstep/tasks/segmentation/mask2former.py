"""Mask2Former of transformers for segmentation by classes: its losses as sums over masks, and its class scores.

Each query of the model has a class, or none, and a mask. Each class of a picture is a true mask, and is matched with a
query. Source: Cheng et al., Masked-attention Mask Transformer for Universal Image Segmentation, arXiv:2112.01527.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

UNUSED = ("encoder.swin.layernorm.",)
"""Parts of the names of parameters that have no part in the outputs. Without a gradient, DDP would refuse them: set
their `requires_grad` to False."""


class TrueMasks(NamedTuple):
    """The masks of one picture."""

    masks: Tensor
    """float (masks, height, width): 1 where the class is, else 0. Ignored pixels are in no mask."""
    classes: Tensor
    """int64 (masks): the class of each mask."""


def true_masks(masks: Tensor, dtype: torch.dtype = torch.float32) -> list[TrueMasks]:
    """A mask for each class that a picture has.

    Args:
        masks: int64 (pictures, height, width): class numbers, -1 where a pixel is ignored.
    """
    found = []
    for mask in masks:
        classes = mask.unique()
        classes = classes[classes >= 0]
        found.append(TrueMasks((mask == classes[:, None, None]).to(dtype), classes))
    return found


def counts_of(masks: Tensor) -> Tensor:
    """The number of classes that each picture has: int64 (pictures).

    Args:
        masks: int64 (pictures, height, width): class numbers, -1 where a pixel is ignored.
    """
    return torch.tensor([int((mask.unique() >= 0).sum()) for mask in masks], dtype=torch.int64)


def outputs_of(model: nn.Module, images: Tensor) -> Any:
    """The outputs of a `Mask2FormerForUniversalSegmentation`, with those of its inner layers.

    Args:
        images: (pictures, channels, height, width), normalised.
    """
    return model(pixel_values=images, output_auxiliary_logits=True)


def class_scores(outputs: Any) -> Tensor:
    """How much each class is present at each place: (pictures, classes, h, w), from 0 to the number of queries.

    h and w are a quarter of the pictures' height and width. transformers' image processor sums in the same way, after
    it has resized masks to 384 x 384 pixels.
    """
    classes = outputs.class_queries_logits.softmax(dim=-1)[..., :-1]
    return torch.einsum("bqc,bqhw->bchw", classes, outputs.masks_queries_logits.sigmoid())


class Mask2FormerLosses:
    """The losses of Mask2Former, over all layers.

    Heads: `class`, weighted cross-entropy over all queries, whose unit is a query with a mask, and where a query
    without a mask counts as `no_object_weight` units; `mask`, binary cross-entropy, and `dice`, both at random points
    of each mask, and with the unit mask.

    The points are drawn in each forward pass, for all masks of a micro-batch together. So another number of ranks
    draws other points, as with dropout.

    Args:
        config: the model's `Mask2FormerConfig`.
    """

    def __init__(self, config: Any) -> None:
        modeling = importlib.import_module("transformers.models.mask2former.modeling_mask2former")
        self.queries, self.no_object = int(config.num_queries), float(config.no_object_weight)
        self._coefficients = {"class": config.class_weight, "mask": config.mask_weight, "dice": config.dice_weight}
        self.auxiliary = bool(config.use_auxiliary_loss)
        self.criterion = modeling.Mask2FormerLoss(config, {})

    def coefficients(self) -> dict[str, float]:
        """The factor of each head in the model's own loss."""
        return {head: float(value) for head, value in self._coefficients.items()}

    def weights(self, counts: Tensor) -> dict[str, Tensor]:
        """The units of each head: float64 scalars.

        Args:
            counts: int64 (pictures): the number of true masks of each picture; see `counts_of`.
        """
        masks = counts.sum().double()
        return {"class": self._query_units(counts), "mask": masks, "dice": masks}

    def sums(self, outputs: Any, masks: Tensor) -> dict[str, Tensor]:
        """The sum of each head over its units.

        Args:
            outputs: of `outputs_of`.
            masks: int64 (pictures, height, width): class numbers, -1 where a pixel is ignored.
        """
        layers = [(outputs.masks_queries_logits, outputs.class_queries_logits)]
        if self.auxiliary:
            inner = outputs.auxiliary_logits
            layers += [(layer["masks_queries_logits"], layer["class_queries_logits"]) for layer in inner]
        # transformers draws points in the default type, and refuses to mix them with another.
        dtype = torch.get_default_dtype()
        layers = [(own.to(dtype), classes.to(torch.promote_types(dtype, classes.dtype))) for own, classes in layers]
        logits = layers[0][1]
        # transformers keeps this weight in float32. Cross-entropy wants the type of the logits.
        self.criterion.empty_weight = logits.new_ones(logits.shape[-1])
        self.criterion.empty_weight[-1] = self.no_object
        self.criterion.num_labels = logits.shape[-1] - 1
        true = true_masks(masks, dtype)
        units = self._query_units(torch.tensor([len(one.classes) for one in true])).item()
        with torch.autocast(logits.device.type, enabled=False):
            by_layer = [self._layer(*layer, true, units) for layer in layers]
        return {head: torch.stack([sums[head] for sums in by_layer]).sum() for head in by_layer[0]}

    def _layer(self, masks: Tensor, classes: Tensor, true: list[TrueMasks], units: float) -> dict[str, Tensor]:
        empty = torch.zeros(0, dtype=torch.int64)
        matches = [
            self.criterion.matcher(masks[place, None], classes[place, None], [one.masks], [one.classes])[0]
            if len(one.classes)
            else (empty, empty)
            for place, one in enumerate(true)
        ]
        if any(len(queries) for queries, _ in matches):
            of_masks = self.criterion.loss_masks(masks, [one.masks for one in true], matches, 1)
        else:
            of_masks = dict.fromkeys(("loss_mask", "loss_dice"), masks.sum() * 0)
        mean = self.criterion.loss_labels(classes, [one.classes for one in true], matches)["loss_cross_entropy"]
        return {"class": mean * units, "mask": of_masks["loss_mask"], "dice": of_masks["loss_dice"]}

    def _query_units(self, counts: Tensor) -> Tensor:
        matched = counts.clamp(max=self.queries).sum().double()
        return matched + self.no_object * (self.queries * len(counts) - matched)
