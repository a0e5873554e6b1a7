import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Stopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.state = patience, float("inf"), 0, None

    def update(self, loss, net):
        if loss < self.best:
            self.best, self.bad = loss, 0
            self.state = {k: v.clone() for k, v in net.state_dict().items()}
        else:
            self.bad += 1
        flag = [self.bad >= self.patience]
        dist.broadcast_object_list(flag, src=0)
        return flag[0]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(131, 5, generator=g)
    y = x[:, :1] + 0.5 * torch.randn(131, 1, generator=g)
    train, val = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 16)
    net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), 0.03)
    stopper = Stopper(patience=1)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(bx), by).backward()
            opt.step()
        sums = torch.zeros(2)
        with torch.no_grad():
            for bx, by in val_loader:
                sums += torch.stack([(net(bx) - by).square().sum(), torch.tensor(float(len(bx)))])
        dist.all_reduce(sums)
        loss = (sums[0] / sums[1]).item()
        if rank == 0:
            print(f"epoch {epoch}: {loss:.4f}")
        if stopper.update(loss, net):
            break
    net.load_state_dict(stopper.state)
    if rank == 0:
        torch.save(net.state_dict(), "best.pt")
        print("stopped at", epoch, "best", stopper.best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
