import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """An endless source. The rank chooses the seeds, so no two ranks see the same sample."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        i = self.rank
        while True:
            g = torch.Generator().manual_seed(i)
            x = torch.rand(2, generator=g) * 2 - 1
            yield x, (x.norm() < 0.8).float()
            i += self.world


class Disk(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(x).squeeze(1), y)
        if batch_idx % 30 == 29 and self.trainer.is_global_zero:
            print(f"step {batch_idx + 1}: loss on rank 0 {loss.item():.4f}")
        return loss

    def train_dataloader(self):
        return DataLoader(Stream(self.global_rank, self.trainer.world_size), batch_size=32)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=90, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Disk())
    trainer.save_checkpoint("disk.ckpt")
