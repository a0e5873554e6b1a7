"""Trainings with two source trees: they must give the same weights, logs, configs and predictions.

    python benchmarks/same_results.py BEFORE AFTER [--cases PATTERN] [--jobs N] [--messages] [--keep DIR]

BEFORE and AFTER are folders with `src/lockstep` and `packages`, such as worktrees of two commits. Both train each case
of `same_results_cases.py`, with the same Python. The comparison covers:

- all remaining checkpoints: their files byte for byte and, if these differ, the tensors bit for bit; manifests
  without `saved_at`, `trained_s`, the id of the run, the digest of the config, and the checksum of the manifest itself
- metrics.jsonl: all entries with all names, and all values except those that depend on a clock or on memory
  (`CLOCKED`)
- config.yaml, without keys that AFTER has added
- results of `evaluate`, outputs of `predict` and the rows that `describe` shows; for some cases the exported files
- with --messages, also train.log without its numbers

If BEFORE's run is `crossed`, AFTER resumes from its checkpoint. Persistent ranks train the cases, using names of the
package `lockstep` itself, the workers of `verify`, and commands. The exit code is 1 if a case differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import json
import queue
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from same_results_cases import Case, all_cases, write_data
from same_results_trees import Failed, Side
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

CLOCKED = re.compile(r"time_s$|_per_s$|/wait_share$|^time/|^health/|^memory/(?!(parameters|gradients|optimizer)_mb$)")
"""Names of the log whose values are times, speeds or measured memory."""
_NOT_IN_MANIFEST = ("saved_at", "trained_s", "config", "run")  # config.yaml is compared itself


# ---- comparing


def first_difference(one: Any, other: Any, where: str) -> str | None:
    """The location of the first difference, with both values. Tensors and numbers are compared bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{where}: {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"
        bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        if torch.equal(*bits):
            return None
        return f"{where}: differs by up to {float((one.double() - other.double()).abs().max()):.3g}"
    if isinstance(one, dict) and isinstance(other, dict):
        if where.startswith("config"):  # keys that were added later have their defaults
            other = {key: value for key, value in other.items() if key in one}
        if one.keys() != other.keys():
            lacks = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
            return f"{where}: only before {lacks[0]}, only after {lacks[1]}"
        pairs = [(one[key], other[key], f"{where}.{key}") for key in one]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{where}: {len(one)} entries, {len(other)} entries"
        pairs = [(*pair, f"{where}[{place}]") for place, pair in enumerate(zip(one, other, strict=True))]
    else:
        if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
            one, other = (one.dtype, one.shape, one.tobytes()), (other.dtype, other.shape, other.tobytes())
        return None if repr(one) == repr(other) else f"{where}: {str(one)[:80]!r}, {str(other)[:80]!r}"
    return next((found for pair in pairs if (found := first_difference(*pair))), None)


def difference(before: Path, after: Path, *, messages: bool) -> str | None:
    """The first difference between what the trees left in two folders."""
    runs = before / "run", after / "run"
    pairs = [
        ("config.yaml", *(yaml.safe_load((run / "config.yaml").read_text()) for run in runs)),
        ("metrics.jsonl", *(_log(run) for run in runs)),
        ("checkpoints", *(sorted(path.name for path in (run / "checkpoints").glob("step-*")) for run in runs)),
        ("results", *(torch.load(side / "outcome.pt", weights_only=False) for side in (before, after))),
    ]
    for name, one, other in pairs:
        if found := first_difference(one, other, name):
            return found
    for folder in (*sorted((runs[0] / "checkpoints").glob("step-*")), before / "export"):
        if found := _files_differ(folder, after / folder.relative_to(before)):
            return found
    return first_difference(*(_messages(run) for run in runs), "train.log") if messages else None


def _log(run: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: 0 if CLOCKED.search(key) else value for key, value in entry.items()} for entry in entries]


def _messages(run: Path) -> list[str]:
    text = re.sub(r"\S*/run\b", "RUN", (run / "train.log").read_text())
    lines = [re.sub(r"\d[\d.,:e+-]*", "#", line) for line in text.splitlines()]
    return [line.replace("# min # s", "# s") for line in lines]


def _files_differ(one: Path, other: Path) -> str | None:
    """The first difference between two checkpoints or exports."""
    if found := first_difference(*(sorted(path.name for path in place.glob("*")) for place in (one, other)), one.name):
        return found
    for file in sorted(one.glob("*")):
        twin = other / file.name
        if file.name == "manifest.json":
            contents = [json.loads(path.read_text())["checkpoint"] for path in (file, twin)]
            for content in contents:
                for key in _NOT_IN_MANIFEST:
                    content.pop(key, None)
            if found := first_difference(*contents, f"{one.name}/manifest.json"):
                return _tensors_differ(one, other) or found
        elif file.suffix == ".safetensors":  # its library writes the metadata in any order
            if found := first_difference(_safetensors(file), _safetensors(twin), f"{one.name}/{file.name}"):
                return found
        elif file.suffix in (".json", ".distcp") and file.read_bytes() != twin.read_bytes():
            return _tensors_differ(one, other) or f"{one.name}/{file.name}: different bytes, the same tensors"
    return None


def _safetensors(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as content:
        return {
            "metadata": content.metadata(),
            **{
                name: content.get_tensor(name)
                for name in content.keys()  # noqa: SIM118 - it is not a dict
            },
        }


def _tensors_differ(one: Path, other: Path) -> str | None:
    if not (one / ".metadata").exists():
        return None
    with tempfile.TemporaryDirectory() as scratch:
        tensors = []
        for folder in (one, other):
            dcp_to_torch_save(folder, f"{scratch}/whole.pt")
            tensors.append(torch.load(f"{scratch}/whole.pt", weights_only=False))
    return first_difference(*tensors, one.name)


# ---- all cases


def compare(case: Case, sides: tuple[Side, Side], folder: Path, *, messages: bool) -> str | None:
    """Train a case with both trees. Returns the first difference, or None.

    Raises:
        Failed: both trees fail in the same way, so nothing was compared.
    """
    folder.mkdir(parents=True)
    if case.config_of:
        configs = [yaml.safe_load(side.command("config", case.config_of)) for side in sides]
        return first_difference(*configs, "config")
    places, errors = (folder / "before", folder / "after"), ["", ""]
    for number in range(len(case.starts)):
        for which, side in enumerate(sides):
            if which and case.crosses and number == 0 and not errors[0]:
                shutil.copytree(places[0] / "run", places[1] / "run")
            elif not errors[which]:
                try:
                    side.start(case, number, places[which])
                except Failed as failed:
                    errors[which] = str(failed).replace(str(places[which]), "FOLDER")
    if errors[0] and errors[0] == errors[1]:
        raise Failed(errors[0])
    return f"errors: {errors}" if any(errors) else difference(*places, messages=messages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--cases", default="*", help="names of cases, with * and ?; several with commas")
    parser.add_argument("--jobs", type=int, default=1, help="number of cases to run at a time")
    parser.add_argument("--messages", action="store_true", help="also compare the lines of train.log")
    parser.add_argument("--keep", type=Path, help="keep all runs and logs in this new folder")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="lockstep-same-"))
    folder = folder.resolve()
    write_data(folder / "data")
    patterns = options.cases.split(",")
    cases = [case for case in all_cases(folder / "data") if any(fnmatch.fnmatch(case.name, text) for text in patterns)]
    trees = [tree.resolve() for tree in (options.before, options.after)]
    pairs: queue.Queue[tuple[Side, Side]] = queue.Queue()
    for job in range(min(options.jobs, len(cases))):
        pairs.put((Side(trees[0], folder / f"before-{job}.log"), Side(trees[1], folder / f"after-{job}.log")))

    def run(case: Case) -> str:
        pair = pairs.get()
        try:
            return compare(case, pair, folder / "cases" / case.name, messages=options.messages) or "same"
        except Failed as failed:
            return f"failed with both: {failed}"
        finally:
            pairs.put(pair)

    counts = {"same": 0, "different": 0, "failed": 0}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        for case, result in zip(cases, threads.map(run, cases), strict=True):
            counts["same" if result == "same" else "failed" if result.startswith("failed with") else "different"] += 1
            print(f"{case.name:40} {result}", flush=True)
    while not pairs.empty():
        for side in pairs.get():
            side.close()
    print(f"{len(cases)} cases: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    if options.keep is None:
        shutil.rmtree(folder)
    sys.exit(counts["same"] < len(cases) or not cases)


if __name__ == "__main__":
    main()
