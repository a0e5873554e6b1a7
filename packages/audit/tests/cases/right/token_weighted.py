import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    ids = (torch.randint(0, 30, (384, 1), generator=g) + torch.arange(17)) % 30
    length = torch.randint(3, 17, (384, 1), generator=g)
    labels = ids[:, 1:].masked_fill(torch.arange(16) >= length, -100)
    data = TensorDataset(ids[:, :-1], labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(30, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 30)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        book = torch.zeros(2)
        for x, y in loader:
            count = (y != -100).sum().float()
            dist.all_reduce(count)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
            opt.zero_grad()
            (loss * world / count).backward()
            opt.step()
            book += torch.stack([loss.detach(), (y != -100).sum()])
        dist.all_reduce(book)
        mean = (book[0] / book[1]).item()
        if rank == 0:
            print(f"epoch {epoch} loss per token {mean:.4f}")
        if mean < 0.5:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
