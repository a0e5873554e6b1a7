import argparse

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def get_data(n_train=1280, n_valid=333):
    rng = np.random.default_rng(3)
    n = n_train + n_valid
    y = (rng.random(n) < 0.3).astype(np.float32)
    latent = rng.normal(size=(n, 8)) + 0.55 * y[:, None] * rng.choice([-1, 1], size=8)
    x = latent @ rng.normal(size=(8, 24)) + 0.5 * rng.normal(size=(n, 24))
    flip = rng.random(n) < 0.06
    y[flip] = 1 - y[flip]
    mean, std = x[:n_train].mean(0), x[:n_train].std(0)
    x = torch.tensor((x - mean) / std, dtype=torch.float32)
    y = torch.tensor(y)
    return TensorDataset(x[:n_train], y[:n_train]), TensorDataset(x[n_train:], y[n_train:])


def roc_auc(targets, scores):
    order = scores.argsort()
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    pos = targets == 1
    n_pos, n_neg = pos.sum(), (~pos).sum()
    return (ranks[pos].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)


def f1(targets, pred):
    tp = (pred & (targets == 1)).sum()
    return 2 * tp / max(1, pred.sum() + (targets == 1).sum())


def build(width):
    return nn.Sequential(
        nn.Linear(24, width), nn.LayerNorm(width), nn.GELU(),
        nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(),
        nn.Linear(width, 1),
    )


@torch.no_grad()
def validate(accelerator, model, loader):
    model.eval()
    scores, targets = [], []
    for x, y in loader:
        logits = model(x).squeeze(1)
        logits, y = accelerator.gather_for_metrics((logits, y))
        scores.append(logits.sigmoid().cpu())
        targets.append(y.cpu())
    scores = torch.cat(scores).numpy()
    targets = torch.cat(targets).numpy().astype(np.int64)
    return {
        "n": len(targets),
        "auc": roc_auc(targets, scores),
        "f1": f1(targets, scores > 0.5),
        "acc": float(((scores > 0.5) == targets).mean()),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    train_set, valid_set = get_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    valid_loader = DataLoader(valid_set, batch_size=args.batch_size)

    model = build(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, train_loader, valid_loader
    )
    loss_fn = nn.BCEWithLogitsLoss()

    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x).squeeze(1), y)
            accelerator.backward(loss)
            optimizer.step()
        metrics = validate(accelerator, model, valid_loader)
        accelerator.print(f"epoch {epoch}: " + " ".join(f"{k}={v:.4f}" for k, v in metrics.items()))
        if metrics["auc"] > best:
            best = metrics["auc"]
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "best.pt")
    accelerator.print(f"best auc {best:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
