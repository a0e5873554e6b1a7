"""A regression on synthetic data, small enough to reason about: for tests, benchmarks and docs."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.tasks.task import Task
from lockstep.tasks.toy.mlp import MLP


@final
class Toy(Task):
    """An MLP 10-10-5 learns from a fixed random one. The data is drawn once, from its own seed: the same on all ranks.

    Args:
        samples, eval_samples: sizes of the two data sets.
        hidden: width, and layers: number of hidden layers.
        double: float64 model and data, where rounding must not hide an error.
    """

    def __init__(
        self, samples: int = 1000, eval_samples: int = 200, hidden: int = 10, layers: int = 1, double: bool = False
    ) -> None:
        self.samples, self.eval_samples, self.sizes = samples, eval_samples, [10, *[hidden] * layers, 5]
        self.dtype = torch.float64 if double else torch.float32

    def model(self) -> nn.Module:
        return MLP(self.sizes).to(self.dtype)

    def train_data(self) -> TensorDataset:
        return self._draw(self.samples, seed=1)

    def eval_data(self) -> TensorDataset:
        return self._draw(self.eval_samples, seed=2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        total: Tensor = (model(inputs) - targets).square().mean(dim=1).sum()
        return total

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs

    def describe(self, output: Tensor) -> dict[str, Any]:
        return {f"y{number}": round(value, 3) for number, value in enumerate(output.tolist())}

    def truth(self, sample: tuple[Tensor, Tensor]) -> list[float]:
        return [round(value, 3) for value in sample[1].tolist()]

    def _draw(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, 10, generator=generator, dtype=torch.float64)
        teacher = torch.randn(10, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise = 0.1 * torch.randn(count, 5, generator=generator, dtype=torch.float64)
        return TensorDataset(inputs.to(self.dtype), ((inputs @ teacher).tanh() + noise).to(self.dtype))
