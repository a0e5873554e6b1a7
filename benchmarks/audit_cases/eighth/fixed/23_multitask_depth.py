"""Two heads (segment class and depth) with homoscedastic uncertainty weighting."""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    w_cls = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
    w_reg = torch.randn(20, generator=torch.Generator().manual_seed(6))
    cls = (x @ w_cls + 0.5 * torch.randn(n, 4, generator=g)).argmax(1)
    depth = torch.tanh(x @ w_reg / 4) * 3 + 0.3 * torch.randn(n, generator=g)
    return TensorDataset(x, cls, depth)


class TwoHeads(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.segment = nn.Linear(width, 4)
        self.depth = nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.segment(h), self.depth(h).squeeze(-1)


class UncertaintyLoss(nn.Module):
    """Kendall et al. 2018: every task has its own learned log variance."""

    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, logits, depth, cls, target):
        ce = nn.functional.cross_entropy(logits, cls)
        l1 = nn.functional.smooth_l1_loss(depth, target)
        losses = torch.stack([ce, l1])
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    train_loader = DataLoader(build_data(1024, 10), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(build_data(256, 11), batch_size=args.batch_size)
    model, criterion = TwoHeads(), UncertaintyLoss()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=args.lr)
    model, criterion, optimizer, train_loader, test_loader = accelerator.prepare(
        model, criterion, optimizer, train_loader, test_loader
    )

    for epoch in range(args.epochs):
        model.train()
        for x, cls, target in train_loader:
            optimizer.zero_grad()
            logits, depth = model(x)
            loss = criterion(logits, depth, cls, target)
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        right, err = [], []
        with torch.no_grad():
            for x, cls, target in test_loader:
                logits, depth = model(x)
                ok, delta = accelerator.gather_for_metrics(((logits.argmax(1) == cls).float(), (depth - target).abs()))
                right.append(ok)
                err.append(delta)
        accelerator.print(f"epoch {epoch}: acc {torch.cat(right).mean():.3f} mae {torch.cat(err).mean():.3f}")

    weights = torch.exp(-next(iter(criterion.parameters()))).tolist()
    accelerator.print("task weights", [round(w, 3) for w in weights])


if __name__ == "__main__":
    main()
