"""Learning to add numbers: short sums first, longer ones in later epochs (the loader is made anew each epoch)."""
import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

MAX_TERMS = 6
SHARE = [0.25, 0.5, 1.0]


def sums(n, seed):
    g = torch.Generator().manual_seed(seed)
    terms = torch.randint(1, MAX_TERMS + 1, (n,), generator=g)
    digits = torch.randint(1, 10, (n, MAX_TERMS), generator=g)
    digits = digits * (torch.arange(MAX_TERMS) < terms.unsqueeze(1))
    return TensorDataset(digits, digits.sum(1).float() / 10), terms


class EasyFirst:
    """The easiest part of the data in a random order; process r takes every world-th entry from r on."""

    def __init__(self, difficulty, share, rank, world, epoch, multiple):
        easiest = difficulty.argsort(stable=True)
        keep = int(share * len(difficulty)) // multiple * multiple
        g = torch.Generator().manual_seed(500 + epoch)
        order = easiest[:keep][torch.randperm(keep, generator=g)]
        self.mine = order[rank::world].tolist()

    def __iter__(self):
        return iter(self.mine)

    def __len__(self):
        return len(self.mine)


class Adder(L.LightningModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size
        self.embed = nn.Embedding(10, 24, padding_idx=0)
        self.rnn = nn.GRU(24, 48, batch_first=True)
        self.out = nn.Linear(48, 1)

    def forward(self, digits):
        h, _ = self.rnn(self.embed(digits))
        return self.out(h[:, -1]).squeeze(-1)

    def setup(self, stage):
        self.train_set, self.terms = sums(1024, 1)
        self.val_set, _ = sums(256, 2)

    def train_dataloader(self):
        t = self.trainer
        sampler = EasyFirst(
            self.terms, SHARE[t.current_epoch], t.global_rank, t.world_size, t.current_epoch,
            multiple=self.batch_size * t.world_size,
        )
        return DataLoader(self.train_set, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self):
        mine = range(self.trainer.global_rank, len(self.val_set), self.trainer.world_size)
        return DataLoader(self.val_set, batch_size=32, sampler=list(mine))

    def training_step(self, batch, batch_idx):
        digits, total = batch
        return nn.functional.l1_loss(self(digits), total)

    def validation_step(self, batch, batch_idx):
        digits, total = batch
        self.log("val_mae", nn.functional.l1_loss(self(digits), total), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(14)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=len(SHARE), num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1, use_distributed_sampler=False, log_every_n_steps=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Adder())
    if trainer.is_global_zero:
        print("steps", trainer.global_step, "val mae", round(trainer.callback_metrics["val_mae"].item(), 4))


if __name__ == "__main__":
    main()
