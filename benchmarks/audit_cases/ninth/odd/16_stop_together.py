"""River level regression with early stopping that all ranks decide together, and the best weights restored."""
import copy

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PATIENCE = 3


def make_river(n, seed):
    g = torch.Generator().manual_seed(seed)
    rain = torch.rand(n, 14, generator=g)
    decay = torch.exp(-torch.arange(14) / 4.0)
    level = (rain * decay).sum(1, keepdim=True) ** 1.5 / 5
    return rain, level + 0.2 * torch.randn(n, 1, generator=g)


class River(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(14, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, rain):
        return self.net(rain)


@torch.no_grad()
def validate(model, rain, level, rank, world):
    """Sum of squares and number of rows over all ranks (167 rows on the first, 166 on the second)."""
    model.eval()
    own_rain, own_level = rain[rank::world], level[rank::world]
    stats = torch.stack([(model(own_rain) - own_level).pow(2).sum(), torch.tensor(float(len(own_level)))])
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(2)

    model = River()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    model, optimizer = fabric.setup(model, optimizer)
    train = DataLoader(TensorDataset(*make_river(512, 0)), batch_size=16, shuffle=True, drop_last=True)
    train = fabric.setup_dataloaders(train)
    rain_val, level_val = make_river(333, 1)

    best, best_epoch, best_weights = float("inf"), -1, None
    for epoch in range(40):
        for rain, level in train:
            loss = (model(rain) - level).pow(2).mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        mse = validate(model, rain_val, level_val, fabric.global_rank, fabric.world_size)
        if mse < best:
            # every rank keeps its own copy: the weights are the same on all of them
            best, best_epoch = mse, epoch
            best_weights = copy.deepcopy(model.state_dict())
        # the first rank's word counts, so that no rank leaves the loop alone
        stop = fabric.broadcast(epoch - best_epoch >= PATIENCE, src=0)
        if stop:
            fabric.print(f"no better for {PATIENCE} epochs, stopped after epoch {epoch}")
            break

    model.load_state_dict(best_weights)
    again = validate(model, rain_val, level_val, fabric.global_rank, fabric.world_size)
    fabric.print(f"best epoch {best_epoch}  val mse {best:.4f}  after restoring {again:.4f}")
    if fabric.global_rank == 0:
        torch.save(model.state_dict(), "river.pt")
    fabric.barrier()


if __name__ == "__main__":
    main()
