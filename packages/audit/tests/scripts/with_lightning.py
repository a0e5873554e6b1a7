import hashlib
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class M(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

    def training_step(self, batch, i):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, i):
        x, y = batch
        self.log("v", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1)]


if __name__ == "__main__":
    L.seed_everything(0)
    data = TensorDataset(torch.randn(36, 8), torch.randint(0, 3, (36,)))
    m = M()
    t = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=True,
        default_root_dir=sys.argv[1],
        enable_model_summary=False,
    )
    t.fit(m, DataLoader(data, 4, shuffle=True), DataLoader(data, 8))
    h = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in m.state_dict().values())).hexdigest()
    print("HASH", t.global_rank, h, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8])
