"""Two-stage fine-tuning of a small conv encoder: head first, then everything."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HEAD_EPOCHS = 1
EPOCHS = 4


def textures(n=1024, size=16, seed=3):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.linspace(0, 6.28, size)
    xx, yy = torch.meshgrid(t, t, indexing="ij")
    waves = torch.stack([torch.sin(2 * xx), torch.sin(2 * yy), torch.sin(2 * (xx + yy)), torch.sin(xx) * torch.sin(yy)])
    x = waves[y] + 0.8 * torch.randn(n, size, size, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


def train_epoch(model, loader, optimizer):
    total = torch.zeros(2)
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(y), float(len(y))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)

    train = textures()
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    net = Classifier()
    for p in net.encoder.parameters():
        p.requires_grad = False
    model = DDP(net)
    optimizer = torch.optim.AdamW(net.head.parameters(), lr=5e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        if epoch == HEAD_EPOCHS:
            for p in net.encoder.parameters():
                p.requires_grad = True
            model = DDP(net)
            optimizer.add_param_group({"params": list(net.encoder.parameters()), "lr": 2e-3})
        loss = train_epoch(model, loader, optimizer)
        if rank == 0:
            stage = "head" if epoch < HEAD_EPOCHS else "full"
            print(f"epoch {epoch} [{stage}] loss {loss:.4f}")

    if rank == 0:
        torch.save(net.state_dict(), "textures.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
