"""Two stage fine-tuning of a small CNN: first the head, then the whole network."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

HEAD_EPOCHS = 1
EPOCHS = 3


def shapes(n, seed):
    """Bars, crosses, squares and noise on a 16x16 canvas."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=g)
    images = 0.4 * torch.randn(n, 1, 16, 16, generator=g)
    for i, lab in enumerate(labels.tolist()):
        r, c = torch.randint(3, 11, (2,), generator=g).tolist()
        if lab == 0:
            images[i, 0, r, 2:14] += 2
        elif lab == 1:
            images[i, 0, r, c - 3:c + 4] += 2
            images[i, 0, r - 3:r + 4, c] += 2
        elif lab == 2:
            images[i, 0, r - 2:r + 3, c - 2:c + 3] += 1.5
    return TensorDataset(images, labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = nn.Linear(512, 4)

    def forward(self, x):
        return self.head(self.backbone(x))

    def set_backbone_trainable(self, flag):
        for p in self.backbone.parameters():
            p.requires_grad = flag


def evaluate(model, loader):
    model.eval()
    hits = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            hits += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    train, test = shapes(800, 1), shapes(200, 2)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    test_loader = DataLoader(test, batch_size=50, sampler=DistributedSampler(test, shuffle=False))

    net = Net()
    net.set_backbone_trainable(False)
    model = DDP(net)
    optimizer = torch.optim.SGD([
        {"params": net.head.parameters(), "lr": 0.05},
        {"params": net.backbone.parameters(), "lr": 0.02},
    ], momentum=0.9)

    for epoch in range(EPOCHS):
        if epoch == HEAD_EPOCHS:
            net.set_backbone_trainable(True)
            if rank == 0:
                print("stage 2: training all layers")
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {acc:.3f}", flush=True)

    if rank == 0:
        torch.save(net.state_dict(), "shapes.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
