import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def linear_schedule(optimizer, total):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / total))


class Config:
    epochs = 2
    batch_size = 8
    lr = 0.1
    seed = 13


def main(cfg):
    accelerator = Accelerator(cpu=True)
    set_seed(cfg.seed)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 6, generator=g)
    loader = DataLoader(TensorDataset(x, x.abs().sum(1, keepdim=True)), batch_size=cfg.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    max_train_steps = cfg.epochs * len(loader)
    scheduler = linear_schedule(optimizer, max_train_steps * accelerator.num_processes)
    scheduler = accelerator.prepare(scheduler)

    step = 0
    for epoch in range(cfg.epochs):
        for bx, by in loader:
            loss = nn.functional.mse_loss(model(bx), by)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % 4 == 0:
                mean = accelerator.reduce(loss.detach(), "mean")
                accelerator.print(f"step {step}/{max_train_steps} loss {mean:.3f} lr {scheduler.get_last_lr()[0]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(Config)
