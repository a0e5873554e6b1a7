"""Rare surface defects: training batches are drawn with replacement so that the classes come equally often."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from accelerate import Accelerator
from accelerate.utils import set_seed

KINDS = ["fine", "scratch", "dent", "stain"]
SHARE = torch.tensor([0.85, 0.07, 0.05, 0.03])
FEATURES = 20


def parts(n, seed):
    look = torch.randn(len(KINDS), FEATURES, generator=torch.Generator().manual_seed(0)) * 0.7
    gen = torch.Generator().manual_seed(seed)
    kind = torch.multinomial(SHARE, n, replacement=True, generator=gen)
    return TensorDataset(look[kind] + torch.randn(n, FEATURES, generator=gen), kind)


@torch.no_grad()
def recall_per_kind(accelerator, model, loader):
    model.eval()
    predictions, truths = [], []
    for x, y in loader:
        pred, truth = accelerator.gather_for_metrics((model(x).argmax(dim=1), y))
        predictions.append(pred)
        truths.append(truth)
    model.train()
    predictions, truths = torch.cat(predictions), torch.cat(truths)
    return [(predictions[truths == k] == k).float().mean().item() for k in range(len(KINDS))]


def main(epochs=3, batch_size=25):
    set_seed(77)
    accelerator = Accelerator(cpu=True)
    train_set, test_set = parts(3000, 1), parts(1013, 2)
    labels = train_set.tensors[1]
    weights = 1.0 / torch.bincount(labels, minlength=len(KINDS)).float()
    # 1500 draws with replacement are one "epoch": frequent parts are mostly skipped, rare ones come many times
    sampler = WeightedRandomSampler(weights[labels], num_samples=1500, replacement=True)
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=64)

    model = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, len(KINDS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # accelerate gives the sampler a generator that is the same on all ranks,
    # and deals the batches of the one common sequence of draws to the ranks
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for epoch in range(epochs):
        running = 0.0
        drawn = torch.zeros(len(KINDS))
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            running += accelerator.reduce(loss.detach(), reduction="mean").item()
            drawn += torch.bincount(y, minlength=len(KINDS)).float()
        drawn = accelerator.reduce(drawn, reduction="sum")
        recalls = recall_per_kind(accelerator, model, test_loader)
        text = ", ".join(f"{k} {r:.2f} ({int(d)} drawn)" for k, r, d in zip(KINDS, recalls, drawn.tolist()))
        accelerator.print(f"epoch {epoch}: loss {running / len(train_loader):.4f}; recall {text}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
