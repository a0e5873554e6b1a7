import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    parser = argparse.ArgumentParser("amp training")
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--clip", default=1.0, type=float)
    return parser.parse_args()


def build_model():
    return nn.Sequential(
        nn.Linear(24, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 6),
    )


def train_one_epoch(model, loader, optimizer, scaler, criterion, clip):
    model.train()
    running = 0.0
    for images, target in loader:
        optimizer.zero_grad(set_to_none=True)
        with autocast("cpu", dtype=torch.bfloat16):
            output = model(images)
            loss = criterion(output.float(), target)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        running += loss.item()
    return running / len(loader)


def main(args):
    dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)

    g = torch.Generator().manual_seed(77)
    x = torch.randn(576, 24, generator=g)
    y = (x @ torch.randn(24, 6, generator=g)).argmax(1)
    train_set = TensorDataset(x, y)
    sampler = DistributedSampler(train_set, seed=5)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = DDP(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scaler = GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, scaler, criterion, args.clip)
        if rank == 0:
            print(f"epoch {epoch:02d} loss on rank 0 {loss:.4f} scale {scaler.get_scale():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(get_args())
