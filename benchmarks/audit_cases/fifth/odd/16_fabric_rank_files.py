"""Denoising autoencoder; shared weights in one checkpoint, the noise generator of every rank in a file of its own."""
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning.fabric import Fabric


def profiles(n=768, seed=1):
    g = torch.Generator().manual_seed(seed)
    basis = torch.randn(4, 24, generator=g)
    return TensorDataset(torch.randn(n, 4, generator=g) @ basis)


def build(fabric):
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6), nn.Linear(6, 24))
    return fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))


def run_epochs(fabric, model, optimizer, data, noise, epochs):
    sampler = DistributedSampler(data, num_replicas=fabric.world_size, rank=fabric.global_rank, shuffle=True, seed=4)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (x,) in loader:
            noisy = x + 0.5 * torch.randn(x.shape, generator=noise)
            loss = nn.functional.mse_loss(model(noisy), x)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        total = fabric.all_reduce(total, reduce_op="sum")
        fabric.print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    data = profiles()
    own_file = f"noise_state_rank{fabric.global_rank}.pt"

    model, optimizer = build(fabric)
    noise = torch.Generator().manual_seed(100 + fabric.global_rank)
    run_epochs(fabric, model, optimizer, data, noise, range(0, 2))
    fabric.save("shared.ckpt", {"model": model, "optimizer": optimizer, "epoch": 2})
    torch.save({"noise": noise.get_state(), "rank": fabric.global_rank}, own_file)
    fabric.barrier()

    model, optimizer = build(fabric)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    fabric.load("shared.ckpt", state)
    own = torch.load(own_file)
    assert own["rank"] == fabric.global_rank
    noise = torch.Generator()
    noise.set_state(own["noise"])
    run_epochs(fabric, model, optimizer, data, noise, range(state["epoch"], state["epoch"] + 2))


if __name__ == "__main__":
    main()
