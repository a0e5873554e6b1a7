"""Click-through prediction streamed from daily log files."""
from pathlib import Path

import pytorch_lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

LOG_DIR = Path("click_logs")
DAYS = 7
ROWS_PER_DAY = 640


class ClickLogs(IterableDataset):
    def __init__(self, files, rank, world_size):
        self.files = files[rank::world_size]

    def __iter__(self):
        for path in self.files:
            data = np.load(path)
            for fields, dense, click in zip(data["fields"], data["dense"], data["click"]):
                yield torch.from_numpy(fields), torch.from_numpy(dense), float(click)


class ClickData(L.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self):
        LOG_DIR.mkdir(exist_ok=True)
        weight = np.random.default_rng(0).normal(size=8).astype(np.float32)
        for day in range(DAYS):
            rng = np.random.default_rng(100 + day)
            fields = rng.integers(0, 50, size=(ROWS_PER_DAY, 3))
            dense = rng.normal(size=(ROWS_PER_DAY, 8)).astype(np.float32)
            logit = dense @ weight + 0.02 * (fields.sum(1) - 75)
            click = rng.random(ROWS_PER_DAY) < 1 / (1 + np.exp(-logit))
            np.savez(LOG_DIR / f"day_{day:02d}.npz", fields=fields, dense=dense, click=click)

    def train_dataloader(self):
        files = sorted(LOG_DIR.glob("day_*.npz"))
        stream = ClickLogs(files, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(stream, batch_size=self.batch_size)


class ClickModel(L.LightningModule):
    def __init__(self, dim=8):
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(50, dim) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(3 * dim + 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, fields, dense):
        parts = [emb(fields[:, i]) for i, emb in enumerate(self.embed)]
        return self.mlp(torch.cat(parts + [dense], dim=1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        fields, dense, click = batch
        loss = F.binary_cross_entropy_with_logits(self(fields, dense), click.float())
        if batch_idx % 10 == 0 and self.global_rank == 0:
            print(f"epoch {self.current_epoch} batch {batch_idx} loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(ClickModel(), datamodule=ClickData())
    trainer.print("done")
