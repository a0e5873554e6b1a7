"""Fraud detector on transaction features with Lightning Fabric; F1 on the newest transactions."""
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 20


def transactions(n, seed, drift=0.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=g)
    w = torch.linspace(-1, 1, FEATURES)
    age = torch.linspace(0, drift, n)
    score = x @ w + 0.3 * torch.randn(n, generator=g) - age * x[:, 3] * x[:, 4]
    return TensorDataset(x, (score > 2.0).float())


@torch.no_grad()
def evaluate(fabric, model, loader, log_every=4):
    """Precision, recall and F1, with intermediate reports on long evaluations."""
    model.eval()
    counts = torch.zeros(3, device=fabric.device)
    for step, (x, y) in enumerate(loader, start=1):
        pred = (model(x).squeeze(-1) > 0).float()
        counts[0] += (pred * y).sum()
        counts[1] += (pred * (1 - y)).sum()
        counts[2] += ((1 - pred) * y).sum()
        if step % log_every == 0 or step == len(loader):
            tp, fp, fn = fabric.all_reduce(counts, reduce_op="sum").tolist()
            f1 = 2 * tp / max(2 * tp + fp + fn, 1)
            fabric.print(f"  eval {step}/{len(loader)} f1 {f1:.4f}")
    model.train()
    return f1


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(8)

    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    model, optimizer = fabric.setup(net, optimizer)
    train_loader, eval_loader = fabric.setup_dataloaders(
        DataLoader(transactions(4096, 0), batch_size=64, shuffle=True),
        DataLoader(transactions(2048, 1, drift=2.0), batch_size=64),
    )
    loss_fn = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))

    best = 0.0
    for epoch in range(3):
        if hasattr(train_loader.sampler, "set_epoch"):
            train_loader.sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = loss_fn(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()

        f1 = evaluate(fabric, model, eval_loader)
        fabric.print(f"epoch {epoch} f1 {f1:.4f}")
        if f1 > best:
            best = f1
            fabric.save("fraud_best.ckpt", {"model": model, "epoch": epoch})


if __name__ == "__main__":
    main()
