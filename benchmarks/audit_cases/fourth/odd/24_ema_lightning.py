import copy

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class WeightAverage(L.Callback):
    """Shadow weights, swapped in for validation and swapped out afterwards."""

    def __init__(self, decay=0.9):
        self.decay, self.shadow, self.backup = decay, None, None

    def on_train_start(self, trainer, module):
        self.shadow = copy.deepcopy(module.state_dict())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_):
        for k, v in module.state_dict().items():
            if v.dtype.is_floating_point:
                self.shadow[k].lerp_(v, 1 - self.decay)
            else:
                self.shadow[k].copy_(v)

    def on_validation_start(self, trainer, module):
        if self.shadow is not None:
            self.backup = copy.deepcopy(module.state_dict())
            module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, module):
        if self.backup is not None:
            module.load_state_dict(self.backup)
            self.backup = None

    def state_dict(self):
        return {"shadow": self.shadow}


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3))

    def training_step(self, batch, i):
        return nn.functional.cross_entropy(self.f(batch[0]), batch[1])

    def validation_step(self, batch, i):
        self.log("acc", (self.f(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def on_train_epoch_end(self):
        norm = torch.cat([p.detach().flatten() for p in self.parameters()]).norm()
        print(f"rank {self.global_rank} acc {self.trainer.callback_metrics['acc']:.4f} |w| {norm:.6f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return TensorDataset(x, x[:, :3].argmax(1))


L.seed_everything(3)
trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False,
                    callbacks=[WeightAverage(), L.pytorch.callbacks.ModelCheckpoint("ema_ckpt", save_last=True)],
                    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), DataLoader(data(192, 0), 12, shuffle=True), DataLoader(data(48, 1), 12))
