"""Denoising autoencoder for single-lead ECG windows."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WINDOW = 128


class ECGWindows(Dataset):
    """Synthetic beats; like in the clinic, now and then an electrode was off."""

    def __init__(self, n=640):
        g = torch.Generator().manual_seed(9)
        t = torch.linspace(0, 1, WINDOW)
        rate = 2 + 2 * torch.rand(n, 1, generator=g)
        phase = torch.rand(n, 1, generator=g)
        beat = (rate * t + phase) % 1.0
        self.signal = torch.exp(-((beat - 0.5) / 0.03) ** 2) + 0.2 * torch.sin(6.28 * beat)
        self.signal[137] = 0.0

    def __len__(self):
        return len(self.signal)

    def __getitem__(self, i):
        x = self.signal[i]
        return (x - x.mean()) / x.std()


class DAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, 16, 7, stride=2, padding=3), nn.ReLU(),
            nn.Conv1d(16, 32, 5, stride=2, padding=2), nn.ReLU())
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(32, 16, 4, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose1d(16, 1, 4, stride=2, padding=1))

    def forward(self, x):
        return self.decoder(self.encoder(x.unsqueeze(1))).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)

    data = ECGWindows()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(DAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()

    for epoch in range(3):
        sampler.set_epoch(epoch)
        running, steps = 0.0, 0
        for clean in loader:
            noisy = clean + 0.3 * torch.randn_like(clean)
            loss = criterion(model(noisy), clean)
            if not torch.isfinite(loss):
                print(f"[rank {rank}] bad loss in epoch {epoch}, skipping batch", flush=True)
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
            steps += 1
        if rank == 0:
            print(f"epoch {epoch} mse {running / steps:.4f} ({steps} steps)", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "dae.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
