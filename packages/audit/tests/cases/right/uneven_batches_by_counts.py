import torch
import torch.distributed as dist
from torch import nn


def main(global_batch=18):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(8)
    x = torch.randn(103, 5, generator=g)
    y = x[:, :2].argmax(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for step in order.split(global_batch):
            mine = step.tensor_split(world)[rank]
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum") / len(step)
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            opt.step()
            total += loss.detach() * len(step)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total.item() / len(x):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
