"""A range test of learning rates: a short training with a rising rate, on any number of ranks, that leaves no files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.core import devices, shortages
from lockstep.core.build import Run
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError
from lockstep.core.log_window import LogWindow
from lockstep.core.schedule import Schedule, ScheduleConfig, scaled_lr
from lockstep.core.task import Task
from lockstep.trainer import assemble
from lockstep_lab.search import curve
from lockstep_lab.search.curve import Suggestion


@dataclass(frozen=True)
class RangeTest:
    """The losses of a range test, and their interpretation. The same on all ranks."""

    rates: list[float]
    """Of each step: the value of the key `optim.lr`."""
    losses: list[float]
    """Of each step: the loss of the global batch, before its update."""
    averages: list[float]
    """The losses, smoothed."""
    ended: str
    """Why the test ended before its last rate; empty if it did not."""
    suggestion: Suggestion
    scale: float
    """The optimizer's rate for `optim.lr=1`: `optim.lr_scaling`."""
    keys: dict[str, float]
    """Keys of rates, with their values in the config: `optim.lr`, and those of groups with their own rate."""

    def overrides(self, rate: float) -> list[str]:
        """KEY=VALUE for each key of a rate, in the config's ratios."""
        factor = rate / self.keys["optim.lr"]
        return [f"{key}={value * factor:.2g}" for key, value in self.keys.items()]


def range_test(
    config: RunConfig, task: Task | None = None, *, low: float = 1e-7, high: float = 10.0, steps: int = 100
) -> RangeTest:
    """Train with a rate that rises from `low` to `high`, on the ranks of this process's world, in memory.

    The weights are the initial ones of the training. The test ends early if the smoothed loss is four
    times the smallest, or a loss is not finite.

    Args:
        task: replaces the config's task.
        low, high: values of `optim.lr`. The rates of all parameter groups keep the config's ratios.

    Raises:
        LockstepError: the config, the data or the model cannot be used.
    """
    curve.check(low, high, steps)
    with shortages.temporary_folder("lockstep-tune-") as folder:
        short, run_dir = _short(config, steps), folder / "run"
        with assemble.joined(short, run_dir) as ranks:
            short = short.model_copy(update={"batch": short.batch.resolve(ranks.size)})
            setup = assemble.Setup(short, run_dir, quiet=True)
            run = assemble.prepare(setup, task or assemble.make_task(short), ranks)
            if run.task.players:
                what = "alternating optimizers take turns, and no single loss measures how well they learn"
                raise UsageError(what, where="lockstep tune lr", remedy="compare rates with lockstep sweep")
            rates = [curve.rate_at(step, steps, low, high) for step in range(steps)]
            return _read(config, run, rates)


def _short(config: RunConfig, steps: int) -> RunConfig:
    """The config of a training of a few steps that neither evaluates, logs nor saves."""
    never = ("epochs", "min_steps", "eval_every_epochs", "stop_when", "max_time")
    train = config.train.model_copy(
        update=dict.fromkeys(never) | {"steps": steps, "eval_every_steps": 0, "parts": [], "ema_decay": None}
    )
    log = config.log.model_copy(update={"flops": False, "pictures": 0, "writers": [], "model_summary": False})
    return config.model_copy(update={"train": train, "log": log, "schedule": ScheduleConfig()})


def _read(config: RunConfig, run: Run, rates: list[float]) -> RangeTest:
    state, given, keep = run.state, config.optim.lr, curve.keep_of(len(rates))
    # A schedule counts updates. An update that overflowed in fp16 is repeated with the same rate.
    state.schedule = Schedule(own=lambda update: rates[min(update, len(rates) - 1)] / given)
    losses: list[float] = []
    used: list[float] = []
    averages: list[float] = []
    ended = ""
    for rate, loss in _losses(run, rates):
        if not math.isfinite(loss):
            ended = f"the loss is {loss} at {rate:.2g}"
            break
        used.append(rate)
        losses.append(loss)
        averages = curve.smoothed(losses, keep)
        if curve.diverges(averages):
            ended = f"the loss is {curve.DIVERGED:g} times the smallest at {rate:.2g}"
            break
    optim, batch = config.optim, run.config.batch.global_
    scale = scaled_lr(1.0, optim.lr_scaling, global_batch=batch or 1, reference_batch=optim.reference_batch)
    keys = {"optim.lr": given} | {
        f"optim.groups.{number}.lr": group.lr for number, group in enumerate(optim.groups) if group.lr is not None
    }
    return RangeTest(used, losses, averages, ended, curve.suggest(used, losses, keep), scale, keys)


def _losses(run: Run, rates: list[float]) -> Iterator[tuple[float, float]]:
    """The rate and the loss of the global batch, step by step. A global batch without units has none."""
    state = run.state
    window = LogWindow(state.world, state.coefficients, run.plan.steps_per_epoch)
    window.sums_epochs = True
    state.forward.train()
    mark = devices.of(state.world.device).mark()
    for micro_batches in run.batches:
        rate = rates[min(state.step - state.skipped, len(rates) - 1)]
        window.add(run.update(state, micro_batches, run.plan.samples(state.step)), (mark, mark))
        _, found = window.epoch_results()  # unlike `entry`, it takes a loss that is not finite
        window.reset()
        if "loss" in found:
            yield rate, found["loss"]
