"""A task and its training with types that mypy and pyright can check: python examples/typed_task.py"""

import tempfile

import torch
from torch import Tensor, nn

from lockstep import RunConfig, Task, Trainer

Sample = tuple[Tensor, Tensor]


class Line(Task):
    """Fits a line through noisy points. The data are a list."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> list[Sample]:
        points = torch.linspace(-1, 1, 256).unsqueeze(1)
        return list(zip(points, 3 * points + 1 + 0.1 * torch.randn(256, 1), strict=True))

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model: nn.Module, batch: Sample) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs


def main() -> None:
    config = RunConfig(batch={"global": 32}, train={"epochs": 20}, optim={"lr": 0.1, "weight_decay": 0.0})
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, run_dir=folder, quiet=True)
        loss = trainer.fit(Line())["train/loss"]
        at_zero, at_one = trainer.predict(Line(), [(torch.tensor([x]), torch.zeros(1)) for x in (0.0, 1.0)])
        slope, offset = (parameter.item() for parameter in trainer.model.parameters())
    print(f"loss {loss:.3f}: y = {slope:.2f} x + {offset:.2f}; at 0 {float(at_zero):.2f}, at 1 {float(at_one):.2f}")


if __name__ == "__main__":
    main()
