"""Route support tickets to a team with a bag-of-words model."""
import random
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

TEAMS = {
    "billing": "invoice refund card charge payment price subscription receipt tax".split(),
    "network": "router latency packet timeout wifi dns proxy firewall vpn".split(),
    "account": "password login email username reset token profile locked signup".split(),
}
COMMON = "please help the my is not working since yesterday again thanks need with a".split()


def write_tickets(path, n, seed):
    rng = random.Random(seed)
    lines = []
    for _ in range(n):
        team = rng.choice(list(TEAMS))
        words = rng.choices(TEAMS[team], k=2) + rng.choices(COMMON, k=7)
        rng.shuffle(words)
        lines.append(team + "\t" + " ".join(words))
    path.write_text("\n".join(lines))


class Tickets(L.LightningDataModule):
    def prepare_data(self):
        write_tickets(Path("train.tsv"), 960, seed=0)
        write_tickets(Path("val.tsv"), 256, seed=1)

    def read(self, name):
        return [line.split("\t") for line in Path(name).read_text().splitlines()]

    def setup(self, stage):
        self.train_rows, self.val_rows = self.read("train.tsv"), self.read("val.tsv")
        words = set()
        for _, text in self.train_rows:
            words.update(text.split())
        self.vocab = {w: i + 1 for i, w in enumerate(words)}
        self.labels = {team: i for i, team in enumerate(TEAMS)}

    def collate(self, rows):
        y = torch.tensor([self.labels[team] for team, _ in rows])
        ids = [[self.vocab.get(w, 0) for w in text.split()] for _, text in rows]
        return torch.tensor(ids), y

    def train_dataloader(self):
        return DataLoader(self.train_rows, batch_size=32, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.val_rows, batch_size=32, collate_fn=self.collate)


class Router(L.LightningModule):
    def __init__(self, vocab_size=64, dim=24):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab_size, dim)
        self.out = nn.Linear(dim, len(TEAMS))
        self.acc = torchmetrics.classification.MulticlassAccuracy(len(TEAMS), average="micro")

    def forward(self, ids):
        return self.out(self.bag(ids))

    def training_step(self, batch, batch_idx):
        ids, y = batch
        return nn.functional.cross_entropy(self(ids), y)

    def validation_step(self, batch, batch_idx):
        ids, y = batch
        self.acc(self(ids), y)
        self.log("val_acc", self.acc)

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch}: val_acc {self.trainer.callback_metrics['val_acc']:.3f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Router(), datamodule=Tickets())
