"""The encoder runs without gradient in the first epoch and takes part afterwards."""
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class TextNet(L.LightningModule):
    def __init__(self, head_only_epochs=1):
        super().__init__()
        self.head_only_epochs = head_only_epochs
        self.encoder = nn.Sequential(nn.Embedding(60, 24), nn.Linear(24, 24), nn.ReLU())
        self.head = nn.Linear(24, 4)

    def forward(self, ids):
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.current_epoch >= self.head_only_epochs):
            h = self.encoder(ids).mean(1)
        return self.head(h)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def on_train_epoch_end(self):
        enc = torch.cat([p.detach().flatten() for p in self.encoder.parameters()]).norm()
        print(f"rank {self.global_rank} epoch {self.current_epoch} val {self.trainer.callback_metrics['val_loss']:.4f} "
              f"|enc| {enc:.6f}", flush=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW([{"params": self.head.parameters(), "lr": 1e-2},
                                 {"params": self.encoder.parameters(), "lr": 3e-3}], weight_decay=0.0)
        sched = torch.optim.lr_scheduler.LambdaLR(
            opt, [lambda e: 0.9 ** e, lambda e: 0.9 ** max(e - self.head_only_epochs, 0)])
        return [opt], [sched]


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    ids = torch.randint(10, 60, (n, 6), generator=g)
    ids[:, 0] = y
    return TensorDataset(ids, y)


if __name__ == "__main__":
    L.seed_everything(12)
    trainer = L.Trainer(max_epochs=3, devices=2, accelerator="cpu", strategy="ddp_find_unused_parameters_true",
                        logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False)
    trainer.fit(TextNet(), DataLoader(data(160, 0), 10, shuffle=True), DataLoader(data(40, 1), 10))
