import torch
import torch.distributed as dist
from torch import nn


def batches(epoch, size=16):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 8, generator=g)
    y = x[:, :3].argmax(1)
    for idx in torch.randperm(96, generator=torch.Generator().manual_seed(epoch + 1)).split(size):
        yield x[idx], y[idx]


class FirstStage:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, x, y):
        h = self.net(x)
        dist.send(h.detach(), dst=1)
        grad = torch.empty_like(h)
        dist.recv(grad, src=1)
        self.opt.zero_grad()
        h.backward(grad)
        self.opt.step()


class SecondStage:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, x, y):
        h = torch.empty(len(x), 32)
        dist.recv(h, src=0)
        h.requires_grad_()
        loss = nn.functional.cross_entropy(self.net(h), y)
        self.opt.zero_grad()
        loss.backward()
        dist.send(h.grad, dst=0)
        self.opt.step()
        return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = FirstStage() if rank == 0 else SecondStage()
    for epoch in range(2):
        losses = [stage.step(x, y) for x, y in batches(epoch)]
        if rank == 1:
            print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")
    torch.save(stage.net.state_dict(), f"stage-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
