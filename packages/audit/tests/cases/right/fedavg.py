import torch
import torch.distributed as dist
from torch import nn


class Client:
    def __init__(self, rank):
        g = torch.Generator().manual_seed(100 + rank)
        n = (40, 72)[rank % 2]
        self.x = torch.randn(n, 6, generator=g) + 0.5 * rank
        self.y = (self.x.sum(1) > 0).float()
        self.shuffle = torch.Generator().manual_seed(rank)

    def fit(self, model, epochs=2, lr=0.1):
        opt = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(epochs):
            for idx in torch.randperm(len(self.x), generator=self.shuffle).split(8):
                opt.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(model(self.x[idx]).squeeze(1), self.y[idx]).backward()
                opt.step()
        return len(self.x)


@torch.no_grad()
def aggregate(model, samples):
    total = torch.tensor(float(samples))
    dist.all_reduce(total)
    for t in model.state_dict().values():
        t.mul_(samples / total)
        dist.all_reduce(t)


def main(rounds=3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    client = Client(rank)
    for r in range(rounds):
        aggregate(model, client.fit(model))
        with torch.no_grad():
            hits = torch.tensor([float(((model(client.x).squeeze(1) > 0) == (client.y > 0.5)).sum()), len(client.x)])
        dist.all_reduce(hits)
        if rank == 0:
            print(f"round {r}: accuracy {hits[0] / hits[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
