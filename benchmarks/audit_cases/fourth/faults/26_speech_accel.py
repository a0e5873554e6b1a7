"""Keyword spotting on synthetic log-mel windows."""
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.set_num_threads(1)


@dataclass
class Config:
    epochs: int = 2
    batch_size: int = 8
    lr: float = 4e-3
    n_train: int = 320
    n_eval: int = 64
    keywords: int = 6


def build_dataset(n, keywords, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, keywords, (n,), generator=g)
    x = torch.randn(n, 10, 20, generator=g)
    x[torch.arange(n), y] += 0.8
    return TensorDataset(x, y)


class Spotter(nn.Module):
    def __init__(self, keywords):
        super().__init__()
        self.conv = nn.Conv1d(10, 24, 5, padding=2)
        self.norm = nn.LayerNorm(24)
        self.fc = nn.Linear(24, keywords)

    def forward(self, x):
        h = torch.relu(self.conv(x)).mean(-1)
        return self.fc(self.norm(h))


def make_loaders(cfg, accelerator):
    train = build_dataset(cfg.n_train, cfg.keywords, 0)
    part = range(accelerator.process_index, len(train), accelerator.num_processes)
    train = Subset(train, list(part))
    train_loader = DataLoader(train, batch_size=cfg.batch_size, shuffle=True)
    eval_loader = DataLoader(build_dataset(cfg.n_eval, cfg.keywords, 1), batch_size=cfg.batch_size)
    return train_loader, eval_loader


def main(cfg=Config()):
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    train_loader, eval_loader = make_loaders(cfg, accelerator)
    model = Spotter(cfg.keywords)
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    model, optim, train_loader, eval_loader = accelerator.prepare(model, optim, train_loader, eval_loader)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(cfg.epochs):
        model.train()
        seen = 0
        for x, y in train_loader:
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            optim.step()
            optim.zero_grad()
            seen += len(y)
        model.eval()
        correct = []
        for x, y in eval_loader:
            with torch.no_grad():
                hit = model(x).argmax(1) == y
            correct.append(accelerator.gather_for_metrics(hit))
        acc = torch.cat(correct).float().mean().item()
        accelerator.print(f"epoch={epoch} steps={len(train_loader)} local_samples={seen} acc={acc:.4f}")


if __name__ == "__main__":
    main()
