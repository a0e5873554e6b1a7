"""Advice on a run, and the figures behind it: from the run's log, config and environment, without torch."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep_lab.report.run import RunSummary

MIB = 2**20
BACKWARD = 2.0
"""A backward pass computes two products for each product of the forward pass (Kaplan et al. 2020, arXiv:2001.08361,
section 2.1)."""
_GLOBAL_BATCH = 32  # the default of a config
_ASKED_TO_STOP = re.compile(r"stopped by ")


@dataclass(frozen=True)
class Advice:
    """A limit of a run, and the keys to change."""

    name: str
    """The rule, such as `waiting for data`."""
    finding: str
    """The limit, for people."""
    source: str
    """The figures of the log or config that show it."""
    changes: tuple[str, ...]
    """Overrides of the config, such as `data.workers=4`. Empty: no key helps."""
    gain: str
    """The possible gain of the change, for people."""
    saves_share: float = 0.0
    """Fraction of the run's time that the change may save. 0: it saves memory, or the gain in time is unknown."""
    note: str = ""
    """Further facts, for people."""


@dataclass(frozen=True)
class Lost:
    """The cost of restarts after crashes."""

    restarts: int
    steps: int
    """Steps that were repeated."""
    seconds: float
    """Time of these steps, and from the last line of each start to the first entry of the next start."""


class Figures:
    """The figures of a run. A figure that its log lacks is None."""

    def __init__(self, run: RunSummary) -> None:
        self.run, self.metrics = run, run.metrics
        last = run.log.starts[-1] if run.log.starts else None
        self.world = _count(run.environment.get("world")) or (last.world if last else 1)
        """Ranks of the last start."""
        self.device_name = str(run.environment.get("device") or "an unknown device")
        self.is_on_cpu = (last.device if last else "cpu").startswith("cpu")
        self.device_memory = _count(run.environment.get("device_memory"))
        """Bytes of a rank's device memory."""
        self.cpus = _count(run.environment.get("cpus"))
        """CPU threads of the machine of rank 0."""

    # ---- the config

    def key(self, path: str, default: Any = None) -> Any:
        """The value of a key of the config, by dotted path."""
        value: Any = self.run.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    def number(self, path: str, default: int = 0) -> int:
        """As `key`, for an integer. `default` if the config has none, or another value."""
        value = self.key(path)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @property
    def strategy(self) -> str:
        """`parallel.strategy`; single, if there is one rank."""
        return str(self.key("parallel.strategy", "ddp")) if self.world > 1 else "single"

    @property
    def global_batch(self) -> int:
        """Samples of an update."""
        return self.number("batch.global", _GLOBAL_BATCH) or _GLOBAL_BATCH

    @property
    def per_rank(self) -> int:
        """Samples of an update on each rank, rounded up."""
        return -(-self.global_batch // self.world)

    @property
    def micro_batch(self) -> int:
        """Samples of a forward pass: what the config asks for, or what remained after running out of memory."""
        asked = self.key("batch.micro")
        if isinstance(asked, Mapping):
            asked = min((size for size in asked.values() if isinstance(size, int)), default=None)
        asked = asked if isinstance(asked, int) and asked > 0 else self.per_rank
        fitting = [self.halved[0]] if self.halved else []
        return max(1, min(asked, self.per_rank, *fitting))

    @property
    def accumulation(self) -> int:
        """Forward passes of each rank before an update."""
        return -(-self.per_rank // self.micro_batch)

    # ---- the log

    @property
    def entries(self) -> int:
        """Entries of the training, without those of evaluations."""
        series = self.metrics.series.get("train/samples_per_s")
        return 0 if series is None else len(series.steps)

    def late(self, name: str) -> float | None:
        """The mean of the later half of a figure's entries. Of two or three entries, the first is left out: it includes
        the start of the run."""
        series = self.metrics.series.get(name)
        if series is None:
            return None
        finite = series.values[np.isfinite(series.values)]
        if not len(finite):
            return None
        return float(finite[len(finite) // 2 :].mean())

    def early(self, name: str) -> float | None:
        """The mean of the earlier half of a figure's entries. None: there are fewer than four."""
        series = self.metrics.series.get(name)
        if series is None or len(series.values) < 4:
            return None
        value = float(np.nanmean(series.values[: len(series.values) // 2]))
        return value if math.isfinite(value) else None

    def total(self, name: str) -> float:
        """The sum of a figure over all entries."""
        series = self.metrics.series.get(name)
        return 0.0 if series is None else float(np.nansum(series.values))

    def count(self, name: str) -> int:
        """The number of entries that have a figure."""
        series = self.metrics.series.get(name)
        return 0 if series is None else len(series.steps)

    def by_rank(self, name: str, latest: bool = False) -> dict[int, float]:
        """A figure of each rank: the mean of its later entries, or its latest value."""
        found: dict[int, float] = {}
        for rank in range(self.world):
            full = f"{name}/rank{rank}"
            value = self.metrics.last(full) if latest else self.late(full)
            if value is not None:
                found[rank] = value
        return found if len(found) == self.world else {}

    @property
    def waiting(self) -> dict[int, float]:
        """The fraction of the training time that each rank waited for data. Empty: the log does not show it."""
        return self._share_of_step("health/data_wait_ms")

    @property
    def computing(self) -> dict[int, float]:
        """The fraction of the training time that each rank computed before it exchanged gradients. Empty: the log does
        not show it, as with one rank."""
        found = self._share_of_step("health/compute_ms")
        return found if any(found.values()) else {}

    def slower(self, rank: int, times: float) -> float:
        """The fraction of the later entries in which a rank computes `times` as long as the median of the others.

        A hiccup of a rank changes its mean, but a slow rank is slow in most entries.
        """
        names = [f"health/compute_ms/rank{other}" for other in range(self.world)]
        found = [series.values for name in names if (series := self.metrics.series.get(name)) is not None]
        count = min((len(values) for values in found), default=0)
        if len(found) < self.world or not count:
            return 0.0
        later = np.stack([values[-count:] for values in found])[:, count // 2 :]
        return float(np.mean(later[rank] >= times * np.nanmedian(np.delete(later, rank, axis=0), axis=0)))

    def _share_of_step(self, name: str) -> dict[int, float]:
        by_rank = self.by_rank(name)
        return {rank: ms / 1000 / self.step_s for rank, ms in by_rank.items()} if self.step_s else {}

    @property
    def all_passes(self) -> float:
        """The time of all passes of a step, relative to those before the exchange of gradients.

        These are all but the last backward pass. A backward pass counts as `BACKWARD` forward passes.
        """
        passes = self.accumulation
        return passes * (1 + BACKWARD) / (passes + (passes - 1) * BACKWARD)

    @property
    def trained_s(self) -> float:
        """Seconds of all starts together, up to their last entries."""
        return self.run.trained_s

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, without evaluations and saves."""
        rate = self.late("train/samples_per_s")
        return self.global_batch / rate if rate else None

    def share_of_run(self, name: str) -> float:
        """The seconds of a figure, summed over all entries, as a fraction of the run's time."""
        return min(1.0, self.total(name) / self.trained_s) if self.trained_s > 0 else 0.0

    @property
    def training_share(self) -> float:
        """The fraction of the run's time that is neither evaluation nor saving."""
        return max(0.0, 1.0 - self.share_of_run("time/evaluation_s") - self.share_of_run("time/saving_s"))

    @property
    def saves(self) -> int:
        """Number of saves that the entries cover, as far as config and log show: at least 1."""
        every = self.number("checkpoint.every_steps")
        by_step = (self.metrics.last_step or 0) // every if every else 0
        minutes = self.key("checkpoint.every_minutes")
        by_time = int(self.trained_s / (60 * minutes)) if isinstance(minutes, int | float) and minutes > 0 else 0
        best = self.count("time/evaluation_s") if self.key("checkpoint.keep_best") else 0
        return max(1, by_step, by_time, best)

    # ---- events

    @property
    def halved(self) -> tuple[int, int] | None:
        """Samples of a micro-batch that fit, and those asked for, after running out of memory. Otherwise None."""
        try:
            note = json.loads((self.run.folder / "micro.json").read_text(encoding="utf-8"))
            after, before = int(note["micro"]), max(int(size) for _, size in note["asked"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return (after, before) if note.get("world") == self.world and after < before else None

    @property
    def lost(self) -> Lost:
        """The cost of restarts after a kill or a crash."""
        starts, restarts, steps, seconds = self.run.log.starts, 0, 0, 0.0
        for before, after in itertools.pairwise(starts):
            again = before.reached - after.from_step
            if _ASKED_TO_STOP.match(before.ending) or before.is_complete:
                continue
            restarts += 1
            steps += max(0, again)
            seconds += max(0, again) * (self.step_s or 0.0)
        return Lost(restarts, steps, seconds)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
