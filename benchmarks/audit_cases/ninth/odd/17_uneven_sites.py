"""Two hospitals train one readmission model; each holds its own rows, and not equally many."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 9


def hospital(site, n, seed):
    """Patients of one site: the same rule, but another mix of ages and severities."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=g)
    x[:, 0] += 0.5 * site
    logit = 1.5 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3]
    y = (torch.rand(n, generator=g) < torch.sigmoid(logit)).float()
    return x, y


def all_have_one(batch):
    """True if each rank still has a batch."""
    flag = torch.tensor(int(batch is not None))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


class Readmission(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(40)
    rank = fabric.global_rank

    # the rows never leave their site, so the loader is not sharded any further
    n_train, n_test = (1300, 210) if rank == 0 else (1130, 170)
    x_test, y_test = hospital(rank, n_test, seed=900 + rank)
    shuffle = torch.Generator().manual_seed(70 + rank)
    loader = DataLoader(
        TensorDataset(*hospital(rank, n_train, seed=rank)), batch_size=32,
        shuffle=True, drop_last=True, generator=shuffle,
    )

    model = Readmission()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)

    for epoch in range(5):
        batches = iter(loader)
        total, steps = torch.zeros(()), 0
        while True:
            batch = next(batches, None)
            # the epoch ends on all ranks as soon as one of them has run out;
            # the rows that the larger site leaves over are others in each epoch
            if not all_have_one(batch):
                break
            x, y = batch
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach()
            steps += 1
        dist.all_reduce(total)
        fabric.print(f"epoch {epoch} steps {steps} loss {total.item() / steps / fabric.world_size:.4f}")

    with torch.no_grad():
        hits = ((model(x_test) > 0) == (y_test > 0.5)).sum()
    score = [None] * fabric.world_size
    dist.all_gather_object(score, (int(hits), n_test))
    for site, (good, n) in enumerate(score):
        fabric.print(f"site {site} accuracy {good / n:.3f}")
    fabric.print(f"together {sum(good for good, _ in score) / sum(n for _, n in score):.3f}")


if __name__ == "__main__":
    main()
