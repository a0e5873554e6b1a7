"""Two-stage pipeline by hand: rank 0 has the first half of the network, rank 1 the second, four micro-batches."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
MICRO, BATCH, WIDTH = 4, 64, 32


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return x, (x[:, 0] * x[:, 1] - x[:, 2] > 0).long()


class Stage0:
    def __init__(self):
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def train_batch(self, x, y):
        acts = []
        for part in x.chunk(MICRO):
            h = self.net(part)
            dist.send(h.detach(), dst=1)
            acts.append(h)
        for h in acts:
            grad = torch.empty_like(h)
            dist.recv(grad, src=1)
            h.backward(grad)

    @torch.no_grad()
    def evaluate(self, x, y):
        dist.send(self.net(x), dst=1)


class Stage1:
    def __init__(self):
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

    def train_batch(self, x, y):
        grads, self.loss = [], 0.0
        for target in y.chunk(MICRO):
            h = torch.empty(len(target), WIDTH)
            dist.recv(h, src=0)
            h.requires_grad_(True)
            loss = F.cross_entropy(self.net(h), target) / MICRO
            loss.backward()
            self.loss += loss.item()
            grads.append(h.grad)
        for g in grads:
            dist.send(g, dst=0)

    @torch.no_grad()
    def evaluate(self, x, y):
        h = torch.empty(len(y), WIDTH)
        dist.recv(h, src=0)
        print(f"loss {self.loss:.4f} accuracy {(self.net(h).argmax(1) == y).float().mean().item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = Stage0() if rank == 0 else Stage1()
    opt = torch.optim.Adam(stage.net.parameters(), lr=3e-3)
    x, y = data(1280, 1)
    vx, vy = data(300, 2)
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for idx in order.split(BATCH):
            opt.zero_grad()
            stage.train_batch(x[idx], y[idx])
            opt.step()
        stage.evaluate(vx, vy)
    torch.save(stage.net.state_dict(), f"stage{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
