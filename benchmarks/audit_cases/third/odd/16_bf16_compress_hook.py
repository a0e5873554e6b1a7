import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def half_precision_mean(group, bucket):
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size(group))
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()

    def restore(fut):
        out = bucket.buffer()
        out.copy_(fut.value()[0])
        return out

    return future.then(restore)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 5)))
    model.register_comm_hook(dist.group.WORLD, half_precision_mean)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(128, 10, generator=g)
    ds = TensorDataset(x, x[:, :5].argmin(1))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for bx, by in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(bx), by)
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
