import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MAX_NORM = 1.0


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )
        self.fc = nn.Linear(64, 4)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def blobs(n=384):
    y = torch.arange(n) % 4
    x = 0.5 * torch.randn(n, 1, 8, 8)
    for i, c in enumerate(y.tolist()):
        r, k = divmod(c, 2)
        x[i, 0, 4 * r : 4 * r + 4, 4 * k : 4 * k + 4] += 1
    return TensorDataset(x, y)


def train_one_epoch(model, loader, optimizer, scaler, loss_fn):
    total = torch.zeros(1)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = blobs()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, scaler, nn.CrossEntropyLoss())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
