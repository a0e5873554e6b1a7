import pytorch_lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    """Two noisy views of a hidden vector (think of an image and its caption)."""

    def __init__(self, n=512, seed=0):
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, 6, generator=g)
        self.image = z @ torch.randn(6, 24, generator=g) + 0.2 * torch.randn(n, 24, generator=g)
        self.text = z @ torch.randn(6, 18, generator=g) + 0.2 * torch.randn(n, 18, generator=g)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.text[i]


class CLIP(L.LightningModule):
    def __init__(self, dim=16, temperature=0.1):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, dim))
        self.text = nn.Sequential(nn.Linear(18, 64), nn.ReLU(), nn.Linear(64, dim))
        self.temperature = temperature

    def gather(self, t):
        return self.all_gather(t, sync_grads=True).flatten(0, 1)

    def training_step(self, batch, batch_idx):
        image, text = batch
        image = F.normalize(self.image(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        all_image, all_text = self.gather(image), self.gather(text)
        logits_image = image @ all_text.t() / self.temperature
        logits_text = text @ all_image.t() / self.temperature
        labels = torch.arange(len(image), device=self.device)
        loss = (F.cross_entropy(logits_image, labels) + F.cross_entropy(logits_text, labels)) / 2
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.print("epoch", self.current_epoch, "loss", round(self.trainer.callback_metrics["loss"].item(), 4))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main():
    L.seed_everything(11, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(CLIP(), DataLoader(Pairs(), batch_size=32, shuffle=True, drop_last=True))


if __name__ == "__main__":
    main()
