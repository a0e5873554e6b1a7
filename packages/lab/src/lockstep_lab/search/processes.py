"""The trainings of a sweep: started in their own process groups, asked to stop, and read from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.core.errors import UsageError
from lockstep.drawing.markup import shortened
from lockstep_lab.report import metrics_file

STOPPED = (75, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a training that was asked to stop. It may have been asked before it could handle signals."""
_ERROR = re.compile(r"^(\[rank \d+\] )?error: ")
_LONG = 400  # characters of a line


class Process:
    """A training in its own process group.

    Args:
        arguments: of `lockstep`, starting with `train`.
        log: the file for its output.
        environment: variables in addition to those of this process.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep_lab.search.trial_process", *arguments],
                stdin=subprocess.PIPE,  # closing it asks the training to stop: see `trial_process`
                stdout=file,
                stderr=file,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the sweep
            )

    def poll(self) -> int | None:
        """The exit code. None: it is running."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to save and stop."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


class TrialResults:
    """The results of a training in its run directory, as they come."""

    def __init__(self, folder: Path, metric: str) -> None:
        self.path, self.metric = folder / "metrics.jsonl", metric
        self._seen: tuple[int, int] | None = None
        self.values: list[float] = []
        """Of the metric, in the order of the steps. NaN if it was not finite."""
        self.names: list[str] = []
        """All names in the log."""
        self.steps = 0
        """Of the last entry."""

    def read(self) -> None:
        """Read what was appended."""
        with contextlib.suppress(OSError):
            about = self.path.stat()
            if (about.st_size, about.st_mtime_ns) == self._seen:
                return
            self._seen = (about.st_size, about.st_mtime_ns)
            metrics = metrics_file.read(self.path)
            series = metrics.series.get(self.metric)
            self.names, self.steps = list(metrics.series), metrics.last_step or 0
            self.values = [] if series is None else [float(value) for value in series.values]

    def best(self, direction: str) -> float | None:
        """The best finite value. None: there is none."""
        finite = [value for value in self.values if np.isfinite(value)]
        return (max if direction == "max" else min)(finite, default=None)


def error_in(log: Path) -> str:
    """The last output of a failed training: the lines from its last `error:` on, at most 12, without long lists. Of a
    traceback, the error comes first, followed by its last frames."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    text = re.sub(r"\[(\d[^\]\n]{30})[^\]\n]*\]", r"[\1...]", text)  # samples
    lines = [shortened(line.rstrip(), _LONG) for line in text.splitlines() if line.strip()]
    begun = max((place for place, line in enumerate(lines) if _ERROR.search(line)), default=len(lines) - 3)
    found = lines[max(0, begun) :]
    if found and "Traceback (" in found[0]:  # the error itself comes after its frames
        place = next((number for number, line in enumerate(found) if number and line[0] != " "), len(found) - 1)
        found = [found[place], *found[1:place][-9:]]
    found = found[:12]
    return _ERROR.sub("", "\n".join(found), count=1) or "it wrote nothing"


def kind_of(error: str) -> str:
    """The first line of an error without its numbers: the same if two trials fail in the same way."""
    return re.sub(r"\d+", "0", error.partition("\n")[0])


def environments(parallel: int, ranks: int, device: str) -> list[dict[str, str]]:
    """For each concurrent training, its variables: its own GPUs, or its share of the cores.

    Raises:
        UsageError: there are too few GPUs.
    """
    from lockstep.core import devices

    if device == "cpu" or not (gpus := devices.gpus()):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = {"OMP_NUM_THREADS": str(max(1, cores // parallel))}
        return [share if parallel > 1 and "OMP_NUM_THREADS" not in os.environ else {} for _ in range(parallel)]
    if gpus < parallel * ranks:
        what = f"{parallel} trials at once on {ranks} rank{'s' * (ranks > 1)} need {parallel * ranks} GPUs"
        raise UsageError(f"{what}, but there are {gpus}", where="--parallel", remedy="give a smaller number")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = names if len(names) == gpus and all(names) else [str(number) for number in range(gpus)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[slot * ranks : (slot + 1) * ranks])} for slot in range(parallel)]
