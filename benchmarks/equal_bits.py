"""One digest for every number of ranks: recipes with virtual ranks, on real data.

    python benchmarks/equal_bits.py [DATA] [--recipes NAME ...] [--ranks 1 2 3 4] [--killed 4 3 2] [--virtual-ranks 4]
        [--strategy fsdp]

DATA is a folder with the data sets of `DATA.md`. Each recipe trains on every number of ranks. Then it trains on the
numbers of `--killed`, one after the other: SIGKILL ends each start but the last while it saves a checkpoint. The digest
covers all files of the last checkpoint except `manifest.json` (weights, optimizer, averages, buffers), and
`metrics.jsonl` without times: losses, norms of gradients, metrics and results of evaluations. Entries cover 3 steps,
and checkpoints come every 2. The exit code is 1 if two digests differ.

With `--strategy fsdp`, each recipe also trains with DDP on two ranks. Each rank then writes its own rows, so the
digest covers the tensors of the last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import header, row
from same_results import CLOCKED

COMMON = ("device=cpu", "log.every_steps=3", "log.pictures=0", "log.writers=[json_lines]")
COMMON += ("checkpoint.every_steps=2", "checkpoint.keep_last=1", "train.eval_every_steps=4", "data.drop_last=true")
RECIPES = {
    "digits": ("train.steps=12",),
    "docstrings": ("train.steps=8", "data.eval_limit=100"),
    "image_folder": ("data.train={data}/classification/bccd_cells", "train.steps=8", "batch.global=16"),
    "segmentation": ("data.train={data}/segmentation/nuclei", "train.steps=6", "batch.global=8"),
    "detection": ("data.train={data}/detection/bccd", "train.steps=6", "batch.global=8"),
    "ct_small": ("data.train={data}/ct/sts/labels.csv", "train.steps=6", "batch.global=8"),
    "lm": ("data.train={data}/lm/shakespeare", "train.steps=6", "batch.global=8"),
}


def command(recipe: str, keys: tuple[str, ...], ranks: int, run: Path) -> list[str]:
    """The command that trains a recipe."""
    arguments = ["train", recipe, *keys, *COMMON, "--nproc", str(ranks), "--max-restarts", "0", "--run-dir", str(run)]
    return [sys.executable, "-m", "lockstep", *arguments]


def train(recipe: str, keys: tuple[str, ...], ranks: int, run: Path, killed_at: int | None = None) -> None:
    """Train, or until rank 0 is killed while it saves a step."""
    environment = dict(os.environ)
    if killed_at is not None:
        environment["LOCKSTEP_FAIL_AT"] = f"0:{killed_at}:in-share:kill"
    done = subprocess.run(command(recipe, keys, ranks, run), capture_output=True, text=True, env=environment)
    if (done.returncode == 0) != (killed_at is None):
        raise SystemExit(f"{recipe} on {ranks} ranks ended with {done.returncode}:\n{done.stderr[-3000:]}")


def files_of(checkpoint: Path) -> Iterator[bytes]:
    """All files of a checkpoint but its manifest."""
    for path in sorted(checkpoint.iterdir()):
        if path.name != "manifest.json":
            yield path.name.encode() + path.read_bytes()


def tensors_of(checkpoint: Path) -> Iterator[bytes]:
    """All tensors of a checkpoint, with their names."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def of(name: str, value: Any) -> Iterator[bytes]:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                yield from of(f"{name}.{key}", value[key])
        elif isinstance(value, torch.Tensor):
            yield name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, f"{folder}/all.pt")
        yield from of("", torch.load(f"{folder}/all.pt", weights_only=False))


def digest(run: Path, contents_of: Callable[[Path], Iterator[bytes]]) -> str:
    """SHA-256 of the last checkpoint and of the log without times."""
    found = hashlib.sha256()
    for content in contents_of(max((run / "checkpoints").glob("step-*"))):
        found.update(content)
    entries: dict[str, str] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = {key: value for key, value in json.loads(line).items() if not CLOCKED.search(key)}
        entry = {
            key: value for key, value in entry.items() if not key.startswith(("memory/", "train/tflops", "train/mfu"))
        }
        entries[json.dumps(sorted(entry.items()))] = ""  # a killed run logs the steps after its last checkpoint again
    found.update("\n".join(entries).encode())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="../shared/data", help="folder with the data sets")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--killed", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--virtual-ranks", type=int, default=4)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    arguments = parser.parse_args()
    names = [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in arguments.ranks]
    is_sharded = arguments.strategy == "fsdp"
    names += ["DDP on 2 ranks"] * is_sharded
    contents_of = tensors_of if is_sharded else files_of
    header("recipe", *names, f"killed, on {', '.join(map(str, arguments.killed))} ranks", "the same")
    differs = False
    for recipe in arguments.recipes:
        keys = tuple(key.format(data=Path(arguments.data).resolve()) for key in RECIPES[recipe])
        keys += (f"parallel.virtual_ranks={arguments.virtual_ranks}",)
        keys += ("compute.channels_last=false",) * is_sharded
        ways = [(ranks, arguments.strategy) for ranks in arguments.ranks] + [(2, "ddp")] * is_sharded
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for ranks, strategy in ways:
                run = Path(folder, f"{strategy}-{ranks}")
                train(recipe, (*keys, f"parallel.strategy={strategy}"), ranks, run)
                found.append(digest(run, contents_of))
            killed = Path(folder, "killed")
            for number, ranks in enumerate(arguments.killed):
                is_last = number == len(arguments.killed) - 1
                at = None if is_last else 4 + 2 * number
                train(recipe, (*keys, f"parallel.strategy={arguments.strategy}"), ranks, killed, at)
            found.append(digest(killed, contents_of))
        is_same = len(set(found)) == 1
        differs = differs or not is_same
        row(recipe, *found, "yes" if is_same else "NO")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
