"""Two-tower contrastive training (captions and pictures as feature vectors), negatives from all devices."""
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    mix = torch.Generator().manual_seed(1234)
    latent = torch.randn(n, 12, generator=g)
    picture = latent @ torch.randn(12, 64, generator=mix) + 0.3 * torch.randn(n, 64, generator=g)
    caption = latent @ torch.randn(12, 40, generator=mix) + 0.3 * torch.randn(n, 40, generator=g)
    return TensorDataset(picture, caption)


def tower(width_in, width_out=32):
    return nn.Sequential(nn.Linear(width_in, 96), nn.ReLU(), nn.Linear(96, width_out))


class TwoTower(L.LightningModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.lr = lr
        self.picture_tower = tower(64)
        self.caption_tower = tower(40)
        self.log_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, picture, caption):
        p = F.normalize(self.picture_tower(picture), dim=-1)
        c = F.normalize(self.caption_tower(caption), dim=-1)
        return p, c

    def contrast(self, p, c):
        all_p = self.all_gather(p, sync_grads=True).flatten(0, 1)
        all_c = self.all_gather(c, sync_grads=True).flatten(0, 1)
        scale = self.log_scale.exp()
        labels = torch.arange(p.size(0), device=p.device)
        loss_p = F.cross_entropy(scale * p @ all_c.T, labels)
        loss_c = F.cross_entropy(scale * c @ all_p.T, labels)
        return 0.5 * (loss_p + loss_c)

    def training_step(self, batch, batch_idx):
        loss = self.contrast(*self(*batch))
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        p, c = self(*batch)
        hit = (p @ c.T).argmax(1) == torch.arange(len(p))
        self.log("recall@1", hit.float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


def main():
    L.seed_everything(8)
    train = DataLoader(make_pairs(1024, 1), batch_size=32, shuffle=True, drop_last=True)
    val = DataLoader(make_pairs(256, 2), batch_size=64)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(TwoTower(), train, val)
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
