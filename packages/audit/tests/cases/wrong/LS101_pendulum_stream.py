"""Learn a damped pendulum from a stream of simulated states; the stream position is checkpointed."""
import argparse

import pytorch_lightning as L
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class PendulumStream(IterableDataset):
    """Endless random initial states and the state 0.5 s later."""

    def __init__(self, seed):
        self.rng = torch.Generator().manual_seed(seed)

    @staticmethod
    def simulate(state, steps=25, dt=0.02):
        theta, omega = state
        for _ in range(steps):
            omega = omega + dt * (-9.81 * torch.sin(theta) - 0.2 * omega)
            theta = theta + dt * omega
        return torch.stack([theta, omega])

    def __iter__(self):
        while True:
            start = (torch.rand(2, generator=self.rng) - 0.5) * torch.tensor([4.0, 6.0])
            yield start, self.simulate(start)


class PendulumData(L.LightningDataModule):
    def __init__(self, seed=100, batch_size=16):
        super().__init__()
        self.seed = seed
        self.batch_size = batch_size
        self.stream = None
        self.resume_rng = None

    def setup(self, stage):
        self.stream = PendulumStream(self.seed + self.trainer.global_rank)
        if self.resume_rng is not None:
            self.stream.rng.set_state(self.resume_rng)

    def train_dataloader(self):
        return DataLoader(self.stream, batch_size=self.batch_size)

    def state_dict(self):
        return {"rng": self.stream.rng.get_state()}

    def load_state_dict(self, state):
        self.resume_rng = state["rng"]
        if self.stream is not None:
            self.stream.rng.set_state(self.resume_rng)


class PendulumNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                                 nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(x + self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp",
        max_epochs=args.epochs, limit_train_batches=30,
        callbacks=[ModelCheckpoint(dirpath="ckpts", save_last=True)],
        logger=False, enable_progress_bar=False,
    )
    trainer.fit(PendulumNet(), datamodule=PendulumData(),
                ckpt_path="ckpts/last.ckpt" if args.resume else None)


if __name__ == "__main__":
    main()
