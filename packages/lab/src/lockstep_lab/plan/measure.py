"""Real steps of a training on this machine, compared with the estimate of the same setting. The engine runs the steps.

Memory is measured in the second step: the first creates the optimizer's state and the strategy's buffers. torch's
profiler reports each allocation and release of its allocators, on the CPU as on a GPU. States are the bytes of their
tensors.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lockstep.core import build, devices, shortages
from lockstep.core.data.loader import MicroBatch
from lockstep.core.errors import TrainingError, number_of
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.world import World as Ranks
from lockstep.core.step import TrainState, Update, train_step
from lockstep.parts import peaks
from lockstep.parts.flops import FlopCount
from lockstep.trainer import assemble
from lockstep_lab.plan.chart import gb
from lockstep_lab.plan.command import facts_with_or_without_data, with_tensor
from lockstep_lab.plan.estimate import Estimate, estimate, gathered_bytes, pass_of
from lockstep_lab.plan.inputs import Machines, ModelFacts, PrecisionName, Setting, StrategyName
from lockstep_lab.plan.trace import tensors_of

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig

_MEASURED = 7
"""The most steps whose memory is measured: stops at the first step without loss, else keeps the one with the least
loss. The profiler misses memory that a communication thread of the ranks frees, for example if that thread is the last
to hold the input of a collective."""
_MISSED = 0.01  # of the peak: bytes that the profiler may miss
_TIMED = 3  # steps after those, because a profiler slows steps down
_SETTLED_S = 0.05
_EXPLAINED = 0.05  # differences of at least this fraction are explained
_BEGIN, _FORWARD, _UPDATE, _END = (f"lockstep: {name}" for name in ("begin", "forward", "update", "end"))
_STATES = ("parameters", "gradients", "optimizer", "averages")


@dataclass(frozen=True)
class Measured:
    """Figures of the rank with the largest peak."""

    world: int
    device: str
    on_gpu: bool
    """Whether the device has its own memory."""
    strategy: str
    precision: str
    micro_batch: int
    accumulate: int
    recompute: bool
    parameters_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    optimizer_bytes: int
    averages_bytes: int
    activations_bytes: int
    """Bytes at the end of a forward pass that did not exist before: what the backward pass needs. With shards, also the
    gathered parameters outside the blocks."""
    batch_bytes: int
    peak_bytes: int
    flops_per_sample: float | None
    """Forward and backward pass. None: they could not be counted."""
    step_seconds: float
    """Median of a few steps."""


def measure(config: RunConfig) -> Measured | None:
    """Train a few steps on the ranks of this process's world, in memory: nothing is saved or logged.

    Returns:
        on rank 0 the figures of the rank with the largest peak; None on other ranks.

    Raises:
        LockstepError: the config, the data or the model cannot be used.
    """
    with shortages.temporary_folder("lockstep-measure-") as folder:
        short, run_dir = _short(config), folder / "run"
        with assemble.joined(short, run_dir) as ranks:
            short = short.model_copy(update={"batch": short.batch.resolve(ranks.data_size)})
            run = assemble.prepare(assemble.Setup(short, run_dir, quiet=True), assemble.make_task(short), ranks)
            everywhere = ranks.gather(_measure(short, run, ranks))
            return None if everywhere is None else max(everywhere, key=lambda measured: measured.peak_bytes)


def _short(config: RunConfig) -> RunConfig:
    """The config without evaluations, and with few steps. The learning-rate schedule does not matter here."""
    never = ("epochs", "min_steps", "eval_every_epochs", "stop_when", "max_time")
    steps = {"steps": 1 + _MEASURED + _TIMED, "eval_every_steps": 0, "parts": []}
    train = config.train.model_copy(update=dict.fromkeys(never) | steps)
    log = config.log.model_copy(update={"flops": False, "pictures": 0, "writers": [], "model_summary": False})
    device = devices.rather_than_mps(config.device)  # a plan is for CUDA; the CPU is measured instead
    schedule = config.schedule
    if schedule.plateau is not None:
        schedule = schedule.model_copy(update={"name": "constant", "plateau": None})
    return config.model_copy(update={"train": train, "log": log, "device": device, "schedule": schedule})


def _measure(config: RunConfig, run: build.Run, ranks: Ranks) -> Measured:
    state, device, batches = run.state, devices.of(ranks.device), iter(run.batches)
    state.forward.train()
    update = train_step if run.task.players else run.update  # one step with the losses of all players
    update(state, next(batches), run.plan.samples(state.step))
    best: _StepMemory | None = None
    for _ in range(_MEASURED):
        found = _memory_of_step(update, state, next(batches), run.plan.samples(state.step))
        if found and (best is None or found.missed <= best.missed):
            best = found
        lost = best is None or best.missed > _MISSED * best.figures["peak_bytes"]
        if ranks.all_max(int(lost)) == 0:
            break
    if best is None:
        what, remedy = f"gradients of {_MEASURED} steps overflowed, so no update was measured", "use bf16 or fp32"
        raise TrainingError(what, where=f"--measure with precision={config.precision}", remedy=remedy)
    seconds = []
    for _ in range(_TIMED):
        micro_batches = next(batches)
        device.synchronize()
        begun = time.perf_counter()
        update(state, micro_batches, run.plan.samples(state.step))
        device.synchronize()
        seconds.append(time.perf_counter() - begun)
    first = best.micro_batches[0]  # its samples may be shorter than others
    flops = FlopCount(state.strategy, state.precision, state.world, compiled=config.compute.compile is not None)
    flops.add([first])
    flops.count(first)
    counted = flops.take()
    return Measured(
        world=ranks.size,
        device=device.name(),
        on_gpu=device.has_own_memory,
        strategy=config.parallel.strategy if ranks.size > 1 else "single",
        precision=config.precision,
        micro_batch=max(len(each.indices) for each in best.micro_batches),
        accumulate=len(best.micro_batches),
        recompute=bool(config.compute.activation_checkpointing),
        **best.figures,
        flops_per_sample=None if counted is None else counted / max(1, len(first.indices)),
        step_seconds=statistics.median(seconds),
    )


# ---- the memory of a step


class _StepMemory(NamedTuple):
    figures: dict[str, int]
    """The bytes in `Measured`, by name."""
    missed: int
    """Bytes whose release the profiler missed: the step ended with more than it began with."""
    micro_batches: list[MicroBatch]


def _memory_of_step(
    update: Update, state: TrainState, micro_batches: list[MicroBatch], samples: int
) -> _StepMemory | None:
    """Run a step and measure it. None: its update was skipped."""
    device, held = devices.of(state.world.device), dict[str, int]()
    own = device.has_own_memory

    def count_states(*_: object) -> None:
        """After the update and before the gradients are freed."""
        _mark(_UPDATE)
        seen, parameters = set[int](), list(state.forward.parameters())
        averages = list(state.averages.tensors.values()) if state.averages else []
        gradients, optimizer = [parameter.grad for parameter in parameters], list(state.optimizer.state.values())
        tensors = ([*parameters, *state.forward.buffers()], gradients, optimizer, averages)
        for name, value in zip(_STATES, tensors, strict=True):
            here = (tensor for tensor in _tensors(value) if tensor.device.type == device.device.type)
            held[f"{name}_bytes"] = _bytes(here, seen)

    hooks = [
        # Before the hooks of FSDP, which gather parameters for the backward pass.
        state.forward.register_forward_hook(lambda *args: _mark_backward(args[-1]), prepend=True),
        state.optimizer.register_step_post_hook(count_states),
    ]
    device.reset_peak()
    _settle(state.world)
    with _profiled() as profile:
        _mark(_BEGIN)
        update(state, micro_batches, samples)
        _settle(state.world)
        _mark(_END)
    peak = device.peak()
    for hook in hooks:
        hook.remove()
    if not held:
        return None
    level, highest = _levels(profile.kineto_results.events(), "CUDA" if own else "CPU")
    batch = _bytes(_tensors([each.collated for each in micro_batches[:2]]))
    if not own:  # the allocator's level is known where the states were counted, so everywhere
        is_view = getattr(state.forward, "gradient_as_bucket_view", True)  # only DDP's wrapper has it
        buckets = 0 if is_view else held["gradients_bytes"]
        peak = sum(held.values()) + batch + buckets + highest - level[_UPDATE]
    figures = {"batch_bytes": batch, "activations_bytes": level[_FORWARD] - level[_BEGIN], "peak_bytes": peak}
    return _StepMemory(held | figures, 0 if own else abs(level[_END] - level[_BEGIN]), micro_batches)


def _settle(ranks: Ranks) -> None:
    """Wait until no communication thread of the ranks frees memory: a profiler that started or stopped meanwhile once
    crashed a rank."""
    if ranks.size > 1:
        ranks.all_sum([0.0])
        time.sleep(_SETTLED_S)


def _levels(events: Iterable[Any], kind: str) -> tuple[dict[str, int], int]:
    """The allocated bytes of a kind of device at the first of each mark, and the maximum between begin and end."""
    found = []
    for event in events:
        name = event.name()
        if name == "[memory]" and str(event.device_type()).endswith(kind):
            found.append((event.start_ns(), "", event.nbytes()))
        elif name.startswith("lockstep: "):
            found.append((event.start_ns(), name, 0))
    now, highest, at = 0, 0, dict[str, int]()
    for _, name, size in sorted(found, key=lambda event: event[0]):
        now += size
        if name:
            at.setdefault(name, now)
        if name == _END:
            break
        if _BEGIN in at:
            highest = max(highest, now)
    return at, highest


@contextlib.contextmanager
def _profiled() -> Iterator[Any]:
    """Profile the memory inside. Kineto writes its own lines to stderr when it starts and stops."""
    profile: Any = torch.autograd.profiler.profile(profile_memory=True)
    with _without_stderr():
        profile.__enter__()
    try:
        yield profile
    finally:
        with _without_stderr():
            profile.__exit__(None, None, None)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _mark(name: str) -> None:
    """A mark among the events of the profiler."""
    with torch.autograd.profiler.record_function(name):
        pass


def _mark_backward(losses: Any) -> None:
    """Mark the start of the backward pass. By then autocast has freed the weights that nothing needs any more."""
    for loss in tensors_of(losses):
        if loss.requires_grad:
            loss.register_hook(lambda _: _mark(_FORWARD))  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors on this rank in `value`, which may be nested."""
    return (local(tensor.detach()) for tensor in tensors_of(value))


def _bytes(tensors: Iterable[Tensor], seen: set[int] | None = None) -> int:
    """Bytes of the storages of tensors. Each storage counts once.

    Args:
        seen: addresses of storages that are already counted.
    """
    seen, total = set() if seen is None else seen, 0
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.data_ptr() not in seen:
            total += storage.nbytes()
            seen.add(storage.data_ptr())
    return total


# ---- compared with the estimate


class EstimateDifference(NamedTuple):
    """A part of an estimate, with its measurement."""

    part: str
    estimated: float | None
    """None: the estimate does not cover it."""
    measured: float | None
    unit: str
    """`bytes`, `flops` or `seconds`."""

    @property
    def off(self) -> float | None:
        """(estimated - measured) / measured. None: one of them is unknown, or nothing was measured."""
        if self.estimated is None or not self.measured:
            return None
        return self.estimated / self.measured - 1


def compare(config: RunConfig, measured: Measured, utilisation: float) -> tuple[Setting, list[EstimateDifference]]:
    """The measured setting, and its estimate compared with the measurement."""
    config = with_tensor(config, config.parallel.tensor if measured.world > 1 else 1, measured.world)
    setting = setting_of(config, measured, utilisation)
    facts = facts_with_or_without_data(
        config,
        precisions=(setting.precision,),
        device="cuda" if measured.on_gpu else "cpu",
        recompute=tuple({False, setting.recompute}),  # operations are those without recomputation
    )
    return setting, _differences(estimate(facts, setting), measured, _kept(facts, setting))


def setting_of(config: RunConfig, measured: Measured, utilisation: float) -> Setting:
    """The setting in which the training was measured. One machine has all ranks."""
    parallel, sheet, flops = config.parallel, None, None
    groups = measured.world // parallel.tensor
    if measured.on_gpu and (sheet := peaks.find(measured.device)) is not None:
        is_tf32 = measured.precision == "fp32" and config.compute.matmul_precision in ("high", "medium")
        flops = peaks.flops(measured.device, "tf32" if is_tf32 else measured.precision)
    world = Machines(
        measured.world,
        measured.world,
        peak_flops={measured.precision: flops} if flops else None,
        link_bytes_per_second=sheet.link_gb_per_s / 2 * 1e9 if sheet else None,
        utilisation=utilisation,
    )
    sharded: dict[str, Any] = {}
    strategy = measured.strategy
    if strategy == "fsdp":
        strategy = "hybrid" if parallel.shard_ranks and parallel.shard_ranks < groups else "fsdp"
        strategy = strategy if groups > 1 else "ddp"  # of one tensor group
    if strategy != "single" and (strategy != "ddp" or parallel.tensor > 1):
        names = ("shard_ranks", "param_dtype", "reduce_dtype", "reshard_after_forward", "reduce_each_micro_batch")
        sharded = {name: getattr(parallel, name) for name in names}
        sharded["offload"] = parallel.cpu_offload and measured.on_gpu  # the memory of a CPU is that of the host
    return Setting(
        world,
        cast(StrategyName, strategy),
        cast(PrecisionName, measured.precision),
        measured.micro_batch,
        measured.accumulate,
        recompute=measured.recompute,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
        tensor=parallel.tensor,
        virtual_ranks=parallel.virtual_ranks,
        **sharded,
    )


def _kept(facts: ModelFacts, setting: Setting) -> int | None:
    """Bytes that the estimate gives for `Measured.activations_bytes`. None: unknown."""
    passes = pass_of(facts, setting)
    if passes is None:
        return None
    kept = passes.kept.at(setting.micro_batch)
    if not setting.is_sharded:
        return kept
    if setting.param_dtype == setting.precision:  # gathered parameters need no copies
        kept -= passes.kept_casts.at(setting.micro_batch)
    stay_from = facts.stay_from if setting.reshard_after_forward else 0
    stay = (p for p in facts.parameters if p.block is None or p.block >= stay_from)
    return kept + sum(gathered_bytes(p, setting) for p in stay)


def _differences(estimated: Estimate, measured: Measured, kept: int | None) -> list[EstimateDifference]:
    memory = estimated.memory
    states = [(part, getattr(memory, f"{part}_bytes"), getattr(measured, f"{part}_bytes")) for part in _STATES]
    peak = None if memory.activations_bytes is None else memory.peak_bytes
    rows = [
        *(EstimateDifference(*state, "bytes") for state in states),
        EstimateDifference("all states", memory.states_bytes, sum(here for _, _, here in states), "bytes"),
        EstimateDifference("kept by a forward pass", kept, measured.activations_bytes, "bytes"),
        EstimateDifference("peak", peak, measured.peak_bytes, "bytes"),
        EstimateDifference("operations of a sample", estimated.flops_per_sample, measured.flops_per_sample, "flops"),
        EstimateDifference("time of a step", estimated.step_seconds, measured.step_seconds, "seconds"),
    ]
    return [row for row in rows if row.estimated or row.measured]


def text(rows: Sequence[EstimateDifference], measured: Measured, peak_flops: Mapping[str, float] | None = None) -> str:
    """The differences as a table for people.

    Args:
        peak_flops: peak operations per second of a rank's device, by precision. None: unknown.
    """
    about = f"{number_of(measured.world, 'rank')} on {measured.device}, {measured.strategy}, "
    about += f"{measured.precision}, micro-batch of {measured.micro_batch}"
    about += f" x {measured.accumulate}" if measured.accumulate > 1 else ""
    about += ", activations recomputed" if measured.recompute else ""
    cells = [("", "estimated", "measured", "off")]
    for row in rows:
        off = "" if row.off is None else f"{row.off:+.1%}"
        cells.append((row.part, _shown(row.estimated, row.unit), _shown(row.measured, row.unit), off))
    by = "max_memory_allocated" if measured.on_gpu else "bytes of tensors"
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"measured in real steps: {about}; memory by {by}"]
    for first, *others in cells:
        rest = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *rest)).rstrip())
    off_by_part = {row.part: row.off or 0.0 for row in rows}
    if off_by_part.get("operations of a sample", 0.0) > _EXPLAINED:
        lines.append("the estimate is for the longest samples of the data, but the measured samples were shorter")
    if off_by_part.get("peak", 0.0) < -_EXPLAINED:
        lines.append(
            "the measured peak includes buffers inside operators, such as convolutions, and on a CPU the copies that "
            "gloo makes of what it sends: torch reports neither in advance, so the estimate leaves them out"
        )
    if measured.flops_per_sample is not None:
        rate = measured.flops_per_sample * measured.micro_batch * measured.accumulate / measured.step_seconds
        lines.append(f"a rank computes {rate / 1e12:.3g} x 10^12 operations per second")
        if peak := (peak_flops or {}).get(measured.precision):
            lines[-1] += f", {rate / peak:.0%} of its peak: plan.utilisation={rate / peak:.2g}"
    return "\n".join(lines)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    if unit == "bytes":
        return gb(value)
    return f"{value:.3g} s" if unit == "seconds" else f"{value / 1e9:.4g} x 10^9"


def as_json(rows: Sequence[EstimateDifference], measured: Measured) -> dict[str, Any]:
    """For `json.dumps`."""
    return {"measured": asdict(measured), "differences": [row._asdict() | {"off": row.off} for row in rows]}
