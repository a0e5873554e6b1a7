import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        self.acc = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.acc(self.net(x), y)
        self.log("acc", self.acc)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=steps)
        return [opt], [{"scheduler": sched, "interval": "step"}]


if __name__ == "__main__":
    L.seed_everything(2)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(448, 6, generator=g)
    full = TensorDataset(x, x[:, :3].argmax(1))
    train, val = random_split(full, [384, 64], generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(train, 16, shuffle=True), DataLoader(val, 16))
    print(trainer.global_rank, trainer.callback_metrics)
