"""Six scripts for one GPU, and the same with `lockstep.Loop`: lines that change, and whether they train the same model.

    python benchmarks/loop_ports.py [--only NAME ...] [--nproc 2] [--data ../shared/data]

The pairs are `examples/loop/NAME_plain.py` and `NAME.py`. All scripts run in float64, without dropout, for few epochs.
The Loop runs on one process, then on `--nproc` ranks, with its own order of samples and its own seeds. The plain script
gets the batches of the run on one process, recorded as the body of the loop got them, instead of those of its
shuffled DataLoader (for `letters`: of its random windows). Nothing else in it changes. Figures: the largest difference
of the final weights, relative to the largest weight of the tensor.

Lines: without blank lines, indentation and docstring of the module. *Changed*: new, or not as before.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from harness import header, row

EXAMPLES = Path(__file__).parents[1] / "examples" / "loop"
# What the script is, its data, and what takes the place of its length in this comparison.
PORTS = {
    "fashion": ("CNN on Fashion-MNIST, `StepLR` by epoch", "classification/fashion_mnist", {"EPOCHS": 1}),
    "cells": ("ResNet on blood cells, flips, best weights", "classification/bccd_cells", {"EPOCHS": 2}),
    "letters": ("GPT on letters, random windows, own rates", "lm/shakespeare", {"max_iters": 30}),
    "nuclei": ("U-Net on nuclei, Dice, `ReduceLROnPlateau`", "segmentation/nuclei", {"EPOCHS": 3}),
    "gan": ("GAN on digits, two optimizers in turn", "", {"EPOCHS": 2}),
    "news": ("small BERT on news, own `collate_fn`, warm-up", "text/ag_news", {"EPOCHS": 1}),
}
NO_GRADIENT = "attention.self.key.bias"  # of BERT: it holds rounding only


def lines_of(path: Path) -> list[str]:
    """The lines that count."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    return [line.strip() for line in text.splitlines()[first.end_lineno :] if line.strip()]


def changes(name: str) -> tuple[int, int, int]:
    """Lines of the plain script; lines of the port that are new or changed; lines that are gone."""
    before, after = lines_of(EXAMPLES / f"{name}_plain.py"), lines_of(EXAMPLES / f"{name}.py")
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    kept = sum(block.size for block in blocks)
    return len(before), len(after) - kept, len(before) - kept


# ---- one run, in its own process


def run_script(name: str, argument: str, *, is_plain: bool, record: str) -> None:
    """Run a script in this folder, in float64 and without dropout. The Loop records batches, the plain one gets them.

    Args:
        record: the file of the batches. Empty: they are not recorded.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.nn.functional.dropout = lambda values, *args, **options: values  # type: ignore[assignment]
    path = EXAMPLES / f"{name}{'_plain' if is_plain else ''}.py"
    text = path.read_text()
    for key, value in PORTS[name][2].items():
        text, count = re.subn(rf"(?m)^({key}\b.*?= )\d+", rf"\g<1>{value}", text)
        assert count == 1, key
    text = text.replace("num_labels=4,", "num_labels=4, attention_probs_dropout_prob=0.0,")
    sys.argv = [str(path), argument]
    names = {"__name__": "__main__", "__file__": str(path)}
    if is_plain:
        replay(torch.load(record, weights_only=False))
    elif record:
        recorded = record_batches()
    exec(compile(text, str(path), "exec"), names)
    if not is_plain and record:
        torch.save(recorded, record)


def record_batches() -> list[tuple[list[int], object]]:
    """A list that gets the samples and the batch of each step of a Loop."""
    from lockstep.trainer.user_step import LoopStep

    found: list[tuple[list[int], object]] = []
    driven = LoopStep._driven

    def noted(step, update):
        batches = driven(step, update)
        while True:
            try:
                batch = next(batches)
            except StopIteration as end:
                return end.value
            if len(found) < step.number:  # not for a second turn
                found.append((list(step._asked.micro_batches[0].indices), batch))
            yield batch

    LoopStep._driven = noted  # type: ignore[method-assign]
    return found


def replay(batches: list[tuple[list[int], object]]) -> None:
    """Let shuffled DataLoaders give these batches, and random windows begin at these samples."""
    from torch.utils.data import DataLoader, RandomSampler

    given, original, randint = iter(batches), DataLoader.__iter__, torch.randint

    def iterate(loader):
        if not isinstance(loader.sampler, RandomSampler):
            return original(loader)
        return (next(given)[1] for _ in range(len(loader)))

    def starts(high, size, **options):
        if size == (16,) and high > 500_000:  # of the training letters; those of the evaluation are a tenth
            return torch.tensor(next(given)[0])
        return randint(high, size, **options)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign, assignment]
    torch.randint = starts  # type: ignore[assignment]


# ---- the comparison


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run."""
    return torch.load(next(path for path in (folder / "model.pt", folder / "generator.pt") if path.exists()))


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest, relative to the largest weight of the tensor."""
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one if NO_GRADIENT not in name]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def run(name: str, argument: str, folder: Path, *, kind: str, ranks: int = 1, record: str = ""):
    """The final weights of a run in `folder`."""
    folder.mkdir()
    child = [str(Path(__file__).resolve()), "--child", name, argument, kind, record]
    launch = ["-m", "lockstep", "run", "--nproc", str(ranks)] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, *launch, *child]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {kind}, {ranks} ranks:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return weights(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=list(PORTS), choices=list(PORTS))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--data", type=Path, default=EXAMPLES.parents[2] / "shared" / "data")
    options = parser.parse_args()
    ranks = options.nproc
    header("script", "lines", "changed", "gone", "plain and Loop, one process", f"Loop on 1 and on {ranks} ranks")
    for name in options.only:
        what, place, _ = PORTS[name]
        argument = str((options.data / place).resolve()) if place else ""
        if name == "letters":
            argument = str(next(path for path in sorted(Path(argument).rglob("*.txt"))))
        with tempfile.TemporaryDirectory() as root:
            record = f"{root}/batches.pt"
            loop = run(name, argument, Path(root, "loop"), kind="loop", record=record)
            plain = run(name, argument, Path(root, "plain"), kind="plain", record=record)
            several = run(name, argument, Path(root, "ranks"), kind="loop", ranks=ranks)
        figures = [f"{difference(loop, other):.0e}" for other in (plain, several)]
        row(what, *changes(name), *("0" if figure == "0e+00" else figure for figure in figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, given_name, given_argument, given_kind, given_record = sys.argv
        run_script(given_name, given_argument, is_plain=given_kind == "plain", record=given_record)
    else:
        main()
