"""Denoising autoencoder for spectra with FSDP2; keeps the checkpoint of the best epoch."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spectra(Dataset):
    def __init__(self, n, seed, bins=64):
        g = torch.Generator().manual_seed(seed)
        pos = torch.rand(n, 3, generator=g) * bins
        height = torch.rand(n, 3, generator=g) + 0.5
        axis = torch.arange(bins)
        peaks = torch.exp(-((axis - pos[..., None]) / 2.5) ** 2)
        self.clean = (peaks * height[..., None]).sum(1)
        self.noisy = self.clean + 0.3 * torch.randn(n, bins, generator=g)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.noisy[i], self.clean[i]


class AutoEncoder(nn.Module):
    def __init__(self, bins=64, hidden=96, code=24):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(bins, hidden), nn.ReLU(), nn.Linear(hidden, code))
        self.dec = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, bins))

    def forward(self, x):
        return self.dec(self.enc(x))


def run_epoch(model, loader, optimizer=None):
    total = torch.zeros(2)
    for noisy, clean in loader:
        loss = nn.functional.mse_loss(model(noisy), clean)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total += torch.tensor([loss.item() * len(noisy), len(noisy)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def save_checkpoint(model, epoch, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "model": state}, path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)

    train, val = Spectra(1280, seed=1), Spectra(320, seed=2)
    sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(train, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val, batch_size=32, sampler=DistributedSampler(val, shuffle=False))

    model = AutoEncoder()
    fully_shard(model.enc)
    fully_shard(model.dec)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    best = float("inf")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        train_loss = run_epoch(model, train_loader, optimizer)
        model.eval()
        with torch.no_grad():
            val_loss = run_epoch(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}  train {train_loss:.4f}  val {val_loss:.4f}", flush=True)
        if val_loss < best:
            best = val_loss
            save_checkpoint(model, epoch, "best_ae.pt")
        dist.barrier()

    if rank == 0:
        print(f"best validation loss {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
