"""Rules on the log of a run: they find its limits and the keys to change. The run may still be going."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import number_of
from lockstep.parts.ending import duration
from lockstep_lab.plan import advice_on_memory
from lockstep_lab.plan.run_figures import Advice, Figures
from lockstep_lab.report import run as runs

_WAIT, _SAVING, _EVALUATING, _REST = 0.05, 0.03, 0.2, 0.35  # fractions of the time from which advice is given
_SLOWER = 1.25  # a rank's forward passes take this many times the median of the ranks
_MOSTLY = 0.75  # in this fraction of the later entries
_OF_TIME = 0.03  # and the difference is this fraction of the time
_LOW_MFU = 0.2
_SKIPPED = 0.01  # of the steps
_RESTARTS = 0.02  # of the time
_SAVES_COST = 0.01  # of the time that saves may take
_EVALUATIONS_COST = 0.1
_HOST_BOUND_S = 0.02  # a GPU that needs less time per micro-batch often waits for its host
_LONGEST_WAIT = 0.98  # a run that waits longer does not show how fast training is
_CACHES = "0.56 MB for 500x375; data.cache_size=256 reduces larger images first, to 0.26 MB"
_PICTURES = ("classification", "segmentation", "detection")


@dataclass(frozen=True)
class Advised:
    """Speed and memory of a run, from its log."""

    run: str
    """Directory of the run."""
    state: str
    """Progress of the run, and whether it is complete, stopped or running."""
    shares: dict[str, float]
    """How the run spent its time, as far as the log shows: fractions of 1."""
    notes: list[str]
    """Limits of the figures, for people."""
    advice: list[Advice]
    """The largest gain of time first."""


def advise(folder: Path) -> Advised:
    """Read the run in `folder` and apply all rules.

    Raises:
        UsageError: `folder` is not a run directory.
    """
    return of_figures(Figures(runs.read(folder)))


def of_figures(figures: Figures) -> Advised:
    """Apply all rules."""
    found = [advice for rule in _RULES for advice in rule(figures)]
    found.sort(key=lambda advice: advice.saves_share, reverse=True)
    return Advised(str(figures.run.folder), _state(figures), _shares(figures), _notes(figures), found)


def as_json(advised: Advised) -> dict[str, Any]:
    """For `json.dumps`."""
    return asdict(advised)


def text(advised: Advised) -> str:
    """The advice for people."""
    lines = [f"{advised.run}: {advised.state}"]
    if advised.shares:
        lines.append(
            "time: " + ", ".join(f"{share:.0%} {part}" for part, share in advised.shares.items() if share >= 0.005)
        )
    lines += [f"note: {note}" for note in advised.notes]
    if not advised.advice and advised.shares:
        lines.append("Nothing in this log limits the run enough to change a key.")
    for number, advice in enumerate(advised.advice, 1):
        lines += ["", f"{number}. {advice.finding}", f"   from:   {advice.source}"]
        lines += [f"   change: {' '.join(advice.changes)}"] if advice.changes else []
        lines += [f"   gain:   {advice.gain}"]
        lines += [f"   note:   {advice.note}"] if advice.note else []
    return "\n".join(lines)


# ---- the run as a whole


def _state(figures: Figures) -> str:
    _, sentence = figures.run.state()
    ranks = f"{number_of(figures.world, 'rank')} on {figures.device_name}"
    last, goal = figures.run.last_step, figures.run.log.starts[-1].goal if figures.run.log.starts else None
    left = ""
    if figures.run.state()[0] != "complete" and goal and last is not None and figures.step_s:
        training = figures.training_share or 1.0
        left = (
            f"; {number_of(goal - last, 'step', 'is', 'are')} left, about "
            f"{duration((goal - last) * figures.step_s / training)}"
        )
    return f"{ranks}; {sentence}{left}"


def _shares(figures: Figures) -> dict[str, float]:
    """How the run spent its time. With one rank, the log does not separate forward and backward passes from updates."""
    wait, computing, training = figures.late("train/wait_share"), figures.computing, figures.training_share
    if wait is None or figures.trained_s <= 0:
        return {}
    shares = {"waiting for data": wait * training}
    rest = "computing and starting"
    if computing:
        passes = min(1.0 - wait, statistics.mean(computing.values()) * figures.all_passes)
        shares["in forward and backward passes"] = passes * training
        rest = "the rest (exchange of gradients, updates, start)"
    shares["evaluating"] = figures.share_of_run("time/evaluation_s")
    shares["saving"] = figures.share_of_run("time/saving_s")
    shares[rest] = max(0.0, 1.0 - sum(shares.values()))
    return {part: round(share, 4) for part, share in shares.items()}


def _notes(figures: Figures) -> list[str]:
    notes = [problem.splitlines()[0] for problem in figures.run.problems if not problem.startswith("checkpoints/")]
    if not figures.run.config:
        notes.append("config.yaml is missing: values of keys below are defaults, and not those of the run")
    if not figures.entries:
        return [*notes, "the log has no training entries, so there is no advice"]
    if figures.late("train/wait_share") is None:
        notes.append("the log does not show how long training waits for data (train/wait_share)")
    if figures.entries < 4:
        entries = "1 entry" if figures.entries == 1 else f"{figures.entries} entries"
        fewer = max(1, figures.number("log.every_steps", 50) // 5)
        notes.append(f"the log has only {entries}: they may describe only the start. log.every_steps={fewer} logs more")
    if figures.world > 1 and not figures.computing:
        notes.append("the log does not show how long each rank computes, so a slow rank stays hidden")
    return notes


def less_time(share: float) -> str:
    """A fraction of the run's time as a gain: `up to 23 % less time (1.3 times as fast)`."""
    share = min(share, 0.99)
    return f"up to {share:.0%} less time ({faster(share)} times as fast)"


def faster(share: float) -> str:
    """The speed-up of a run that takes this fraction less time: two digits, and two decimals below 2."""
    times = 1 / (1 - share)
    return f"{times:.2f}" if times < 2 else f"{times:.2g}"


# ---- waiting for data


def _waiting(figures: Figures) -> Iterator[Advice]:
    wait = figures.late("train/wait_share")
    by_rank = figures.waiting
    # The other ranks wait in the exchange of gradients for the rank that waits for data.
    worst, worst_rank = max(((share, rank) for rank, share in by_rank.items()), default=(wait or 0.0, None))
    if wait is None or worst < _WAIT:
        return
    share = worst * figures.training_share
    finding = f"Training waits for data {worst:.0%} of the training time"
    source = f"train/wait_share {wait:.2f} (mean of the later entries)"
    others = [value for rank, value in by_rank.items() if rank != worst_rank]
    only_one = bool(others) and worst > 2 * statistics.median(others) + _WAIT
    if only_one:
        finding = f"Rank {worst_rank} waits for data {worst:.0%} of the training time, and the other ranks wait for it"
        source = (
            f"health/data_wait_ms/rank{worst_rank}: {worst:.2f} of a step, the median of the others "
            f"{statistics.median(others):.2f}"
        )
    workers = figures.number("data.workers")
    wished = _workers(workers, worst)
    changes, notes = [f"data.workers={wished}"], [] if only_one else _rates(figures, wait, workers)
    per_rank = (figures.cpus or 0) // figures.world
    if figures.cpus and wished > max(1, per_rank):
        notes.append(
            f"{figures.world} x {wished} workers exceed the {figures.cpus} CPU threads of the machine: that "
            "helps if loading waits for a disk or a network, but not if it computes"
        )
    if str(figures.key("task.kind")) in _PICTURES and figures.key("data.cache") is None:
        changes.append("data.cache=decoded")
        notes.append(
            "the cache helps from the second epoch on, and needs 3 bytes per pixel on the disk (" + _CACHES + ")"
        )
    early = figures.early("train/wait_share")
    if early is not None and early > 2 * (wait or 0.0):
        notes.append(f"it was {early:.0%} in the first half of the log, and is falling")
    if only_one:
        notes.append(f"check the disk, the network and the CPUs of rank {worst_rank}'s machine first")
    yield Advice(
        name="waiting for data",
        finding=finding,
        source=f"{source}; data.workers={workers}",
        changes=tuple(changes),
        gain=less_time(share),
        saves_share=share,
        note="; ".join(notes),
    )


def _rates(figures: Figures, wait: float, workers: int) -> list[str]:
    """The samples that training could take in a second, and those that its loading processes deliver."""
    rate, processes = figures.late("train/samples_per_s"), figures.world * max(1, workers)
    if not rate or not 0 < wait <= _LONGEST_WAIT:
        return []
    wished = rate / (1 - wait)
    # Without workers, a rank loads only while it waits.
    one = rate / processes if workers else rate / processes / wait
    by = number_of(processes, "worker" if workers else "rank", "loads", "load")
    return [
        f"without waits, training would take about {wished:,.0f} samples/s; {by} about {one:,.0f} each, so "
        f"{math.ceil(wished / one)} processes keep up, each on its own CPU thread"
    ]


def _workers(now: int, wait: float) -> int:
    """Workers of each rank that load as fast as training computes, plus one.

    Args:
        now: workers of each rank. Without workers, the rank loads and computes in turn, so loading takes
        wait / (1 - wait) times as long as computing. n busy workers deliver 1 - wait of what training could consume.
        wait: fraction of the time spent waiting.
    """
    left = max(0.02, 1 - wait)
    return max(now + 1, math.ceil(now / left if now else wait / left) + 1)


# ---- ranks


def _slow_rank(figures: Figures) -> Iterator[Advice]:
    by_rank = figures.computing
    if len(by_rank) < 2:
        return
    slowest = max(by_rank, key=lambda rank: by_rank[rank])
    others = statistics.median(share for rank, share in by_rank.items() if rank != slowest)
    more = by_rank[slowest] - others
    if by_rank[slowest] < _SLOWER * others or more < _OF_TIME or figures.slower(slowest, _SLOWER) < _MOSTLY:
        return
    least, most = more * figures.training_share, min(0.95, more * figures.all_passes) * figures.training_share
    gain = f"{least:.0%} less time" + (f", {most:.0%} if its last backward pass is also slower" if most > least else "")
    step_ms = 1000 * (figures.step_s or 0.0)
    yield Advice(
        name="a slow rank",
        finding=f"Rank {slowest} computes more slowly than the other ranks, which wait for it: before it exchanges "
        f"gradients, it takes {by_rank[slowest] / max(others, 1e-9):.1f} times as long",
        source=f"health/compute_ms/rank{slowest} {by_rank[slowest] * step_ms:.4g}, the median of the others "
        f"{others * step_ms:.4g}",
        changes=(),
        gain=f"{gain} ({faster(least)} to {faster(most)} times as fast)",
        saves_share=least,
        note="no key causes this: look for another program, a hot or throttled GPU, or task code that does more "
        f"on rank {slowest}; --profile shows where the time goes",
    )


# ---- computing


def _mfu(figures: Figures) -> Iterator[Advice]:
    mfu, wait = figures.late("train/mfu"), figures.late("train/wait_share") or 0.0
    if mfu is None or mfu >= _LOW_MFU or wait > 2 * _WAIT or not figures.step_s:
        return
    micro_s = figures.step_s / figures.accumulation
    changes = []
    if figures.key("compute.compile") is None:
        changes.append("compute.compile=auto")
    if str(figures.key("task.kind")) in _PICTURES and not figures.key("compute.channels_last"):
        changes.append("compute.channels_last=true")
    finding = f"The GPU reaches {mfu:.0%} of its peak"
    note = "large matrix products reach 30 to 50 %; convolutions and small models reach less"
    if micro_s < _HOST_BOUND_S:
        finding += f", and a micro-batch takes {1000 * micro_s:.1f} ms: the host probably launches work too slowly"
        note = "a larger micro-batch helps most; compute.compile=model compute.compile_mode=reduce-overhead "
        note += "replays a step without the host"
    yield Advice(
        name="low utilisation",
        finding=finding,
        source=f"train/mfu {mfu:.2f}, {1000 * micro_s:.1f} ms for a micro-batch of {figures.micro_batch}",
        changes=tuple(changes),
        gain=f"unknown; {0.3 / mfu:.1f} times as fast at 30 %",
        note=note,
    )


def _precision(figures: Figures) -> Iterator[Advice]:
    precision = str(figures.key("precision", "fp32"))
    skipped = figures.metrics.last("train/skipped") or 0.0
    steps = figures.metrics.last_step or 0
    if precision == "fp16" and steps and skipped / steps > _SKIPPED and skipped > 10:
        yield Advice(
            name="skipped steps",
            finding=f"{skipped:.0f} of {steps} steps were skipped: gradients overflowed in fp16",
            source=f"train/skipped {skipped:.0f}",
            changes=("precision=bf16",),
            gain=less_time(skipped / steps * figures.training_share),
            saves_share=skipped / steps * figures.training_share,
            note=f"bf16 requires a GPU with compute capability 8.0. {_ANOTHER}",
        )
    if precision != "fp32" or figures.is_on_cpu:
        return
    if _WITHOUT_BF16.search(figures.device_name):
        narrow, units = "fp16", "data sheets list several times the operations per second of fp32 for fp16"
    else:
        narrow, units = "bf16", "data sheets list at least twice the operations per second of TF32 for bf16"
    share = (1 - (figures.late("train/wait_share") or 0.0)) * figures.training_share / 2
    yield Advice(
        name="fp32",
        finding=f"The GPU computes in fp32, although {narrow} is often enough",
        source=f"precision=fp32; {units}",
        changes=(f"precision={narrow}",),
        gain=f"{less_time(share)} if products and convolutions dominate, and less memory",
        saves_share=share / 2,  # rarely all of it
        note=f"compute.matmul_precision=high computes products in TF32, if the GPU supports it. {_ANOTHER}",
    )


_WITHOUT_BF16 = re.compile(r"\b(V100|T4|P100|P40?|GTX|TITAN)\b|\bRTX 20")  # compute capabilities below 8.0
_ANOTHER = "The key changes the training: start a new run"


def _exchange(figures: Figures) -> Iterator[Advice]:
    computing, wait = figures.computing, figures.waiting
    if figures.strategy != "ddp" or not computing or not wait:
        return
    # The busiest rank is the one that the others wait for.
    busy = max(wait[rank] + computing[rank] * figures.all_passes for rank in computing)
    rest = 1 - busy
    if rest < _REST:
        return
    yield Advice(
        name="exchange and updates",
        finding=f"About {rest:.0%} of the training time is neither waiting for data nor forward and backward passes: "
        "it is the exchange of gradients, the update, or the host between them",
        source="1 - (health/data_wait_ms + health/compute_ms, and the last backward pass) of the busiest rank",
        changes=(f"batch.global={2 * figures.global_batch}",),
        gain=f"{less_time(rest / 2 * figures.training_share)} for the same samples: half as many exchanges and updates",
        saves_share=rest / 4 * figures.training_share,
        note=f"an estimate that counts a backward pass as two forward passes. {_ANOTHER}, "
        "and scale the learning rate (optim.lr_scaling). Fewer ranks may be as fast",
    )


# ---- saving, evaluating, starting again


def _saving(figures: Figures) -> Iterator[Advice]:
    share = figures.share_of_run("time/saving_s")
    if share < _SAVING:
        return
    seconds, saves = figures.total("time/saving_s"), figures.saves
    each = seconds / saves
    changes = []
    if figures.key("checkpoint.mode") == "sync":
        changes.append("checkpoint.mode=async")
    minutes = max(1.0, each / _SAVES_COST / 60)
    lost = figures.lost
    why = f"saves then take {each / (60 * minutes):.1%} of the time"
    if lost.restarts:
        between_s = figures.trained_s / lost.restarts
        minutes = max(0.1, math.sqrt(2 * each * between_s) / 60)
        why = f"by Young: sqrt(2 x {each:.2g} s for a save x {duration(between_s)} between failures)"
    every = figures.number("checkpoint.every_steps")
    if every:
        changes.append("checkpoint.every_steps=0")
    changes.append(f"checkpoint.every_minutes={minutes:.3g}")
    note = why
    if figures.key("checkpoint.keep_best") and not every:
        note += "; checkpoint.keep_best saves before each evaluation: evaluate less often"
    yield Advice(
        name="saving",
        finding=f"Saving pauses training for {share:.0%} of the time, {each:.2g} s each time",
        source=f"time/saving_s: {seconds:.3g} s of {figures.trained_s:.4g} s, about {saves} saves",
        changes=tuple(changes),
        gain=less_time(max(0.0, share - each / (60 * minutes))),
        saves_share=share,
        note=note,
    )


def _evaluating(figures: Figures) -> Iterator[Advice]:
    share, count = figures.share_of_run("time/evaluation_s"), figures.count("time/evaluation_s")
    if share < _EVALUATING or count < 2:
        return
    # If a fraction s of the time goes to evaluations, 1 - s + s / k of it remains with every k-th of them.
    times = min(count, math.ceil(share / (1 - min(share, 0.99)) * (1 - _EVALUATIONS_COST) / _EVALUATIONS_COST))
    times = max(2, times)
    key = "eval_every_steps" if figures.number("train.eval_every_steps") else "eval_every_epochs"
    now = figures.number(f"train.{key}", 1)
    saved = share * (1 - 1 / times)
    yield Advice(
        name="evaluating",
        finding=f"Evaluations take {share:.0%} of the time",
        source=f"time/evaluation_s: {number_of(count, 'evaluation')} of "
        f"{figures.total('time/evaluation_s') / count:.3g} s in "
        f"{figures.trained_s:.4g} s",
        changes=(f"train.{key}={now * times}",),
        gain=less_time(saved),
        saves_share=saved,
        note=f"one evaluation then replaces {times}"
        + ("; train.stop_when counts evaluations" if figures.key("train.stop_when") else ""),
    )


def _restarting(figures: Figures) -> Iterator[Advice]:
    lost = figures.lost
    if not lost.restarts or not figures.trained_s:
        return
    share = min(0.99, lost.seconds / figures.trained_s)
    if share < _RESTARTS:
        return
    each = max(0.01, figures.total("time/saving_s") / figures.saves)
    between_s = figures.trained_s / lost.restarts
    minutes = math.sqrt(2 * each * between_s) / 60
    changes = (f"checkpoint.every_minutes={minutes:.3g}",)
    saved = max(0.0, share - math.sqrt(2 * each / between_s))
    if not saved:
        return
    yield Advice(
        name="restarts",
        finding=f"After {lost.restarts} crash{'es' * (lost.restarts > 1)}, "
        f"{number_of(lost.steps, 'step', 'was', 'were')} repeated: "
        f"{share:.0%} of the time",
        source=f"train.log: starts that resume below the last step; {figures.step_s or 0:.3g} s for a step",
        changes=changes,
        gain=less_time(saved),
        saves_share=saved,
        note=f"by Young (1974): sqrt(2 x {each:.2g} s for a save x {duration(between_s)} between failures)",
    )


_RULES: tuple[Callable[[Figures], Iterator[Advice]], ...] = (
    _waiting,
    _slow_rank,
    _saving,
    _evaluating,
    _restarting,
    _precision,
    _mfu,
    _exchange,
    *advice_on_memory.RULES,
)
