"""`lockstep doctor first-hour`: runs the commands of `first_hour.yaml`, and writes a page of what they show.

The YAML file is the only list of these commands. The table in docs/gpu.md comes from it, too.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug
from lockstep.cli.reporting import FAULT, reporting
from lockstep.core.errors import UsageError

_SHOWN = 40  # last lines of a command's output on the page


@dataclass(frozen=True)
class FirstHourStep:
    """A command, and what it must print."""

    shows: str
    command: str
    """Without `lockstep` in front."""
    prints: str
    """A part of its output. The exit code must be 0, too."""
    variables: dict[str, str] = field(default_factory=dict)
    needs_gpu: bool = False

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.variables.items()), "lockstep", self.command])


@dataclass(frozen=True)
class Result:
    """What a step has shown."""

    step: FirstHourStep
    state: str
    """passed, FAILED, or skipped with the reason."""
    seconds: float = 0.0
    output: str = ""


def first_hour(
    nproc: Annotated[
        str | None, typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU. Default: auto; 2 on CPUs.")
    ] = None,
    out: Annotated[Path, typer.Option("--run-dir", help="A new or empty folder for runs and page.")] = Path(
        "first_hour"
    ),
    debug: Debug = False,
) -> None:
    """Try out a new machine with ten commands, and write a page. Exit code 3: one failed.

    Steps that need a GPU are skipped if there is none.
    """
    with reporting(debug):
        from lockstep.cli import ranks
        from lockstep.core import devices

        has_gpu = devices.gpus() > 0
        count = ranks.count(nproc or ("auto" if has_gpu else "2"))
        if shlex.quote(str(out)) != str(out) or (out.is_dir() and any(out.iterdir())):
            what = "has files already, or a name that a shell reads differently"
            raise UsageError(what, where=str(out), remedy="choose another folder with --run-dir")
        out.mkdir(parents=True, exist_ok=True)
        file, results = out / "first_hour.md", list[Result]()
        for step in steps(count, out):
            results.append(run(step, has_gpu=has_gpu))
            print(f"{results[-1].state:<15} {results[-1].seconds:6.1f} s  {results[-1].step}", flush=True)
            file.write_text(page(results), encoding="utf-8")  # an end by Ctrl-C leaves the page so far
        print(f"written: {file}")
        if any(result.state == "FAILED" for result in results):
            raise typer.Exit(FAULT)


def steps(nproc: int, out: Path) -> list[FirstHourStep]:
    """The steps in their order, for a number of ranks and a folder."""
    import yaml

    text = resources.files(__package__).joinpath("first_hour.yaml").read_text(encoding="utf-8")
    return [
        FirstHourStep(**row) for row in yaml.safe_load(text.replace("{nproc}", str(nproc)).replace("{out}", str(out)))
    ]


def run(step: FirstHourStep, *, has_gpu: bool) -> Result:
    """Run the command of a step to its end."""
    if step.needs_gpu and not has_gpu:
        return Result(step, "skipped: no GPU")
    begun = time.monotonic()
    command, environment = [sys.executable, "-m", "lockstep", *shlex.split(step.command)], os.environ | step.variables
    done = subprocess.run(
        command, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    is_right = done.returncode == 0 and step.prints in done.stdout
    output = done.stdout.rstrip() + (f"\nexit code {done.returncode}" if done.returncode else "")
    return Result(step, "passed" if is_right else "FAILED", time.monotonic() - begun, output)


def page(results: Sequence[Result]) -> str:
    """The page, as Markdown: a table of all results, and then the output of each command."""
    lines = ["# The first hour", "", "| | command | shows | must print | result | s |", "|---:|---|---|---|---|---:|"]
    for number, result in enumerate(results, 1):
        step = result.step
        cells = (str(number), f"`{step}`", step.shows, f"`{step.prints}`", result.state, f"{result.seconds:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    for number, result in enumerate(results, 1):
        lines += ["", f"## {number}. {result.state}", "", f"    $ {result.step}"]
        lines += [f"    {line}" for line in result.output.splitlines()[-_SHOWN:]]
    return "\n".join([*lines, ""])


COMMAND = JoinedCommand(first_hour, "lockstep doctor first-hour --nproc auto", group="doctor")
