"""Fine-tune a convolutional backbone for leaf disease photos.

Stage 1 trains the classification head on frozen features, stage 2 trains everything.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Leaves(Dataset):
    def __init__(self, n=384, classes=5):
        g = torch.Generator().manual_seed(3)
        self.labels = torch.randint(0, classes, (n,), generator=g)
        prototypes = torch.randn(classes, 3, 16, 16, generator=g)
        self.images = prototypes[self.labels] + 1.5 * torch.randn(n, 3, 16, 16, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class LeafNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.GroupNorm(3, 24), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.head = nn.Linear(96, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


def train_one_epoch(model, loader, optimizer):
    criterion = nn.CrossEntropyLoss()
    running = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        running += loss.item()
    return running / len(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--freeze-epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    data = Leaves()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    net = LeafNet()
    set_trainable(net.backbone, False)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        if epoch == args.freeze_epochs:
            set_trainable(model.module.backbone, True)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * 0.2
            if rank == 0:
                print("backbone is now trainable", flush=True)
        mean = torch.tensor(train_one_epoch(model, loader, optimizer))
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "leafnet.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
