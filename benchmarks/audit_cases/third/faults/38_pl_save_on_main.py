import argparse
import datetime

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEveryEpoch(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            trainer.save_checkpoint(f"{self.folder}/epoch-{trainer.current_epoch}.ckpt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoints")
    args = parser.parse_args()
    L.seed_everything(0)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(96, 10, generator=g)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(timeout=datetime.timedelta(seconds=20)),
        max_epochs=2,
        callbacks=[SaveEveryEpoch(args.folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    if trainer.is_global_zero:
        print("done", trainer.callback_metrics["train_loss"])


if __name__ == "__main__":
    main()
