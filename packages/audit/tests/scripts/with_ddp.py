"""Plain DDP: accumulation, gradient scaling, clipping, evaluation, a checkpoint; then steps with known faults."""

import hashlib
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split


def train(folder):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    train_part, val = random_split(data, [48, 16], generator=torch.Generator().manual_seed(1))
    val = Subset(val, range(16))
    sampler = DistributedSampler(train_part)
    loader = DataLoader(train_part, batch_size=4, sampler=sampler, num_workers=2)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    net[0].bias.requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for number, (x, y) in enumerate(loader):
            with model.no_sync() if number % 2 == 0 else nullcontext():
                loss = nn.functional.cross_entropy(model(x), y) / 2
                scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            hits = sum((model.module(x).argmax(1) == y).sum() for x, y in DataLoader(val, batch_size=4))
        dist.all_reduce(hits)
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": 6}, folder + "/model.pt")
        with open(folder + "/note.txt", "w") as file:
            file.write("done")
    dist.barrier()
    model.module.load_state_dict(torch.load(folder + "/model.pt")["model"])
    with torch.no_grad():
        model.module(data.tensors[0][:4])
    return model, optimizer


def faults(model, optimizer):
    x, y = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    model.train()
    for _ in range(2):
        nn.functional.cross_entropy(model.module(x), y).backward()  # line of the bypass
        optimizer.step()
    model.module[0].bias.requires_grad_(True)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    other = nn.Linear(8, 3)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    for divides in (False, True):
        sgd.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        for parameter in other.parameters():
            if divides:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            else:
                dist.all_reduce(parameter.grad)
        sgd.step()
    for parameter in other.parameters():
        dist.all_reduce(parameter.data)
    return other


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, optimizer = train(sys.argv[1])
    trained = digest(model.state_dict().values())
    other = faults(model, optimizer)
    print("HASH", trained, digest([*model.state_dict().values(), *other.parameters(), torch.get_rng_state()]))
    dist.destroy_process_group()
    sys.exit(7)
