"""Processes that train with the package of a source tree, for `same_results.py`.

    python benchmarks/same_results_trees.py LOG

trains what standard input asks for, with the `lockstep` on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from same_results_cases import Case

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_STORE")


class Failed(Exception):
    """A training failed. Contains the text of its error."""


class Answer:
    """The answer of a rank: the text of its error, if it failed."""

    def __init__(self, error: str = "") -> None:
        self.error = error


def train(config: str, run: str, outcome: str | None, export: str | None) -> Answer:
    """Train on this rank. Then evaluate, predict and export, and write the results to the file `outcome`."""
    from lockstep import Trainer

    try:
        trainer = Trainer(config, run_dir=run, quiet=True)
        trainer.fit()
        if outcome is not None:
            found = {"evaluate": trainer.evaluate(), "predict": trainer.predict(), "describe": trainer.describe()}
            if os.environ["RANK"] == "0":
                torch.save(found, outcome)
        if export is not None:
            trainer.export(export, program=False)
    except Exception as error:
        return Answer(f"{type(error).__name__}: {error}")
    return Answer()


def serve() -> None:
    """Train what standard input asks for, on persistent ranks."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import lockstep

    try:
        from lockstep_lab.verify.workers import Workers
    except ModuleNotFoundError:  # a tree in which all code is in one package
        from lockstep.verify.workers import Workers

    workers = Workers(Path(sys.argv[1]))
    print(json.dumps(lockstep.__file__), file=channel, flush=True)
    for line in sys.stdin:
        ranks, *arguments = json.loads(line)
        answers = workers.run(ranks, train, *arguments)
        errors = [error for answer in answers if (error := getattr(answer, "error", str(answer)))]
        causes = [error for error in errors if not error.startswith("RankError")]  # the others only name a failed rank
        print(json.dumps((causes or errors)[:1]), file=channel, flush=True)
    workers.close()


class Side:
    """One of the two trees, with processes that train with its package."""

    def __init__(self, tree: Path, log: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in _RANKS}
        sources = [str(folder.resolve()) for folder in (tree / "src", *sorted(tree.glob("packages/*/src")))]
        self.environment = clean | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(log)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log.open("a"), "text": True}
        self._server = subprocess.Popen(command, env=self.environment, **pipes)
        package = Path(self._answer())
        if not package.is_relative_to(tree.resolve() / "src"):
            raise SystemExit(f"{tree} was requested, but Python imported {package}")

    def start(self, case: Case, number: int, folder: Path) -> None:
        """Make one start of a case, which trains or resumes in `folder`/run."""
        ranks, settings = case.starts[number]
        folder.mkdir(exist_ok=True)
        config, run, outcome, export = (str(folder / name) for name in ("case.yaml", "run", "outcome.pt", "export"))
        Path(config).write_text(yaml.safe_dump(nested(settings), sort_keys=False))
        is_last = number == len(case.starts) - 1
        if not case.commands:
            request = [ranks, config, run, outcome if is_last else None, export if is_last and case.exports else None]
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            if errors := self._answer():
                raise Failed(errors[0])
            return
        self.command("train", config, "--run-dir", run, "--nproc", str(ranks))
        found = {"evaluate": json.loads(self.command("evaluate", run))}
        self.command("predict", run, "--samples", "20", "--out", f"{folder}/rows.jsonl")
        found["predict"] = Path(folder, "rows.jsonl").read_text().splitlines()
        torch.save(found, outcome)
        if case.exports:
            self.command("export", run, export, "--no-program")

    def command(self, *arguments: str) -> str:
        """The output of a command."""
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *arguments], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise Failed(f"lockstep {arguments[0]}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout

    def _answer(self) -> Any:
        line = self._server.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.environment['PYTHONPATH']} ended; see its log with --keep DIR")
        return json.loads(line)

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """A config by sections, from dotted keys. Later keys are merged into the mappings of earlier ones."""
    config: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, key = path.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = place.get(key, {}) | value if isinstance(value, dict) and key != "task" else value
    return config


if __name__ == "__main__":
    import same_results_trees

    same_results_trees.serve()  # by the name under which ranks import it
