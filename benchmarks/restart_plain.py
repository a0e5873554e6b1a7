"""For `restart.py`: a hand-written DDP loop that resumes from its `torch.save` checkpoint.

`restart_task.py` uses the model, the data and the marks of this file.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 64  # over all ranks
EVERY = 50  # steps from checkpoint to checkpoint


def mark(name, at=None):
    """Append a line `time cpu-seconds rank pid name` to the file that the environment names."""
    with open(os.environ["MARKS"], "a") as file:
        file.write(
            f"{time.time() if at is None else at:.3f} {time.process_time():.3f} "
            f"{os.environ['RANK']} {os.getpid()} {name}\n"
        )


def started(thread=None):
    """When this process, or one of its threads, was started; the system counts it in hundredths of a second."""
    text = Path(f"/proc/self/task/{thread or os.getpid()}/stat").read_text()
    ticks = int(text.rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def digits():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(1797, 1, 8, 8, generator=generator), torch.randint(10, (1797,), generator=generator)
    )


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10)
    )


def main():
    mark("started", started())
    mark("imported")
    dist.init_process_group("gloo")
    mark("joined")
    rank, world, path = dist.get_rank(), dist.get_world_size(), Path(os.environ["CHECKPOINT"])
    data = digits()
    mark("model")
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    forward = DistributedDataParallel(model)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, BATCH // world, sampler=sampler)
    while True:
        sampler.set_epoch(step // len(loader))
        for images, labels in loader:
            mark("loss")
            loss = nn.functional.cross_entropy(forward(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0 and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
