"""Local training with a slow outer optimizer (DiLoCo) on a toy sequence task."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

INNER_STEPS, ROUNDS, BATCH = 8, 10, 32
VOCAB, LENGTH = 12, 10


def batch(g):
    """Predict the running sum modulo VOCAB."""
    x = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g)
    return x, x.cumsum(1) % VOCAB


class Counter(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)

    worker = Counter()
    anchor = [nn.Parameter(p.detach().clone()) for p in worker.parameters()]
    for a in anchor:
        dist.broadcast(a.data, src=0)
    inner = torch.optim.AdamW(worker.parameters(), lr=4e-3)
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    stream = torch.Generator().manual_seed(1000 + rank)

    for rnd in range(ROUNDS):
        with torch.no_grad():
            for p, a in zip(worker.parameters(), anchor):
                p.copy_(a)
        loss_sum = torch.zeros(1)
        for _ in range(INNER_STEPS):
            x, y = batch(stream)
            loss = F.cross_entropy(worker(x).flatten(0, 1), y.flatten())
            inner.zero_grad()
            loss.backward()
            inner.step()
            loss_sum += loss.item()

        # the outer gradient is the mean way that the workers went from the anchor
        for p, a in zip(worker.parameters(), anchor):
            delta = a.data - p.data
            dist.all_reduce(delta)
            a.grad = delta / world
        outer.step()
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"round {rnd}: mean inner loss {loss_sum.item() / (world * INNER_STEPS):.4f}")

    with torch.no_grad():
        for p, a in zip(worker.parameters(), anchor):
            p.copy_(a)
    if rank == 0:
        torch.save(worker.state_dict(), "diloco.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
