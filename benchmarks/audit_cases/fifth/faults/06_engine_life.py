"""Remaining-life regression of turbofan engines with a GRU; reports RMSE and the asymmetric score."""
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

N_SENSORS, WINDOW, MAX_LIFE = 5, 24, 125.0


class Engines(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.life = MAX_LIFE * torch.rand(n, generator=g)
        wear = 1 - self.life / MAX_LIFE
        slope = torch.linspace(0.5, 1, WINDOW)
        gain = torch.linspace(-1, 1, N_SENSORS)
        signal = wear[:, None, None] * slope[None, :, None] * gain
        self.x = signal + 0.15 * torch.randn(n, WINDOW, N_SENSORS, generator=g)

    def __len__(self):
        return len(self.life)

    def __getitem__(self, i):
        return self.x[i], self.life[i] / MAX_LIFE


class LifeGRU(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.gru = nn.GRU(N_SENSORS, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.gru(x)
        return self.out(h[:, -1]).squeeze(-1)


def test_report(net, loader):
    """RMSE and the challenge score (late predictions cost more), over all test engines."""
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            d = (net(x) - y).double() * MAX_LIFE
            cost = torch.where(d < 0, torch.exp(-d / 13) - 1, torch.exp(d / 10) - 1)
            sums += torch.stack([(d ** 2).sum(), cost.sum(), torch.tensor(float(len(d)))])
    dist.all_reduce(sums)
    net.train()
    return (sums[0] / sums[2]).sqrt().item(), sums[1].item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)

    train_data, test_data = Engines(640, seed=20), Engines(21, seed=21)
    train_sampler = DistributedSampler(train_data, num_replicas=world, rank=rank, shuffle=True)
    test_sampler = DistributedSampler(test_data, num_replicas=world, rank=rank, shuffle=False)
    train_loader = DataLoader(train_data, batch_size=16, sampler=train_sampler)
    test_loader = DataLoader(test_data, batch_size=16, sampler=test_sampler)

    model = DDP(LifeGRU())
    optimizer = optim.Adam(model.parameters(), lr=4e-3)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        rmse, score = test_report(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: test RMSE {rmse:.2f} cycles, score {score:.1f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "life_gru.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
