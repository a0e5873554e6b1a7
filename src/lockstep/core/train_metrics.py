"""The task's metrics over the training itself, from outputs that the training computes anyway."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from lockstep.core import devices, metric_sync, task_checks
from lockstep.core.checkpoint import nested
from lockstep.core.metric_sync import State
from lockstep.core.parallel.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from lockstep.core.task import MetricsUpdate, Task

_TAKEN = ("loss", "lr", "grad_norm", "loss_scale", "samples_per_s", "wait_share", "tflops_per_s", "mfu", "skipped")
"""The log has other figures with these names after `train/`."""


class TrainMetrics:
    """Feeds the outputs that `Task.loss` returns next to its losses to the metrics of `Task.metrics`.

    At an entry of the log, the metrics have seen every sample of the window once, whatever the ranks and micro-batches:
    fillers are not given to `add`. At the end of an epoch, they have seen every sample since the epoch began.

    An update queues work on the device and does not wait for it, if the metrics do not. States travel to the host and
    to rank 0 at entries only. Metrics that keep every output would grow with the epoch, so they are left out.

    What fails here ends no training: the log says it once, and has no metrics of the training from there on.
    """

    def __init__(self, task: Task, world: World) -> None:
        self.task, self.world = task, world
        self.live: MetricCollection | None = None
        """Metrics of what was fed and is not kept elsewhere yet, on the device. None: nothing was fed."""
        self._shards: list[MetricCollection] = []  # for each of `World.data_ranks`: `live` is the first
        self.problem = ""
        """The failure of this rank; after `results`, on any rank. Empty: nothing."""
        self._is_made = self._has_ended = False
        self._notes: list[str] = []
        self._window: list[list[State]] | None = None  # by shard, on the CPU: what was fed since the last entry
        self._epoch: list[list[State]] | None = None  # and since the last end of an epoch. Both without `_shards`

    @property
    def wants_output(self) -> bool:
        """False if an output would be kept for nothing: there are no metrics for it, or they have failed."""
        return not self.problem and not self._has_ended and (self.live is not None or not self._is_made)

    def add(self, output: Any, batch: Any, place: int = 0) -> None:
        """Feed the output of a micro-batch, without its gradient. The first call imports torchmetrics.

        Args:
            place: of its shard in `World.data_ranks`. Shards are added in their order, on any number of ranks.
        """
        if self.problem:
            return
        with self._noting_failure(), torch.no_grad():
            self._make()
            if self.live is not None:
                self._update(self._shards[place], output, batch)

    def has_news(self, *, epoch: bool = False) -> bool:
        """True if all ranks must call `results`, because of this rank."""
        if self._has_ended:
            return False
        kept = self._epoch if epoch else self._window
        is_updated = any(part.update_count for live in self._shards for part in metric_sync.parts_of(live))
        return bool(self.problem) or kept is not None or is_updated

    def results(self, *, epoch: bool = False) -> dict[str, float]:
        """The numbers of the window or of the epoch by name, equal on all ranks; begins a new one. A collective."""
        with self._noting_failure():
            self._make()
            self._keep()
        own = self._epoch if epoch else self._window
        self._window, self._epoch = (self._window, None) if epoch else (None, self._epoch)
        gathered = self.world.gather_once((own, self.problem))
        found: dict[str, float] = {}
        if gathered is not None:
            self.problem = next((problem for _, problem in gathered if problem), "")
            with self._noting_failure():
                found = self._computed([states for shards, _ in gathered if shards is not None for states in shards])
        found, self.problem = self.world.broadcast((found, self.problem))
        if self.problem:
            self.live, self._has_ended = None, True
            self._notes.append(f"warning: the log has no more metrics of the training, because {self.problem}")
        return {} if self.problem else found

    def saved(self, *, with_epoch: bool) -> Any:
        """What was fed since the last entry, and in this epoch, for a checkpoint, on rank 0. A collective."""
        own: list[list[list[State]]] = [[[], [], []] for _ in self.world.data_ranks]
        for place, live in enumerate(self._shards):
            kept = (self._window, self._epoch if with_epoch else None)
            own[place] = [metric_sync.states(live), *(of_shards[place] if of_shards else [] for of_shards in kept)]
        gathered = self.world.gather_once([] if self.problem or self._has_ended else own)
        if gathered is None or not all(gathered):
            return []
        with contextlib.suppress(nested.NotSavedError):
            return nested.encode([kept for of_rank in gathered for kept in of_rank])
        return []

    def restore(self, saved: Any) -> None:
        """Take what `saved` returned. On a different number of data ranks, the first of them takes all."""
        found: list[list[list[State]]] = nested.decode(saved, self.world.device)
        if not any(any(kept) for kept in found):
            return
        with self._noting_failure():
            self._make()
            if self.live is None or not all(metric_sync.fits(self.live, states) for kept in found for states in kept):
                return
            nothing = metric_sync.joined(self._shown, [])
            if len(found) != self.world.data_size:
                parts = [[states for kept in found for states in (kept[kind], kept[0]) if states] for kind in (1, 2)]
                found = [[[]] * 3] * self.world.data_size
                found[0] = [[], *(metric_sync.joined(self._shown, several) for several in parts)]
            mine = [found[number] for number in self.world.data_ranks]
            for live, kept in zip(self._shards, mine, strict=True):
                metric_sync.load(live, kept[0])
            self._window, self._epoch = (
                [kept[kind] or nothing for kept in mine] if any(kept[kind] for kept in mine) else None
                for kind in (1, 2)
            )

    def take_notes(self) -> list[str]:
        """Messages for the log, each once."""
        notes, self._notes = self._notes, []
        return notes

    @contextlib.contextmanager
    def _noting_failure(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            if devices.Device.is_shortage(error) or isinstance(error, torch.AcceleratorError):
                raise
            text = f"{type(error).__name__}: {error}".split("\n  remedy:")[0]
            self.problem = self.problem or f"Task.metrics cannot take what Task.loss returns in training: {text}"

    def _make(self) -> None:
        """Make the metrics. They are copies: the task may give the same objects to each evaluation."""
        if self._is_made:
            return
        self._is_made = True
        metrics, update = task_checks.metrics(self.task)
        if metrics is None:
            return
        metrics = copy.deepcopy(metrics)
        out = [name for name, metric in metrics.items(keep_base=True) if not _is_kept(name, metric)]
        told = [name for name in out if getattr(metrics[name], "gives_numbers", True)]
        if told:
            self._notes.append(f"note: the log has no {', '.join(told)} of the training: {_WHY}")
        for name in out:
            metrics._modules[name] = _ignored()  # an `update` may call it by its name
        if len(out) < len(metrics):
            self._shown = copy.deepcopy(metrics)
            self._update: MetricsUpdate = metric_sync.place(metrics, update, self.world.device)
            copies = [copy.deepcopy(metrics) for _ in self.world.data_ranks[1:]]
            self.live, self._shards = metrics, [metrics, *copies]

    def _keep(self) -> None:
        """Bring what was fed to the CPU, into the sums of the window and of the epoch."""
        if self.live is None:
            return
        shards = [metric_sync.states(live) for live in self._shards]
        if any(count for states in shards for count, _ in states):
            self._window, self._epoch = (
                [
                    metric_sync.joined(self._shown, [states] if kept is None else [kept[place], states])
                    for place, states in enumerate(shards)
                ]
                for kept in (self._window, self._epoch)
            )
            for live in self._shards:
                live.reset()

    def _computed(self, ranks: list[list[State]]) -> dict[str, float]:
        if self.live is None or not ranks:
            return {}
        metric_sync.merge(self._shown, ranks)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # metrics warn of classes that a window lacks
                return metric_sync.flatten(self._shown.compute())
        finally:
            self._shown.reset()


_WHY = "only metrics are computed there whose state has a fixed size, and whose names are not taken"


def _is_kept(name: str, metric: Metric) -> bool:
    gives_numbers = getattr(metric, "gives_numbers", True)
    return gives_numbers and name.partition("/")[0] not in _TAKEN and metric_sync.has_fixed_size(metric)


def _ignored() -> Metric:
    """A metric that takes anything, and has no result."""
    from torchmetrics import Metric

    class Ignored(Metric):
        def update(self, *args: Any, **kwargs: Any) -> None:
            pass

        def compute(self) -> dict[str, float]:
            return {}

    return Ignored()
