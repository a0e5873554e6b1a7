import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LitRegressor(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class ToyData(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(3)
        x = torch.randn(384, 6, generator=g)
        self.train = TensorDataset(x, (x[:, :3] * x[:, 3:]).sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, sampler=DistributedSampler(self.train))


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LitRegressor(), ToyData())
    print("rank", trainer.global_rank, "loss", trainer.callback_metrics["train_loss"].item())
