import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 2)])
        self.trainable_from = 2

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i < self.trainable_from:
                with torch.no_grad():
                    x = layer(x).relu()
            else:
                x = layer(x)
                if i < len(self.layers) - 1:
                    x = x.relu()
        return x


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(384, 8, generator=g)
    data = TensorDataset(x, (x[:, :2].sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    net = Staged()
    model = DDP(net, find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        net.trainable_from = 2 - epoch
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: layers from {net.trainable_from} trained, loss(rank 0) {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
