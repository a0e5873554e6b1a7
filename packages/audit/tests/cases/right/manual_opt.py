import pytorch_lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class TwoOpt(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.enc = nn.Linear(8, 4)
        self.dec = nn.Linear(4, 8)

    def forward(self, x):
        return self.dec(torch.tanh(self.enc(x)))

    def training_step(self, batch, idx):
        (x,) = batch
        enc_opt, dec_opt = self.optimizers()
        loss = nn.functional.mse_loss(self(x), x)
        enc_opt.zero_grad()
        dec_opt.zero_grad()
        self.manual_backward(loss)
        dec_opt.step()
        if idx % 2 == 1:  # the encoder learns at half the rate, only from the odd batches
            enc_opt.step()

    def validation_step(self, batch, idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), x), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.enc.parameters(), lr=0.05),
            torch.optim.Adam(self.dec.parameters(), lr=1e-2),
        )


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=g) @ torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(TwoOpt(), DataLoader(data(320, 1), 16, shuffle=True), DataLoader(data(64, 2), 16))
    if trainer.is_global_zero:
        print(trainer.callback_metrics)
