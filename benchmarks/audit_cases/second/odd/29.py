import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Data(L.LightningDataModule):
    def prepare_data(self):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(621, 8, generator=g)
        torch.save((x, (x[:, 0] * x[:, 1] > 0).long()), "table.pt")

    def setup(self, stage):
        x, y = torch.load("table.pt")
        self.train, self.val = TensorDataset(x[:480], y[:480]), TensorDataset(x[480:], y[480:])

    def train_dataloader(self):
        sampler = DistributedSampler(
            self.train, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, seed=3, drop_last=True
        )
        return DataLoader(self.train, batch_size=16, sampler=sampler)

    def val_dataloader(self):
        # small: every rank evaluates all of it, no padding is needed
        return DataLoader(self.val, batch_size=64)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def on_validation_epoch_start(self):
        self.hits, self.count = 0, 0

    def validation_step(self, batch, _):
        x, y = batch
        self.hits += (self.net(x).argmax(1) == y).sum().item()
        self.count += len(y)

    def on_validation_epoch_end(self):
        acc = self.hits / self.count
        self.log("acc", acc)
        self.print(f"epoch {self.current_epoch} acc {acc:.4f} on {self.count} samples")

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=5e-3)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="max", patience=1)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "acc"}}


if __name__ == "__main__":
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), datamodule=Data())
