"""The training of `digits_task.py`, written by hand: `torchrun --nproc-per-node 2 examples/plain_ddp.py`.

The letters of docs/tasks.md mark what Lockstep does for you, or does correctly where this script does not.
"""

import gc
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from lockstep_recipes.recipes.digits import Digits

EPOCHS, GLOBAL_BATCH, ACCUMULATE = 5, 32, 2


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train, held_back = Digits(training=True), Digits(training=False)
    sampler = DistributedSampler(train, world, rank, seed=0)  # (a) repeats samples to make the ranks even
    loader = DataLoader(train, GLOBAL_BATCH // world // ACCUMULATE, sampler=sampler)  # (b) a rank count that divides
    writer = SummaryWriter("runs/plain") if rank == 0 else None
    for epoch in range(EPOCHS):  # (c) a crash starts at epoch 0 again
        sampler.set_epoch(epoch)  # (d) without it, every epoch has the same order
        for number, (images, labels) in enumerate(tqdm(loader, disable=rank > 0)):
            images, labels = images.to(device) / 255, labels.to(device)
            # (e) what is left at the epoch's end is dropped, or leaks into the next
            last = (number + 1) % ACCUMULATE == 0
            # (f) without it: k times the traffic
            with nullcontext() if last or world == 1 else model.no_sync():
                # (g) a mean of means: wrong if sizes differ
                loss = cross_entropy(model(images), labels) / ACCUMULATE
                loss.backward()
            if last:
                # (h) before unscaling, under fp16: clips the wrong numbers
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if writer is not None:
                    writer.add_scalar("loss", loss.item() * ACCUMULATE, number)  # (i) rank 0's loss of one micro-batch
        correct = torch.zeros(2, device=device)
        evaluation = DistributedSampler(held_back, world, rank, shuffle=False)  # (j) padded: some samples count twice
        with torch.no_grad():
            for images, labels in DataLoader(held_back, 64, sampler=evaluation):
                matches = model(images.to(device) / 255).argmax(dim=1) == labels.to(device)
                correct += torch.tensor([matches.sum(), len(labels)], device=device)
        if world > 1:
            dist.all_reduce(correct)
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {correct[0] / correct[1]:.4f} on {int(correct[1])} samples")
            torch.save(model.state_dict(), "runs/plain.pt")  # (k) killed here: neither the old file nor the new one


main()
if dist.is_initialized():
    gc.collect()  # DDP's model holds the group in a cycle: if the group is destroyed first, it can hang
    dist.destroy_process_group()
