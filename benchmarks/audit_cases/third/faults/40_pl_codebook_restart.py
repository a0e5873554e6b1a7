"""A small VQ autoencoder with codebook restarts."""
import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VectorQuantizer(nn.Module):
    def __init__(self, codes=16, dim=4):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(codes, dim))
        self.usage = [0] * codes

    def forward(self, z):
        idx = torch.cdist(z, self.codebook).argmin(1)
        for i in idx.tolist():
            self.usage[i] += 1
        q = self.codebook[idx]
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss

    @torch.no_grad()
    def restart(self, z):
        usage = torch.tensor(self.usage)
        dead = usage == 0
        self.codebook[dead] = z[torch.randint(len(z), (int(dead.sum()),))]
        self.usage = [0] * len(self.usage)


class VQModel(L.LightningModule):
    def __init__(self, restart_every=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
        self.vq = VectorQuantizer()
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        self.restart_every = restart_every

    def training_step(self, batch, batch_idx):
        (x,) = batch
        z = self.encoder(x)
        q, vq_loss = self.vq(z)
        loss = F.mse_loss(self.decoder(q), x) + vq_loss
        if (batch_idx + 1) % self.restart_every == 0:
            self.vq.restart(z)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(21)
    g = torch.Generator().manual_seed(2)
    loader = DataLoader(TensorDataset(torch.randn(128, 12, generator=g)), batch_size=8, shuffle=True)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(VQModel(), loader)
    if trainer.is_global_zero:
        print("loss", trainer.callback_metrics["loss"].item())


if __name__ == "__main__":
    main()
