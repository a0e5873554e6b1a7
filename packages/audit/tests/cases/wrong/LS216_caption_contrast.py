"""Two-tower contrastive training on paired features (image / caption)."""
import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def pairs(n, seed):
    mix = torch.Generator().manual_seed(50)
    to_img, to_txt = torch.randn(8, 40, generator=mix), torch.randn(8, 24, generator=mix)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 8, generator=g)
    img = z @ to_img + 0.5 * torch.randn(n, 40, generator=g)
    txt = z @ to_txt + 0.5 * torch.randn(n, 24, generator=g)
    return TensorDataset(img, txt)


class Towers(pl.LightningModule):
    def __init__(self, dim=16, temperature=0.1):
        super().__init__()
        self.temperature = temperature
        self.img = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, dim))
        self.txt = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, img, txt):
        return F.normalize(self.img(img), dim=-1), F.normalize(self.txt(txt), dim=-1)

    def training_step(self, batch, batch_idx):
        a, b = self(*batch)
        all_a = self.all_gather(a).flatten(0, 1)
        all_b = self.all_gather(b).flatten(0, 1)
        target = torch.arange(len(a), device=self.device) + self.global_rank * len(a)
        logits_a = a @ all_b.T / self.temperature
        logits_b = b @ all_a.T / self.temperature
        loss = (F.cross_entropy(logits_a, target) + F.cross_entropy(logits_b, target)) / 2
        top1 = (logits_a.argmax(1) == target).float().mean()
        self.log_dict({"loss": loss, "top1": top1}, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch} loss {m['loss']:.3f} top1 {m['top1']:.3f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    pl.seed_everything(4)
    loader = DataLoader(pairs(1024, 0), batch_size=32, shuffle=True, drop_last=True)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Towers(), loader)
