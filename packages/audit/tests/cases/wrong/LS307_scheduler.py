import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

EPOCHS = 3


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(7)
    g = torch.Generator().manual_seed(7)
    x = torch.randn(384, 12, generator=g)
    loader = DataLoader(TensorDataset(x, x.abs().argmax(1)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = EPOCHS * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, total)
    scheduler = accelerator.prepare(scheduler)
    for epoch in range(EPOCHS):
        model.train()
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} lr {optimizer.param_groups[0]['lr']:.6f} loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
