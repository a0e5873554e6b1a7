import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from accelerate import Accelerator
from accelerate.utils import set_seed


def transactions(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=g) < 0.05).long()
    x = torch.randn(n, 12, generator=g)
    x[y == 1, :3] += 1.2
    x[y == 1, 4] *= 2.5
    return x, y


def balanced_sampler(y, draws, seed):
    counts = torch.bincount(y).double()
    weights = (1 / counts)[y]
    return WeightedRandomSampler(weights, draws, replacement=True, generator=torch.Generator().manual_seed(seed))


def average_precision(truth, scores):
    hits = truth[scores.argsort(descending=True)].double()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return ((precision * hits).sum() / hits.sum()).item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(9)
    x, y = transactions(3000, 0)
    sampler = balanced_sampler(y, draws=1024, seed=5)
    train_loader = DataLoader(TensorDataset(x, y), batch_size=32, sampler=sampler, drop_last=True)
    test_loader = DataLoader(TensorDataset(*transactions(1001, 1)), batch_size=128)

    model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(3):
        model.train()
        positives = torch.zeros(2)
        for xb, yb in train_loader:
            loss = loss_fn(model(xb), yb)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            positives += torch.tensor([yb.sum().item(), float(len(yb))])
        pos, drawn = accelerator.reduce(positives, reduction="sum").tolist()

        model.eval()
        scores, truth = [], []
        with torch.no_grad():
            for xb, yb in test_loader:
                s, t = accelerator.gather_for_metrics((model(xb).softmax(1)[:, 1], yb))
                scores.append(s)
                truth.append(t)
        scores, truth = torch.cat(scores), torch.cat(truth)
        ap = average_precision(truth, scores)
        accelerator.print(f"epoch {epoch} drawn {drawn:.0f} positive {pos / drawn:.3f} AP {ap:.3f} n {len(truth)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
