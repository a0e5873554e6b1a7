"""Combine the features of slices into one vector per volume, with the weight of each slice.

All aggregators have the same interface: `forward(features, counts, positions, longest)` takes the slices of all volumes
one after another, and returns a vector per volume and a weight per slice. The weights of a volume sum to 1. The result
of a volume does not depend on the other volumes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.ct.options import AggregatorOptions

_LOWEST = 1e-3  # angular frequency per mm: the longest wave is longer than a body, the shortest about a slice distance


class Pooled(NamedTuple):
    """The result of an aggregator for the slices of a batch."""

    vectors: Tensor
    """A vector for each volume: (B, width)."""
    attention: Tensor
    """A weight for each slice: (N,). The weights of a volume are not negative and sum to 1."""


def make_aggregator(options: AggregatorOptions, features: int) -> nn.Module:
    """An aggregator by name.

    Args:
        options: the name and the sizes. With `mean`, the width is always `features`.
        features: the length of the feature vector of a slice.

    Raises:
        UsageError: the width is not a multiple of the number of heads, or is odd.
    """
    width = options.width
    if options.name == "transformer":
        sizes: dict[str, Any] = {"layers": options.layers, "heads": options.heads, "dropout": options.dropout}
        return TransformerAggregator(features, width, **sizes)
    return AttentionPooling(features, width) if options.name == "attention" else MeanPooling(features)


def position_encoding(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines of positions in millimetres: (..., width).

    The formula is that of Vaswani et al. 2017, arXiv:1706.03762, section 3.5, with wavelengths from 2 pi mm to 2 pi m
    in equal ratios. Positions are millimetres, not slice numbers, so one encoding suits all slice distances.

    Args:
        positions: millimetres along the axis, floating-point.
        width: an even number.
    """
    steps = torch.arange(width // 2, device=positions.device, dtype=positions.dtype) / max(1, width // 2 - 1)
    angles = positions[..., None] * _LOWEST**steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class SliceLayout(NamedTuple):
    """The layout of the slices of a batch in which each volume has its own row."""

    row: Tensor
    """Number of each slice's volume: int64 (N,)."""
    column: Tensor
    """Position of each slice in its volume: int64 (N,)."""
    is_slice: Tensor
    """True at positions with a slice: bool (B, longest)."""

    @staticmethod
    def of(counts: Tensor, total: int, longest: int) -> SliceLayout:
        """The layout of volumes. torch.export keeps `total` dynamic if it comes from a shape, but not from `len`.

        Args:
            counts: the number of slices of each volume, int64 (B,).
            total: the sum of `counts`.
            longest: the largest of `counts`.
        """
        row = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=total)
        column = torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[row]
        return SliceLayout(row, column, torch.arange(longest, device=counts.device) < counts[:, None])

    def pad(self, values: Tensor) -> Tensor:
        """Values of slices (N, ...) as (B, longest, ...), with zeros at positions without a slice."""
        return values.new_zeros(*self.is_slice.shape, *values.shape[1:]).index_put((self.row, self.column), values)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`."""
        return padded[self.row, self.column]


class MeanPooling(nn.Module):
    """The mean of the slices' features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.width = features

    def forward(self, features: Tensor, counts: Tensor, positions: Tensor, longest: int) -> Pooled:
        layout = SliceLayout.of(counts, features.shape[0], longest)
        share = counts.to(features.dtype).reciprocal()
        return Pooled(layout.pad(features).sum(dim=1) * share[:, None], share[layout.row])


class AttentionPooling(nn.Module):
    """The mean of the projected features, weighted by gated attention.

    Ilse et al. 2018, arXiv:1802.04712, equation 9. The positions of slices are ignored.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.project = nn.Linear(features, width)
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, features: Tensor, counts: Tensor, positions: Tensor, longest: int) -> Pooled:
        layout = SliceLayout.of(counts, features.shape[0], longest)
        projected = self.project(features)
        scores = self.score(self.value(projected).tanh() * self.gate(projected).sigmoid())[:, 0]
        scores = layout.pad(scores).masked_fill(~layout.is_slice, -math.inf)
        weights = scores.softmax(dim=1)
        return Pooled((weights[:, None] @ layout.pad(projected).to(weights))[:, 0], layout.unpad(weights))


class TransformerAggregator(nn.Module):
    """A transformer encoder over the slices of a volume and a class token, whose last state is the volume's vector.

    The layers normalise before attention and before the two linear layers (Xiong et al. 2020, arXiv:2002.04745). Each
    slice gets the encoding of its position in millimetres, relative to the middle between the first and the last slice
    of the sample. The attention of a slice is the weight that the class token gives it in the last layer, as the mean
    over the heads, without the class token's weight on itself.

    Raises:
        UsageError: see `make_aggregator`.
    """

    def __init__(self, features: int, width: int, *, layers: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads or width % 2:
            what = (
                f"a width of {width} is not a multiple of {heads} heads"
                if width % heads
                else f"the width {width} is odd"
            )
            raise UsageError(what, where="task.aggregator.width", remedy="use an even multiple of the number of heads")
        self.width = width
        self.project = nn.Linear(features, width)
        self.class_token = nn.Parameter(torch.randn(width) * 0.02)
        self.layers = nn.ModuleList(_Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Tensor, counts: Tensor, positions: Tensor, longest: int) -> Pooled:
        layout = SliceLayout.of(counts, features.shape[0], longest)
        ends = counts.cumsum(0) - 1
        middle = (positions[ends] + positions[ends - counts + 1]) / 2
        encoding = position_encoding((positions - middle[layout.row]).to(features.dtype), self.width)
        tokens = layout.pad(self.project(features) + encoding)
        tokens = torch.cat([self.class_token.to(tokens.dtype).expand(len(counts), 1, -1), tokens], dim=1)
        is_token = functional.pad(layout.is_slice, (1, 0), value=True)
        weights = tokens.new_zeros(is_token.shape)
        for number, layer in enumerate(self.layers):
            if number == len(self.layers) - 1:
                assert isinstance(layer, _Layer)
                weights = layer.weights_of_class_token(tokens, is_token)
            tokens = layer(tokens, is_token)
        slices = weights[:, 1:]
        attention = layout.unpad(slices / slices.sum(dim=1, keepdim=True).clamp_min(1e-30))
        return Pooled(self.norm(tokens[:, 0]), attention)


class _Layer(nn.Module):
    """A layer of a transformer encoder."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.linear = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        """Tokens (B, T, width) of the next layer. `is_token`, bool (B, T), is false for padding."""
        query, key, value = self._split(self.norm_attention(tokens))
        mask = is_token[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        tokens = tokens + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        after: Tensor = tokens + self.drop(self.linear(self.norm_linear(tokens)))
        return after

    def weights_of_class_token(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        """The weights of the first token on all tokens, without dropout, as the mean over the heads: (B, T)."""
        query, key, _ = self._split(self.norm_attention(tokens))
        scores = (query[:, :, :1] @ key.transpose(2, 3))[:, :, 0] / math.sqrt(query.shape[-1])
        return torch.as_tensor(scores.masked_fill(~is_token[:, None], -math.inf).softmax(dim=-1).mean(dim=1))

    def _split(self, tokens: Tensor) -> tuple[Tensor, ...]:
        batch, length, _ = tokens.shape
        parts: Any = self.query_key_value(tokens).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return tuple(parts.unbind(0))
