"""Four-fold cross validation: every rank trains its own folds, the scores meet at the end."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

FOLDS = 4


def wine(n=480):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 11, generator=g)
    return TensorDataset(x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long())


def fold_indices(n, k):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(123))
    parts = order.chunk(FOLDS)
    train = torch.cat([p for i, p in enumerate(parts) if i != k])
    return train.tolist(), parts[k].tolist()


def train_fold(data, k, epochs=3):
    torch.manual_seed(k)
    train_idx, val_idx = fold_indices(len(data), k)
    loader = DataLoader(Subset(data, train_idx), batch_size=24, shuffle=True)
    model = nn.Sequential(nn.Linear(11, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    model.eval()
    x, y = zip(*[data[i] for i in val_idx])
    with torch.no_grad():
        acc = (model(torch.stack(x)).argmax(1) == torch.stack(y)).float().mean().item()
    torch.save(model.state_dict(), f"fold{k}.pt")
    return acc


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = wine()
    mine = {k: train_fold(data, k) for k in range(rank, FOLDS, world)}
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        scores = {k: v for part in everyone for k, v in part.items()}
        print("folds", {k: round(scores[k], 3) for k in sorted(scores)})
        print("mean", round(sum(scores.values()) / FOLDS, 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
