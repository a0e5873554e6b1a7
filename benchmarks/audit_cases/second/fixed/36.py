import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

EPOCHS = 3
ACCUM = 2
LR = 1e-2


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM)
    set_seed(5)
    x = torch.rand(640, 4) * 4 - 2
    y = (x ** 2).sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # len(loader) is known after prepare
    updates_per_epoch = math.ceil(len(loader) / ACCUM)
    num_training_steps = EPOCHS * updates_per_epoch * accelerator.num_processes
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=num_training_steps // 10, num_training_steps=num_training_steps
    )
    scheduler = accelerator.prepare(scheduler)

    for epoch in range(EPOCHS):
        model.train()
        total = torch.zeros(1)
        for xb, yb in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(xb), yb)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        total = accelerator.reduce(total / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch} loss {total.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
