"""Keyword spotting with DiLoCo: every rank trains alone for some steps, then an outer Nesterov step joins them."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, FRAMES, MELS = 8, 20, 12
EPOCHS, INNER_STEPS = 4, 8


def recordings(n, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = torch.randn(WORDS, FRAMES, MELS, generator=torch.Generator().manual_seed(50))
    y = torch.randint(0, WORDS, (n,), generator=g)
    x = shapes[y] + 1.5 * torch.randn(n, FRAMES, MELS, generator=g)
    return TensorDataset(x, y)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(MELS, 32, 5, padding=2)
        self.norm = nn.GroupNorm(4, 32)
        self.out = nn.Linear(32 * 5, WORDS)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x.transpose(1, 2))))
        return self.out(F.avg_pool1d(h, 4).flatten(1))


class OuterNesterov:
    """Keeps the shared weights; its input is the mean way that the ranks went since the last joining."""

    def __init__(self, params, lr=0.7, momentum=0.6):
        self.params = list(params)
        self.anchor = [p.detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(a) for a in self.anchor]
        self.lr, self.momentum = lr, momentum

    @torch.no_grad()
    def join(self):
        for p, a, v in zip(self.params, self.anchor, self.velocity):
            delta = a - p
            dist.all_reduce(delta)
            delta /= dist.get_world_size()
            v.mul_(self.momentum).add_(delta)
            a.sub_(self.lr * (delta + self.momentum * v))
            p.copy_(a)


@torch.no_grad()
def accuracy(model, data, rank, world):
    model.eval()
    x, y = data.tensors
    x, y = x[rank::world], y[rank::world]
    counts = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    train, test = recordings(1024, 1), recordings(301, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=4)
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    model = Spotter()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    # the inner optimizer's moments belong to each worker, as in the DiLoCo paper
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = OuterNesterov(model.parameters())

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            inner.zero_grad()
            loss.backward()
            inner.step()
            stats += torch.tensor([loss.item() * len(y), len(y)])
            step += 1
            if step % INNER_STEPS == 0:
                outer.join()
        if step % INNER_STEPS:
            outer.join()
            step = 0
        dist.all_reduce(stats)
        acc = accuracy(model, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0] / stats[1]:.4f} test acc {acc:.4f}")

    if rank == 0:
        torch.save(model.state_dict(), "spotter.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
