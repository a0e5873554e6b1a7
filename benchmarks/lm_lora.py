"""Full fine-tuning against adapters (LoRA) on questions with answers, over a small model that learned a book first.

    python benchmarks/lm_lora.py [--base-steps 200] [--steps 150] [--questions 100] [--only NAME ...]
        [--set KEY=VALUE ...] [--dir FOLDER]

Each system is a `lockstep train lm` in a process of its own, one after the other. Told are the results of an evaluation
on the 400 test questions, before and after, the bytes of a checkpoint and of an export, and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "lm"
SMALL = ["task.small={layers: 4, width: 192, heads: 6}", "task.length=256", "batch.global=8", "task.prompts=[]"]
SYSTEMS = {
    "full": ["optim.lr=1e-3"],
    "lora, q and v": ["optim.lr=5e-3", "task.lora.rank=16"],
    "lora, all linear": ["optim.lr=5e-3", "task.lora.rank=16", "task.lora.targets=all-linear"],
    "dora, all linear": ["optim.lr=5e-3", "task.lora.rank=16", "task.lora.targets=all-linear", "task.lora.dora=true"],
}
RESULTS = ("loss", "perplexity", "accuracy", "exact_match")


def lockstep(*arguments: str) -> float:
    """Run a command with one thread. Returns its seconds."""
    begun = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"lockstep {' '.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return time.perf_counter() - begun


def steps(count: int) -> list[str]:
    """The keys of a training of so many steps, with an evaluation at the end."""
    never = ["train.epochs=null", "train.min_steps=null", "train.eval_every_epochs=null"]
    return [*never, f"train.steps={count}", f"train.eval_every_steps={count}", "checkpoint.keep_best=null"]


def bytes_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def results(run: Path) -> dict[str, float]:
    """The last results of a run's evaluations."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next(entry for entry in reversed(entries) if "eval/loss" in entry)
    return {name: last[f"eval/{name}"] for name in RESULTS if f"eval/{name}" in last}


def main() -> None:
    """Print a table of all systems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--only", nargs="*", choices=[*SYSTEMS], default=[*SYSTEMS])
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp())
    base, questions = folder / "base", DATA / "gsm8k"
    if not base.is_dir():
        book = [f"data.train={DATA / 'rust_book'}", *SMALL, *steps(options.base_steps)]
        seconds = lockstep("train", "lm", *book, "--run-dir", str(folder / "book"))
        lockstep("export", str(folder / "book"), str(base))
        print(f"the book: {results(folder / 'book')}, {seconds:.0f} s", flush=True)
    answered = [f"data.train={questions / 'train.jsonl'}", f"data.eval={questions / 'test.jsonl'}", *SMALL[1:]]
    answered += [f"task.model={base}", f"task.exact_match={options.questions}", "task.new_tokens=120"]
    lockstep("train", "lm", *answered, *steps(1), "optim.lr=1e-12", "--run-dir", str(folder / "before"))
    print(f"before: {results(folder / 'before')}")
    print("| system | " + " | ".join(RESULTS) + " | checkpoint, kB | export, kB | seconds |")
    for name in options.only:
        run, out = folder / name.replace(" ", "-"), folder / f"{name.replace(' ', '-')}-out"
        seconds = lockstep(
            "train", "lm", *answered, *steps(options.steps), *SYSTEMS[name], *options.set, "--run-dir", str(run)
        )
        lockstep("export", str(run), str(out))
        found = results(run)
        newest = max((run / "checkpoints").glob("step-*"))
        sizes = [bytes_of(newest), sum(file.stat().st_size for file in out.glob("*.safetensors"))]
        cells = [f"{found[each]:.4g}" for each in RESULTS] + [f"{size / 1e3:,.0f}" for size in sizes]
        print(f"| {name} | " + " | ".join([*cells, f"{seconds:.0f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
