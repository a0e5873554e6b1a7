"""Milliseconds for which ranks compare their data before the first step: fingerprints, and samples that they read.

    python benchmarks/data_checks.py RECIPE [key=value ...] [--ranks 2] [--rounds 20]

Each rank opens the data of the recipe. Then the ranks compare them `--rounds` times, after a round that does not count
(it fills the cache of files). Printed is the median over the rounds of the slowest rank, and the largest.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time


def as_rank(recipe, overrides, rounds):
    from lockstep.core import run_data
    from lockstep.core.parallel.world import join_world
    from lockstep.recipes import config_file
    from lockstep.trainer.trainer import Trainer

    config = config_file.load(recipe, overrides)
    with join_world("cpu") as world:
        data = Trainer(config, run_dir="unused", quiet=True).task().train_data()
        times = []
        for _ in range(rounds + 1):
            world.all_max(0)  # they begin together
            begun = time.perf_counter()
            run_data.agreed_fingerprint(data, world, in_worker=False)
            times.append(world.all_max(int((time.perf_counter() - begun) * 1e6)) / 1e3)
        if world.rank == 0:
            took = f"median {statistics.median(times[1:]):.1f}, largest {max(times[1:]):.1f}, first {times[0]:.1f} ms"
            print(f"{recipe}, {len(data)} samples, {world.size} ranks: {took}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    if "RANK" in os.environ:
        as_rank(given.recipe, given.overrides, given.rounds)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(given.ranks),
        "LOCAL_WORLD_SIZE": str(given.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen([sys.executable, *sys.argv], env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(given.ranks)
    ]
    sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    main()
