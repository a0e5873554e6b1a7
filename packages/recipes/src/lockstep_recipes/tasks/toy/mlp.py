"""A small fully connected network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of `sizes` with ReLU between them: (batch, sizes[0]) -> (batch, sizes[-1])."""

    def __init__(self, sizes: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers[:-2])

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs
