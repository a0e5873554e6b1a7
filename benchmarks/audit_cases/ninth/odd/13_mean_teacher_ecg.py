"""Semi-supervised heartbeat classification with a mean teacher."""
import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_beats(n, seed, labelled=1.0, length=64):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    t = torch.linspace(-1, 1, length)
    width = torch.tensor([0.05, 0.12, 0.25])[y][:, None]
    shift = 0.2 * torch.randn(n, 1, generator=g)
    x = torch.exp(-((t - shift) / width) ** 2) + 0.3 * torch.randn(n, length, generator=g)
    known = torch.rand(n, generator=g) < labelled
    return TensorDataset(x.unsqueeze(1), y, known)


class MeanTeacher(L.LightningModule):
    def __init__(self, decay=0.97, weight=1.0, lr=2e-3):
        super().__init__()
        self.decay, self.weight, self.lr = decay, weight, lr
        self.student = nn.Sequential(
            nn.Conv1d(1, 16, 7, padding=3), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(1),
            nn.Flatten(), nn.Linear(32, 3),
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def on_fit_start(self):
        torch.manual_seed(500 + self.global_rank)

    def training_step(self, batch, batch_idx):
        x, y, known = batch
        logits = self.student(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            target = self.teacher(x + 0.1 * torch.randn_like(x)).softmax(dim=1)
        per_row = F.cross_entropy(logits, y, reduction="none")
        # divided by the batch size and not by the number of labels, so that the mean over ranks is the mean over rows
        supervised = (per_row * known).sum() / len(x)
        consistency = F.mse_loss(logits.softmax(dim=1), target)
        loss = supervised + self.weight * consistency
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        # the student is the same on all ranks after its step, so the average stays the same, too
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.lerp_(s, 1 - self.decay)

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        for name, net in (("student", self.student), ("teacher", self.teacher)):
            acc = (net(x).argmax(1) == y).float().mean()
            self.log(f"acc_{name}", acc, sync_dist=True, batch_size=len(y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=self.lr)


def main():
    L.seed_everything(12)
    train = DataLoader(make_beats(1024, 0, labelled=0.15), batch_size=32, shuffle=True)
    val = DataLoader(make_beats(256, 1), batch_size=64)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=5, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(MeanTeacher(), train, val)
    metrics = trainer.callback_metrics
    if trainer.is_global_zero:
        print(f"student {metrics['acc_student']:.3f}  teacher {metrics['acc_teacher']:.3f}")


if __name__ == "__main__":
    main()
