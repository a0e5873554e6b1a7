import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, total, rank, world, seed):
        self.total, self.rank, self.world, self.seed = total, rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        workers, wid = (info.num_workers, info.id) if info else (1, 0)
        part, parts = self.rank * workers + wid, self.world * workers
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        for i in torch.randperm(self.total, generator=g)[part::parts].tolist():
            x = torch.randn(8, generator=torch.Generator().manual_seed(i))
            yield x, (x.prod() > 0).long()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stream = Stream(512, rank, world, seed=9)
    loader = DataLoader(stream, batch_size=16, num_workers=1)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        stream.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss on rank 0: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
