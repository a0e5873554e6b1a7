import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def main(epochs=2, accum=2):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accum)
    set_seed(0)
    train = DataLoader(make(128, 0), batch_size=8, shuffle=True)
    val = DataLoader(make(45, 1), batch_size=8)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2))
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    model, opt, train, val = accelerator.prepare(model, opt, train, val)
    updates = epochs * len(train) // accum
    schedule = torch.optim.lr_scheduler.LinearLR(opt.optimizer, 1.0, 0.0, total_iters=updates)
    for epoch in range(epochs):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
        model.eval()
        hits = seen = 0
        for x, y in val:
            with torch.no_grad():
                pred = model(x).argmax(-1)
            pred, y = accelerator.gather_for_metrics((pred, y))
            hits += (pred == y).sum().item()
            seen += len(y)
        accelerator.print(f"epoch {epoch}: {hits}/{seen}, lr {schedule.get_last_lr()[0]:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
