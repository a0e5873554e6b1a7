"""Next-event language model on web server logs that are streamed from text shards."""
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import pytorch_lightning as pl

EVENTS = 20
LENGTH = 16


def write_shards(folder, n_shards=8, lines=64):
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for s in range(n_shards):
        with open(folder / f"shard_{s:02d}.txt", "w") as f:
            for _ in range(lines):
                state, row = rng.randrange(EVENTS), []
                for _ in range(LENGTH + 1):
                    row.append(str(state))
                    state = (state * 3 + rng.choice([0, 0, 0, 1, 7])) % EVENTS
                f.write(" ".join(row) + "\n")


class LogStream(IterableDataset):
    def __init__(self, files, shuffle=True):
        self.files = sorted(files)
        self.shuffle = shuffle
        self.epoch = 0

    def __iter__(self):
        files = list(self.files)
        rng = random.Random(100 + self.epoch)
        self.epoch += 1
        if self.shuffle:
            rng.shuffle(files)
        for path in files:
            lines = path.read_text().splitlines()
            if self.shuffle:
                rng.shuffle(lines)
            for line in lines:
                yield torch.tensor([int(t) for t in line.split()])


class LogData(pl.LightningDataModule):
    def __init__(self, root="log_shards", batch_size=16):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        write_shards(self.root)

    def train_dataloader(self):
        files = list(self.root.glob("shard_*.txt"))
        return DataLoader(LogStream(files), batch_size=self.batch_size)


class EventLM(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(EVENTS, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.out = nn.Linear(48, EVENTS)

    def training_step(self, batch, batch_idx):
        h, _ = self.lstm(self.emb(batch[:, :-1]))
        loss = nn.functional.cross_entropy(self.out(h).transpose(1, 2), batch[:, 1:])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True,
                 batch_size=len(batch))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    pl.seed_everything(0)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(EventLM(), datamodule=LogData())
    if trainer.is_global_zero:
        print("steps", trainer.global_step, "loss", float(trainer.callback_metrics["train_loss"]))


if __name__ == "__main__":
    main()
