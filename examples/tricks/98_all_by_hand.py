"""All tricks together, by hand. The number at the end of a line is the file that explains it.

    torchrun --nproc-per-node 2 examples/tricks/98_all_by_hand.py   # --device cuda: on two GPUs, with NCCL

It saves into runs/by_hand.pt. Stop it and start it again: it resumes.
"""

import argparse
import gc
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lockstep_recipes.recipes.digits import Digits

EPOCHS, BATCH, SEED = 6, 64, 0
RATE, REFERENCE, WARM_UP = 0.1, 32, 10  # 07
ACCUMULATE = 2  # 03
SCALE = 2.0**16  # 05
CLIP = 1.0  # 06
SAVE_EVERY, PATH = 50, Path("runs/by_hand.pt")  # 10
PATIENCE = timedelta(minutes=5)  # 12

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
DEVICE = parser.parse_args().device
if DEVICE == "cuda" and not torch.cuda.is_available():
    parser.error("--device cuda: torch sees no GPU here")
if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # 01


def load(training):
    data = Digits(training)
    return (data.images / 255).to(DEVICE), torch.from_numpy(data.labels).to(DEVICE)


def order(count, epoch):
    """The samples of an epoch, the same on all ranks."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED * 1000 + epoch))  # 02


def prepare(image, epoch, number):
    """An image with a little noise."""
    own = torch.Generator().manual_seed((SEED * 1000 + epoch) * 100_000 + number)  # 11
    return image + 0.05 * torch.randn(image.shape, generator=own).to(DEVICE)


def save(step, model, optimizer, scaler):
    """A checkpoint is complete or absent."""
    state = {"step": step, "model": model.module.state_dict()}  # 10
    state |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}  # 10
    if dist.get_rank() == 0:  # 10
        PATH.parent.mkdir(exist_ok=True)  # 10
        staged = PATH.with_suffix(".staged")  # 10
        with open(staged, "wb") as file:  # 10
            torch.save(state, file)  # 10
            file.flush()  # 10
            os.fsync(file.fileno())  # 10
        os.replace(staged, PATH)  # 10
    dist.barrier()  # 10


def resume(model, optimizer, scaler):
    """The step of the newest checkpoint, or 0."""
    if not PATH.exists():  # 10
        return 0  # 10
    state = torch.load(PATH, map_location=DEVICE)  # 10
    model.module.load_state_dict(state["model"])  # 10
    optimizer.load_state_dict(state["optimizer"])  # 10
    scaler.load_state_dict(state["scaler"])  # 10
    return state["step"]  # 10


def compare_steps(step):
    """End the training if the ranks are at different steps."""
    steps = [torch.zeros((), dtype=torch.long, device=DEVICE) for _ in range(dist.get_world_size())]  # 12
    dist.all_gather(steps, torch.tensor(step, device=DEVICE))  # 12
    if len(set(map(int, steps))) > 1:  # 12
        raise RuntimeError(f"the ranks are at different steps: {[int(other) for other in steps]}")  # 12


def evaluate(model, rank, world):
    """The fraction of the held-back digits that the model recognises."""
    images, labels = load(training=False)
    counts = torch.zeros(2, device=DEVICE)  # 08
    with torch.no_grad():
        for batch in torch.arange(rank, len(labels), world).split(32):  # 09
            correct = model.module(images[batch]).argmax(dim=1) == labels[batch]  # 09
            counts += torch.tensor([correct.sum(), len(batch)], device=DEVICE)  # 09
    dist.all_reduce(counts)  # 08
    return (counts[0] / counts[1]).item()  # 08


def main():
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()  # 01
    images, labels = load(training=True)
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(DEVICE)
    model = DistributedDataParallel(model)  # 01
    peak = RATE * BATCH / REFERENCE  # 07
    optimizer = torch.optim.SGD(model.parameters(), lr=peak)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=SCALE)  # 05
    per_epoch = -(-len(labels) // BATCH)  # 10
    for step in range(resume(model, optimizer, scaler), EPOCHS * per_epoch):  # 10
        compare_steps(step)  # 12
        epoch, place = divmod(step, per_epoch)  # 10
        batch = order(len(labels), epoch)[place * BATCH : (place + 1) * BATCH]  # 02
        mine = batch[rank::world]  # 02
        for group in optimizer.param_groups:  # 07
            group["lr"] = peak * min(1.0, (step + 1) / WARM_UP)  # 07
        optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)  # 08
        parts = mine.tensor_split(ACCUMULATE)  # 03
        for number, part in enumerate(parts):  # 03
            inputs = torch.stack([prepare(images[sample], epoch, int(sample)) for sample in part])
            last = number == len(parts) - 1  # 03
            with nullcontext() if last else model.no_sync():  # 03
                with torch.autocast(DEVICE, torch.float16):  # 04
                    output = model(inputs)
                loss = cross_entropy(output.float(), labels[part], reduction="sum") / len(batch)  # 03
                scaler.scale(loss * world).backward()  # 05
            total += loss.detach()  # 08
        scaler.unscale_(optimizer)  # 05
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # 06
        scaler.step(optimizer)  # 05
        scaler.update()  # 05
        dist.all_reduce(total)  # 08
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == EPOCHS * per_epoch:  # 10
            save(step + 1, model, optimizer, scaler)  # 10
        if place == per_epoch - 1:
            accuracy = evaluate(model, rank, world)
            if rank == 0:  # 01
                print(f"epoch {epoch + 1}: loss of the last step {total:.4f}, accuracy {accuracy:.4f}")


dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", timeout=PATIENCE)  # 01
main()
# DDP's model holds the group in a cycle. So it is collected before the group is destroyed.
gc.collect()  # 01
dist.destroy_process_group()  # 01
