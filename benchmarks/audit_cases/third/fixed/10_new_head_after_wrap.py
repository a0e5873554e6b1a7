"""Fine-tune a backbone on a new label set."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Backbone(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.num_features = width
        self.fc = nn.Identity()

    def forward(self, x):
        return self.fc(self.body(x))

    def reset_classifier(self, num_classes):
        self.fc = nn.Linear(self.num_features, num_classes)


def setup_model(args):
    model = Backbone()
    if args.num_classes:
        model.reset_classifier(args.num_classes)
    model = DDP(model)
    return model


def get_data(num_classes):
    g = torch.Generator().manual_seed(17)
    x = torch.randn(96, 12, generator=g)
    return TensorDataset(x, x[:, :num_classes].argmax(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--num-classes", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234 + rank)
    model = setup_model(args)
    ds = get_data(args.num_classes)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    opt = torch.optim.AdamW([
        {"params": model.module.body.parameters(), "lr": 1e-3},
        {"params": model.module.fc.parameters(), "lr": 1e-2},
    ])
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "finetuned.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
