import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Curriculum:
    def __init__(self, dataset, difficulty, stages):
        self.dataset = dataset
        self.order = difficulty.argsort(stable=True)
        self.stages = stages

    def loader(self, epoch, batch_size):
        share = self.stages[min(epoch, len(self.stages) - 1)]
        subset = Subset(self.dataset, self.order[: int(len(self.order) * share)].tolist())
        sampler = DistributedSampler(subset, shuffle=True, seed=17)
        sampler.set_epoch(epoch)
        return DataLoader(subset, batch_size=batch_size, sampler=sampler)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(9)
    x = torch.randn(128, 6, generator=g)
    margin = x[:, 0] + x[:, 1]
    curriculum = Curriculum(TensorDataset(x, (margin > 0).long()), -margin.abs(), stages=[0.25, 0.5, 1.0])
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        loader = curriculum.loader(epoch, 8)
        total = torch.zeros(())
        for bx, by in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(bx), by)
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"stage {epoch}: {len(loader)} batches, {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
