"""Fine-tune a small audio backbone: first only the classifier, then everything with a lower rate."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AudioNet(nn.Module):
    def __init__(self, n_classes=5):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=4), nn.ReLU(),
            nn.Conv1d(16, 32, 9, stride=4), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        )
        self.head = nn.Linear(128, n_classes)

    def forward(self, wav):
        return self.head(self.backbone(wav))


def tones(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 5, (n,), generator=g)
    t = torch.linspace(0, 1, 400)
    freq = 8.0 + 6.0 * label[:, None] + torch.rand(n, 1, generator=g)
    wav = torch.sin(2 * torch.pi * freq * t) + 0.5 * torch.randn(n, 400, generator=g)
    return TensorDataset(wav.unsqueeze(1), label)


def load_pretrained(net):
    # stand-in for the downloaded checkpoint
    g = torch.Generator().manual_seed(77)
    with torch.no_grad():
        for p in net.backbone.parameters():
            p.copy_(0.15 * torch.randn(p.shape, generator=g))


def accuracy(net, data, rank, world):
    wav, label = (t[rank::world] for t in data.tensors)
    net.eval()
    with torch.no_grad():
        n_right = (net(wav).argmax(1) == label).sum()
    net.train()
    stat = torch.tensor([float(n_right), float(len(label))])
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--unfreeze-epoch", type=int, default=1)
    parser.add_argument("--head-lr", type=float, default=1e-2)
    parser.add_argument("--backbone-lr", type=float, default=2e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    train, test = tones(960, seed=10), tones(201, seed=11)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=24, sampler=sampler)

    net = AudioNet()
    load_pretrained(net)
    for p in net.backbone.parameters():
        p.requires_grad_(False)

    model = DDP(net)
    optimizer = torch.optim.Adam(net.head.parameters(), lr=args.head_lr)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        if epoch == args.unfreeze_epoch:
            for p in net.backbone.parameters():
                p.requires_grad_(True)
            optimizer.add_param_group({"params": net.backbone.parameters(), "lr": args.backbone_lr})
            model = DDP(net)
        sampler.set_epoch(epoch)
        for wav, label in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(wav), label)
            loss.backward()
            optimizer.step()
        acc = accuracy(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}  accuracy {acc:.3f}")

    if rank == 0:
        torch.save(net.state_dict(), "audionet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
