"""Fraud scoring on a small, unbalanced table; reports the area under the ROC curve."""
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    features: int = 16
    hidden: int = 32
    train_rows: int = 1024
    valid_rows: int = 210
    batch_size: int = 32
    epochs: int = 3
    lr: float = 5e-3
    seed: int = 12


def table(rows, seed, features):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=g)
    risk = x[:, 0] * x[:, 1] + 1.5 * x[:, 2] - x[:, 3].abs()
    y = (risk + torch.randn(rows, generator=g) > 1.2).float()
    return TensorDataset(x, y)


def auc(scores, targets):
    pos, neg = scores[targets == 1], scores[targets == 0]
    wins = (pos[:, None] > neg[None]).float() + 0.5 * (pos[:, None] == neg[None]).float()
    return wins.mean().item()


class Scorer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.features)
        self.net = nn.Sequential(
            nn.Linear(cfg.features, cfg.hidden), nn.SiLU(), nn.Linear(cfg.hidden, cfg.hidden), nn.SiLU(), nn.Linear(cfg.hidden, 1)
        )

    def forward(self, x):
        return self.net(self.norm(x)).squeeze(-1)


def run_validation(accelerator, model, loader):
    model.eval()
    scores, targets = [], []
    for x, y in loader:
        with torch.no_grad():
            out = model(x)
        s, t = accelerator.gather_for_metrics((out, y))
        scores.append(s)
        targets.append(t)
    scores, targets = torch.cat(scores), torch.cat(targets)
    return auc(scores, targets), targets.mean().item(), len(targets)


def main(cfg=Config()):
    accelerator = Accelerator(cpu=True)
    set_seed(cfg.seed)
    train = DataLoader(table(cfg.train_rows, 1, cfg.features), batch_size=cfg.batch_size, shuffle=True)
    valid = DataLoader(table(cfg.valid_rows, 2, cfg.features), batch_size=cfg.batch_size)
    model = Scorer(cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))

    best = 0.0
    for epoch in range(cfg.epochs):
        model.train()
        for x, y in train:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        score, rate, n = run_validation(accelerator, model, valid)
        accelerator.print(f"epoch {epoch}: auc {score:.4f}, fraud rate {rate:.3f}, rows {n}")
        if score > best:
            best = score
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "best_scorer.pt")
    accelerator.print(f"best auc {best:.4f}")


if __name__ == "__main__":
    main()
