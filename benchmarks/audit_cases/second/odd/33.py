import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, ACCUM, BATCH = 2, 4, 8


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM, mixed_precision="bf16")
    set_seed(0)
    x = torch.randn(697, 10)
    y = (x @ torch.randn(10, 4)).argmax(1)
    train = DataLoader(TensorDataset(x[:560], y[:560]), batch_size=BATCH, shuffle=True)
    val = DataLoader(TensorDataset(x[560:], y[560:]), batch_size=32)
    model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # counted in batches of one process before sharding: the wrapper advances it once per process
    updates = math.ceil(len(train) / ACCUM) * EPOCHS
    sched = LambdaLR(opt, lambda s: min(1.0, (s + 1) / (0.1 * updates)) * max(0.0, 1 - s / updates))
    model, opt, train, val, sched = accelerator.prepare(model, opt, train, val, sched)

    for epoch in range(EPOCHS):
        model.train()
        for xb, yb in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(xb), yb)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        model.eval()
        hits, seen = 0, 0
        for xb, yb in val:
            with torch.no_grad():
                pred = model(xb).argmax(-1)
            pred, ref = accelerator.gather_for_metrics((pred, yb))
            hits += (pred == ref).sum().item()
            seen += len(ref)
        accelerator.print(f"epoch {epoch}: {hits / seen:.4f} of {seen} lr {sched.get_last_lr()[0]:.2e}")
    accelerator.save_state("state")
    accelerator.end_training()


if __name__ == "__main__":
    main()
