import pytorch_lightning as L
import torch
import torch.nn as nn
from pytorch_lightning.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class MagnitudePruning(Callback):
    """Zeroes the smallest weights after each epoch, raising the sparsity linearly."""

    def __init__(self, final_sparsity=0.5, epochs=3):
        self.final_sparsity, self.epochs = final_sparsity, epochs

    def on_train_epoch_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        sparsity = self.final_sparsity * (trainer.current_epoch + 1) / self.epochs
        total = zeros = 0
        with torch.no_grad():
            for m in pl_module.modules():
                if isinstance(m, nn.Linear):
                    k = int(sparsity * m.weight.numel())
                    cut = m.weight.abs().flatten().kthvalue(max(k, 1)).values
                    m.weight.mul_(m.weight.abs() > cut)
                    total += m.weight.numel()
                    zeros += (m.weight == 0).sum().item()
        trainer.print(f"epoch {trainer.current_epoch}: sparsity {zeros / total:.3f}")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self):
        m = self.trainer.callback_metrics
        self.trainer.print(f"val_loss {m['val_loss']:.5f} val_acc {m['val_acc']:.4f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 20, generator=g) * 1.2
    x[torch.arange(n), y] += 2
    return TensorDataset(x, y)


if __name__ == "__main__":
    L.seed_everything(0)
    model = Net()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=[MagnitudePruning()],
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(blobs(160, 0), batch_size=10, shuffle=True), DataLoader(blobs(80, 1), batch_size=10))
    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"rank {trainer.global_rank}: |w| {w.norm():.5f} zeros {(w == 0).sum().item()}", flush=True)
