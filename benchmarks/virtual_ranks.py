"""What the same bits on any number of ranks cost: steps with virtual ranks against DDP, FSDP and accumulation.

    python benchmarks/virtual_ranks.py [--rounds 7] [--steps 12] [--width 1024]

Each round makes some steps of every variant, in alternating order, on the same ranks: gloo on one machine, one thread
for each rank. The micro-batches of the compared variants are the same. The network has 6 layers of `--width`: 6.3
million weights by default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import free_port, header, row, spread
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

VARIANTS = {  # by name: ranks, virtual ranks, micro-batches of a rank, strategy
    "2 ranks, 2 virtual ranks": (2, 2, 1, "ddp"),
    "4 ranks, 4 virtual ranks": (4, 4, 1, "ddp"),
    "2 ranks, 4 virtual ranks": (2, 4, 2, "ddp"),
    "1 rank, 4 virtual ranks": (1, 4, 4, "ddp"),
    "2 ranks, 2 virtual ranks, FSDP": (2, 2, 1, "fsdp"),
    "4 ranks, 4 virtual ranks, FSDP": (4, 4, 1, "fsdp"),
    "2 ranks, 4 virtual ranks, FSDP": (2, 4, 2, "fsdp"),
}


def task_of(width: int) -> Any:
    """A classifier of random vectors."""
    import lockstep

    class Wide(lockstep.Task):
        def model(self) -> nn.Module:
            layers = [part for _ in range(5) for part in (nn.Linear(width, width), nn.ReLU())]
            return nn.Sequential(*layers, nn.Linear(width, 1000))

        def train_data(self) -> TensorDataset:
            return TensorDataset(torch.randn(4096, width), torch.randint(1000, (4096,)))

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return Wide()


def of_rank(rank: int, ranks: int, port: int, arguments: argparse.Namespace, name: str, found: Any) -> None:
    """Measure a variant and what it is compared with, on one of its ranks."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    from lockstep.configs import config_file
    from lockstep.core.parallel.world import join_world
    from lockstep.mesh.layout import laid_out
    from lockstep.trainer import assemble

    _, virtual_ranks, micro_batches, strategy = VARIANTS[name]
    size = arguments.micro
    common = {
        "batch": {"global": size * ranks * micro_batches, "micro": size},
        "device": "cpu",
        "log": {"every_steps": 1000},
    }
    common |= {"train": {"steps": 100_000}, "optim": {"name": "SGD", "lr": 0.01}}
    shards: dict[str, Any] = {"strategy": strategy} | ({"shard_modules": ["*"]} if strategy == "fsdp" else {})
    with join_world("cpu", 600) as world:
        steps = {}
        for way, keys in {"virtual": {"virtual_ranks": virtual_ranks}, "usual": {}}.items():
            config = config_file.parse(common | {"parallel": keys | shards}, needs_task=False)
            training = assemble.in_memory(config, task_of(arguments.width), laid_out(world, config))
            steps[way] = (training.run, iter(training.run.batches))
        times: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(arguments.rounds + 1):
            for way in reversed(steps) if number % 2 else steps:
                run, batches = steps[way]
                taken = []
                for _ in range(arguments.steps):
                    micro = next(batches)
                    if world.size > 1:
                        dist.barrier()
                    begun = time.perf_counter()
                    run.update(run.state, micro, size * ranks * micro_batches)
                    taken.append(time.perf_counter() - begun)
                if number:
                    times[way].append(statistics.median(taken))
        if rank == 0:
            found.put(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=64, help="samples of a micro-batch")
    arguments = parser.parse_args()
    header("variant", "virtual ranks, ms", "without, ms", "ratio")
    for name, (ranks, *_) in VARIANTS.items():
        found = mp.get_context("spawn").SimpleQueue()
        mp.spawn(of_rank, (ranks, free_port(), arguments, name, found), nprocs=ranks)
        times = found.get()
        ratios = [one / other for one, other in zip(times["virtual"], times["usual"], strict=True)]
        shown = [f"{1e3 * statistics.median(times[way]):.1f}" for way in ("virtual", "usual")]
        row(name, *shown, spread(ratios))


if __name__ == "__main__":
    main()
