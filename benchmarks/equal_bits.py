"""One digest for every number of ranks: recipes with virtual ranks, on real data.

    python benchmarks/equal_bits.py [DATA] [--recipes NAME ...] [--ranks 1 2 3 4]

DATA is a folder with the data sets of `DATA.md`. Each recipe trains with 4 virtual ranks on every number of ranks; then
it is killed after some seconds on 4 ranks, resumed and killed on 3, and finished on 2. The digest covers all files of
the last checkpoint except `manifest.json` (weights, optimizer, averages, buffers), and `metrics.jsonl` without times:
losses, norms of gradients, metrics and the results of evaluations. The exit code is 1 if two digests differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import header, row
from same_results import CLOCKED

COMMON = ("parallel.virtual_ranks=4", "device=cpu", "log.every_steps=1", "log.pictures=0", "log.writers=[json_lines]")
COMMON += ("checkpoint.every_steps=2", "checkpoint.keep_last=1", "train.eval_every_steps=4", "data.drop_last=true")
RECIPES = {
    "digits": ("train.steps=12",),
    "docstrings": ("train.steps=8", "data.eval_limit=100"),
    "image_folder": ("data.train={data}/classification/bccd_cells", "train.steps=8", "batch.global=16"),
    "segmentation": ("data.train={data}/segmentation/nuclei", "train.steps=6", "batch.global=8"),
    "detection": ("data.train={data}/detection/bccd/train.json", "train.steps=6", "batch.global=8"),
    "ct_small": ("data.train={data}/ct/sts/labels.csv", "train.steps=6", "batch.global=8"),
    "lm": ("data.train={data}/lm/plays", "train.steps=6", "batch.global=8"),
}


def command(recipe: str, keys: tuple[str, ...], ranks: int, run: Path) -> list[str]:
    """The command that trains a recipe."""
    arguments = ["train", recipe, *keys, *COMMON, "--nproc", str(ranks), "--run-dir", str(run)]
    return [sys.executable, "-m", "lockstep", *arguments]


def train(recipe: str, keys: tuple[str, ...], ranks: int, run: Path, kill_after_s: float | None = None) -> None:
    """Train, or kill the training with all its ranks after some seconds of steps."""
    with subprocess.Popen(
        command(recipe, keys, ranks, run), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        if kill_after_s is not None:
            log = run / "metrics.jsonl"
            while process.poll() is None and not (log.exists() and log.stat().st_size):
                time.sleep(0.05)
            time.sleep(kill_after_s)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0].decode()
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{recipe} on {ranks} ranks failed:\n{output[-3000:]}")


def digest(run: Path) -> str:
    """SHA-256 of the last checkpoint and of the log without times."""
    found = hashlib.sha256()
    newest = max((run / "checkpoints").glob("step-*"))
    for path in sorted(newest.iterdir()):
        if path.name != "manifest.json":
            found.update(path.name.encode() + path.read_bytes())
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
    arguments = parser.parse_args()
    names = [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in arguments.ranks]
    header("recipe", *names, "killed on 4 and 3, ends on 2", "the same")
    differs = False
    for recipe in arguments.recipes:
        keys = tuple(key.format(data=Path(arguments.data).resolve()) for key in RECIPES[recipe])
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for ranks in arguments.ranks:
                train(recipe, keys, ranks, Path(folder, str(ranks)))
                found.append(digest(Path(folder, str(ranks))))
            killed = Path(folder, "killed")
            for ranks, kill_after_s in ((4, 1.0), (3, 1.0), (2, None)):
                train(recipe, keys, ranks, killed, kill_after_s)
            found.append(digest(killed))
        is_same = len(set(found)) == 1
        differs = differs or not is_same
        row(recipe, *found, "yes" if is_same else "NO")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
