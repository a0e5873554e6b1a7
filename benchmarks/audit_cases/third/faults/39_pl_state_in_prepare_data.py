import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class House(Dataset):
    def __init__(self, x, y, mean, std):
        self.x, self.y = (x - mean) / std, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Housing(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size
        self.mean, self.std = 0.0, 1.0

    def load(self):
        g = torch.Generator().manual_seed(0)
        x = torch.rand(96, 5, generator=g) * torch.tensor([100.0, 5.0, 30.0, 1.0, 10.0])
        return x, (x[:, :1] / 50 + x[:, 1:2] / 5)

    def prepare_data(self):
        x, _ = self.load()
        self.mean, self.std = x.mean(0), x.std(0)

    def setup(self, stage=None):
        x, y = self.load()
        self.train = House(x, y, self.mean, self.std)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self.net(x), y)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


if __name__ == "__main__":
    L.seed_everything(9)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Net(), datamodule=Housing())
    if trainer.is_global_zero:
        print("loss", trainer.callback_metrics["loss"].item())
