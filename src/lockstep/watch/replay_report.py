"""The output of `lockstep replay`: a repeated step, compared with its entry in the log."""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.core import devices
from lockstep.core.build import Run
from lockstep.core.data.loader import MicroBatch
from lockstep.core.errors import UsageError, number_of
from lockstep.core.evaluate import combine
from lockstep.parts.digest import Digest
from lockstep.watch import replay, shares
from lockstep.watch.replay import ReplayedStep
from lockstep.watch.shares import StepShare

_SHOWN = 10


@dataclass(frozen=True)
class Wants:
    """What is requested in addition to the step itself."""

    rank: int | None = None
    """The rank whose micro-batches are computed separately. None: no rank."""
    ranks: int | None = None
    """The number of ranks that trained. None: as many as now."""
    samples: bool = False
    debugger: bool = False
    profile: Path | None = None


@dataclass
class StepReport:
    """A repeated step."""

    step: int
    epoch: float
    loss: float
    """Per unit of the global batch: the sum over heads, times their coefficients, as `train/loss` in the log."""
    by_head: dict[str, float]
    units: dict[str, float]
    grad_norm: float | None
    lr: float


@dataclass
class ReplayReport:
    """The repeated steps, and what is known about the last one."""

    run: str
    ranks: int
    began_at: int
    """Steps of the checkpoint from which it resumed; 0: from the beginning."""
    steps: list[StepReport] = field(default_factory=list)
    coefficients: dict[str, float] = field(default_factory=dict)
    """Factors of the losses by head; 1 for heads that are not here."""
    logged: dict[str, float] = field(default_factory=dict)
    """The entry of the log that includes the last step; empty: there is none."""
    logged_from: int = 0
    """The first step of this entry."""
    digests: dict[str, Digest] = field(default_factory=dict)
    """Of the state after the last step, by kind: model, optimizer, ema. On rank 0."""
    saved: str = ""
    """How this state compares with a checkpoint of the same step; empty: there is none."""
    parts: list[StepShare] = field(default_factory=list)
    """The micro-batches of the wanted rank."""
    samples: list[StepShare] = field(default_factory=list)
    """By loss, the largest first."""
    rank: int | None = None
    virtual_ranks: int | None = None
    """With them, a step has the same bits on any number of ranks."""


def make(
    run: Run,
    step: int,
    wants: Wants,
    after: Callable[[], Run | None],
    *,
    tell: Callable[[str], None],
    inside: Callable[[list[MicroBatch]], contextlib.AbstractContextManager[None]] | None = None,
) -> ReplayReport:
    """Repeat the steps of `run` up to a step. All ranks call it.

    Args:
        after: builds the run from a checkpoint after `step`; None if there is no such checkpoint.
        tell: reports what comes next.
        inside: makes a context around the last step from its micro-batches.

    Raises:
        UsageError: there is no such rank.
    """
    ranks_then = wants.ranks or run.world.size
    if wants.rank is not None and wants.rank >= ranks_then:
        remedy = "ranks are counted from 0; --ranks is the number that trained, by default as many as now"
        raise UsageError(
            f"there is no rank {wants.rank} among {number_of(ranks_then, 'rank')}",
            where=f"--rank {wants.rank}",
            remedy=remedy,
        )
    count = run.world.virtual_ranks
    if wants.rank is not None and count is not None and ranks_then > count:
        what, remedy = f"{ranks_then} ranks cannot share {count} virtual ranks", f"give at most {count}"
        raise UsageError(what, where=f"--ranks {ranks_then}", remedy=remedy)
    if run.world.tensor > 1 and (wants.samples or wants.rank is not None):
        run.config.parallel.without_mesh("replay --samples or --rank", "replay on one rank: --nproc 1")
    report = ReplayReport(
        str(run.folder), run.world.size, run.state.step, rank=wants.rank, virtual_ranks=run.world.virtual_ranks
    )
    report.coefficients = dict(run.state.coefficients)
    where = f"checkpoint {run.state.step}" if run.state.step else "the beginning"
    count = step - run.state.step
    steps = number_of(count, "step")
    ranks = number_of(run.world.size, "rank")
    tell(f"repeating {steps} of {run.folder}, from {where}, on {ranks}")

    @contextlib.contextmanager
    def around(number: int, micro_batches: list[MicroBatch]) -> Generator[None, None, None]:
        if number < step:
            yield
            return
        if wants.rank is not None:
            report.parts = shares.of_rank(run, wants.rank, ranks_then, micro_batches[0])
        if wants.samples:
            report.samples = sorted(shares.samples(run, micro_batches[0]), key=_size, reverse=True)
        if wants.debugger:
            print("before the step: run, micro_batches and run.state are available; c runs the step")
            breakpoint()  # noqa: T100 - the user asks for it
        with inside(micro_batches) if inside else contextlib.nullcontext(), _profiled(run, wants.profile):
            yield

    for made in replay.steps(run, step, around):
        report.steps.append(_step(run, made))
    kinds: dict[str, dict[str, Digest]] = {}
    for name, digest in replay.digests(run).items():
        kinds.setdefault(name.partition(".")[0], {})[name] = digest
    report.digests = {kind: _folded(found) for kind, found in kinds.items()}
    report.saved = _compared(run, after())
    report.logged, report.logged_from = run.world.on_rank0(lambda: _entry(run, step))
    return report


def _step(run: Run, made: ReplayedStep) -> StepReport:
    coefficients = run.state.coefficients
    loss = sum(coefficients.get(head, 1.0) * value for head, value in made.loss.items())
    rate = float(run.state.optimizer.param_groups[0]["lr"])
    epoch = made.step / run.plan.steps_per_epoch
    return StepReport(made.step, epoch, loss, made.loss, dict(made.result.totals), made.grad_norm, rate)


def _folded(digests: Mapping[str, Digest]) -> Digest:
    """One digest of several, for people to compare."""
    first, second = (
        zlib.crc32(repr([(name, one[place]) for name, one in digests.items()]).encode()) for place in (0, 1)
    )
    return first, second


def _compared(run: Run, saved: Run | None) -> str:
    """How the state compares with that of a checkpoint. All ranks call it."""
    if saved is None:
        return ""
    own, other = replay.digests(run), replay.digests(saved)
    differing = sorted(name for name in own if own[name] != other.get(name))
    gathered = run.world.broadcast(run.world.gather(differing))
    names = list(dict.fromkeys(name for of_rank in gathered for name in of_rank))
    if not names:
        return f"bitwise equal to checkpoint {run.state.step}"
    what = f"{len(names)} of {len(own)} tensors differ from checkpoint {run.state.step}"
    return f"{what}, the first is {names[0]}"


def _entry(run: Run, step: int) -> tuple[dict[str, float], int]:
    """The log's entry for a step, and its first step. For a step that ran several times, the last one."""
    found: dict[int, dict[str, float]] = {}
    with contextlib.suppress(OSError):
        for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if "train/loss" in entry:
                    found[int(entry["step"])] = entry
    later = [number for number in found if number >= step]
    if not later:
        return {}, 0
    last = min(later)
    begins = 1 + max([0, *(number for number in found if number < last)])
    names = ("step", "train/loss", "train/grad_norm", "train/lr")
    return {name: float(found[last][name]) for name in names if name in found[last]}, begins


@contextlib.contextmanager
def _profiled(run: Run, file: Path | None) -> Generator[None, None, None]:
    if file is None:
        yield
        return
    from torch.profiler import profile

    with profile(activities=devices.of(run.world.device).profiled()) as recorded:
        yield
        devices.of(run.world.device).synchronize()
    name = file if run.world.size == 1 else file.with_stem(f"{file.stem}-rank{run.world.rank}")
    recorded.export_chrome_trace(str(name))


def _size(part: StepShare) -> float:
    total = sum(part.loss.values())
    return math.inf if math.isnan(total) else total


def text(report: ReplayReport) -> str:
    """The report for a terminal."""
    lines = ["    step     epoch          units              loss         grad norm           lr"]
    if len(report.steps) > _SHOWN:
        lines.append(f"     ...  {number_of(len(report.steps) - _SHOWN, 'earlier step')}")
    for one in report.steps[-_SHOWN:]:
        units = max(one.units.values(), default=0.0)
        norm = "none" if one.grad_norm is None else f"{one.grad_norm:.9g}"
        lines.append(
            f"{one.step:>8}  {one.epoch:>8.3f}  {units:>13,.0f}  {one.loss:>16.9g}  {norm:>16}  {one.lr:>11.4g}"
        )
        if len(one.by_head) > 1:
            lines += [f"{'':>20}{head}: {value:.9g}" for head, value in one.by_head.items()]
    lines += ["", *_beside_log(report)]
    shown = ", ".join(f"{kind} {first:08x}{second:08x}" for kind, (first, second) in report.digests.items())
    lines.append(f"digests of the state after it: {shown}")
    if report.saved:
        lines.append(f"this state: {report.saved}")
    if report.parts:
        lines += ["", f"micro-batches of rank {report.rank}, each separately, before gradients are exchanged:"]
        lines += _parts(report.parts)
    if report.samples:
        title = "samples, each separately in evaluation mode, by their loss"
        lines += [
            "",
            title + (f": the {2 * _SHOWN} largest of {len(report.samples)}" if len(report.samples) > 20 else ""),
        ]
        lines += _parts(report.samples[: 2 * _SHOWN])
    return "\n".join(lines)


def _beside_log(report: ReplayReport) -> list[str]:
    logged, last = report.logged, report.steps[-1]
    if not logged:
        return ["the log has no entry of this step"]
    until = int(logged["step"])
    window = [one for one in report.steps if report.logged_from <= one.step <= until]
    lines = [f"the log's entry covers steps {report.logged_from} to {until}:"]
    complete = last.step == until and len(window) == until - report.logged_from + 1
    if complete:
        is_single = len(window) == 1  # a mean over steps rounds
        loss = last.loss if is_single else _mean(window, report.coefficients)
        must_equal = report.virtual_ranks is not None and is_single
        lines.append(_beside("loss", loss, logged.get("train/loss"), must_equal))
    else:
        lines.append(
            f"  loss: logged {logged['train/loss']:.9g}, a mean over these steps; not all of them were repeated"
        )
    if last.step == until:
        must_equal = report.virtual_ranks is not None
        lines.append(_beside("gradient norm", last.grad_norm, logged.get("train/grad_norm"), must_equal))
    return [line for line in lines if line]


def _mean(window: Sequence[StepReport], coefficients: Mapping[str, float]) -> float:
    """The mean over the units of some steps, by head, and the sum over heads. An optimizer may have no turn in a
    step."""
    sums: dict[str, float] = {}
    units: dict[str, float] = {}
    for one in window:
        for head, mean in one.by_head.items():
            count = one.units.get(head, one.units.get("", 0.0))
            sums[head] = sums.get(head, 0.0) + mean * count
            units[head] = units.get(head, 0.0) + count
    return combine(sums, units, coefficients).get("loss", math.nan)


def _beside(name: str, again: float | None, logged: float | None, must_equal: bool) -> str:
    if again is None or logged is None:
        return ""
    if again == logged:
        return f"  {name}: {again:.9g}, as logged"
    distance = abs(again - logged) / max(abs(logged), 1e-300)
    text = f"  {name}: {again:.9g}, logged {logged:.9g}: {distance:.1g} apart, relatively"
    return f"{text}. With parallel.virtual_ranks it must be the same: lockstep --explain bits" if must_equal else text


def _parts(parts: Sequence[StepShare]) -> list[str]:
    lines = ["              loss         grad norm      units  name"]
    for part in parts:
        loss = sum(part.loss.values()) if part.loss else math.nan
        units = max(part.units.values(), default=0.0)
        indices = "" if len(part.indices) == 1 else f", samples {', '.join(map(str, part.indices[:8]))}"
        more = " ..." if len(part.indices) > 8 else ""
        filler = ", a filler" if part.is_filler else ""
        lines.append(f"  {loss:>16.9g}  {part.grad_norm:>16.9g}  {units:>9,.0f}  {part.name}{indices}{more}{filler}")
        if len(part.loss) > 1:
            lines += [f"{'':>20}{head}: {value:.9g}" for head, value in part.loss.items()]
    return lines


def as_json(report: ReplayReport) -> str:
    """All numbers of the report."""
    values = asdict(report)
    for part in (*values["parts"], *values["samples"]):
        part["units"] = {head or "samples": units for head, units in part["units"].items()}
    for one in values["steps"]:
        one["units"] = {head or "samples": units for head, units in one["units"].items()}
    return json.dumps(values, indent=1)
