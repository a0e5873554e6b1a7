import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ShardedStream(IterableDataset):
    """Reads 'files' of 16 samples; the order of the files changes with the epoch."""

    def __init__(self, files=8):
        self.files = list(range(files))
        self.epoch = 0

    def read(self, number):
        g = torch.Generator().manual_seed(number)
        for _ in range(16):
            x = torch.randn(5, generator=g)
            yield x, x.sum().sign().clamp(min=0)

    def __iter__(self):
        g = torch.Generator().manual_seed(900 + self.epoch)
        order = [self.files[i] for i in torch.randperm(len(self.files), generator=g)]
        info = get_worker_info()
        if info is not None:
            order = order[info.id :: info.num_workers]
        for number in order:
            yield from self.read(number)


def train(model, loader, optimizer):
    loss_sum, n = torch.zeros(()), 0
    for x, y in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
        n += 1
    dist.all_reduce(loss_sum)
    return loss_sum.item() / n / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(31)
    stream = ShardedStream()
    loader = DataLoader(stream, batch_size=8, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        stream.epoch = epoch
        loss = train(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
