"""A regression on synthetic data, small enough to reason about: for tests, benchmarks and docs."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.core.presenter import Presenter
from lockstep.core.task import Task
from lockstep_recipes.tasks.toy.mlp import MLP
from lockstep_recipes.tasks.toy.options import ToyOptions


class ToyPresenter(Presenter):
    """Presents the five values of an output."""

    def describe(self, output: Tensor) -> dict[str, Any]:
        return {f"y{number}": round(value, 3) for number, value in enumerate(output.tolist())}

    def truth(self, sample: tuple[Tensor, Tensor]) -> list[float]:
        return [round(value, 3) for value in sample[1].tolist()]


@final
class Toy(Task):
    """A fully connected network from 10 inputs to 5 outputs learns the tanh of a fixed random linear map, with noise.

    The data is drawn once, from its own seed, so it is the same on all ranks.
    """

    presenter = ToyPresenter

    def __init__(self, options: ToyOptions) -> None:
        self.options = options
        self.dtype = torch.float64 if options.double else torch.float32

    def model(self) -> nn.Module:
        return MLP([10, *[self.options.hidden] * self.options.layers, 5]).to(self.dtype)

    def train_data(self) -> TensorDataset:
        return self._draw(self.options.samples, seed=1)

    def eval_data(self) -> TensorDataset:
        return self._draw(self.options.eval_samples, seed=2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        total: Tensor = (model(inputs) - targets).square().mean(dim=1).sum()
        return total

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs

    def _draw(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, 10, generator=generator, dtype=torch.float64)
        teacher = torch.randn(10, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise = 0.1 * torch.randn(count, 5, generator=generator, dtype=torch.float64)
        return TensorDataset(inputs.to(self.dtype), ((inputs @ teacher).tanh() + noise).to(self.dtype))
