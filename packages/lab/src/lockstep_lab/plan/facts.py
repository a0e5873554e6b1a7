"""Facts about a task, from its real model without memory and from traced passes."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.core import optimizer_class, run_data, run_model, shortages, task_checks
from lockstep.core.blocks import recompute_activations
from lockstep.core.data.dataset import member_of
from lockstep.core.data.order import MicroBatchPlan, StepPlan
from lockstep.core.data.tensors import map_tensors
from lockstep.core.errors import UsageError
from lockstep.core.parallel.precision import Precision
from lockstep.sampling.of_data import order_of
from lockstep_lab.plan import model
from lockstep_lab.plan.inputs import (
    Affine,
    ModelFacts,
    OptimizerFacts,
    ParameterFacts,
    Passes,
    PassFacts,
    PrecisionName,
    Reading,
    Segment,
)
from lockstep_lab.plan.model import Built
from lockstep_lab.plan.reading import decoding_of
from lockstep_lab.plan.search import LARGEST
from lockstep_lab.plan.trace import LiveBytes, TracedPass, TracedSegment, Untraceable, trace_pass

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig
    from lockstep.core.task import Task

_SIZES = (2, 8)  # samples of the micro-batches that are traced
_REAL_SIZES = (2, 4)  # the same, if tensors need values
_REAL_ELEMENTS = 150e6  # parameters of the largest model whose passes are computed if tracing fails
_CPU = torch.device("cpu")
_DTYPES: dict[PrecisionName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDES = (2, 3, 5, 7, 11)  # of small tensors: different, to identify a state's dimensions


def facts_of(
    task: Task,
    config: RunConfig,
    *,
    device: Literal["cpu", "cuda"] = "cuda",
    precisions: tuple[PrecisionName, ...] = ("fp32", "bf16"),
    recompute: tuple[bool, ...] = (False, True),
    has_data: bool = True,
) -> ModelFacts:
    """Make the task's model without memory and trace its passes.

    Args:
        config: with a global batch as a number.
        device: the device whose operators the trace resembles. Nothing is computed on it.
        precisions: precisions to trace. fp16 has the bytes of bf16.
        recompute: whether the traced passes recompute activations.
        has_data: whether the task's data are the training data. If not, they are a substitute.

    Raises:
        DataError, UsageError: the task's data or model cannot be made.
    """
    with shortages.temporary_folder() as folder, _quiet():
        run_model.seed_everything(config)
        task.setup(folder, False)
        data = task_checks.data(task.train_data(), "Task.train_data")
        order = order_of(config, data) if has_data else None
        length = order.length if order else len(data)  # type: ignore[arg-type]
        batches: dict[int, Any] = {}
        for n in dict.fromkeys((*_SIZES, *_REAL_SIZES)):
            begun = time.process_time()
            batches[n] = _batch(config, task, data, n)
            read_s = (time.process_time() - begun) / n  # of the last: the first includes imports
        loading = Reading(read_s, decoding_of(data)) if has_data else None
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        built = model.without_values(task, config, fake, gpu=device == "cuda")
        trace = partial(_trace_all, config, precisions=precisions, recompute=recompute, gpu=device == "cuda")
        try:
            with_fakes = {n: map_tensors(batches[n], lambda tensor: fake.from_tensor(tensor)) for n in _SIZES}
            passes, traced, notes = trace(built, with_fakes, inside=fake)
        except Untraceable as error:
            passes, traced, notes = Passes(), {}, ["activations are unknown"]
            if sum(parameter.numel() for parameter in built.model.parameters()) <= _REAL_ELEMENTS:
                real = model.with_values(task, config, gpu=device == "cuda")
                passes, traced, notes = trace(real, {n: batches[n] for n in _REAL_SIZES}, inside=None)
                notes = ["they were computed on this machine instead, at a small size"] * bool(passes) + notes
            notes = [f"the passes cannot be traced without values: {error.where}: {error}", *notes]
    plain, recomputed = traced.get(False), traced.get(True)
    dtype = next(p.dtype for p in built.model.parameters() if p.requires_grad)
    of_unit = {id(p): i for i, unit in enumerate(built.units) for p in unit.parameters()}
    return ModelFacts(
        name=config.name,
        parameters=tuple(_parameter_facts(built, of_unit)),
        blocks=tuple(built.blocks),
        ends=(len(built.ends[0]), len(built.ends[1])),
        buffers_bytes=sum(buffer.nbytes for buffer in built.model.buffers()),
        optimizer=_optimizer_facts(built.optimizer, dtype),
        optimizer_of_fp16=_optimizer_facts(built.optimizer_of_fp16, dtype),
        passes=passes,
        flops_per_sample=plain.flops / plain.samples if plain else None,
        forward_flops_per_sample=plain.forward_flops / plain.samples if plain else None,
        recomputed_flops_per_sample=recomputed.recomputed_flops / recomputed.samples if recomputed else None,
        samples=length if has_data else None,
        reading=loading,
        **_of_config(config),
        data=("samples of the training data" if has_data else "made-up samples")
        + (", the longest" if member_of(data, "lengths") is not None else ""),
        notes=[*built.notes, *dict.fromkeys(notes)],
    )


def _of_config(config: RunConfig) -> dict[str, Any]:
    """The fields of `ModelFacts` that follow from a config alone."""
    return {
        "global_batch": config.batch.global_ or 32,
        "epochs": None if config.train.steps else config.train.epochs or 1,
        "min_steps": config.train.min_steps or 0,
        "steps": config.train.steps,
        "drop_last": config.data.drop_last,
        "learning_rate": config.optim.lr,
        "lr_scaling": config.optim.lr_scaling,
        "reference_batch": config.optim.reference_batch,
        "averages": config.train.ema_decay is not None,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, torch does not log operations that failed without values: the notes of the facts name them."""
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _batch(config: RunConfig, task: Task, data: Any, samples: int) -> Any:
    """A micro-batch: the longest samples, if lengths are known, else the first samples of the training."""
    lengths = member_of(data, "lengths")
    if lengths is not None:
        order = sorted(range(len(data)), key=lambda index: -float(lengths[index]))[:samples]
    else:
        plan = StepPlan(len(data), min(samples, len(data)), samples, 1, config.seed)
        order = plan.indices(0)[0].tolist()
    order = (order * samples)[:samples]  # a small data set is repeated
    loader = run_data.make_loader(model.on_one_rank(config), data, task, model.alone(), training=True)
    epoch = max(0, (config.train.epochs or 1) - 1)  # in which images are largest, if their size changes
    with contextlib.closing(loader.run(lambda: [MicroBatchPlan(tuple(order), epoch, False)])) as micro_batches:
        return next(micro_batches).collated


def _trace_all(
    config: RunConfig,
    built: Built,
    batches: dict[int, Any],
    *,
    precisions: Sequence[PrecisionName],
    recompute: Sequence[bool],
    inside: FakeTensorMode | None,
    gpu: bool,
) -> tuple[Passes, dict[bool, TracedPass], list[str]]:
    """Trace the passes in these precisions, with and without recomputation.

    Args:
        batches: two batches, by their number of samples.
        inside: the mode of the tensors. None: they have values.

    Returns:
        the passes; by recomputation, the first as it was traced with more samples; and notes on passes that are
        left out.

    Raises:
        Untraceable: a pass could not be traced without values. With values, such a pass is left out with a note.
    """
    found, notes, blocks = Passes(), list[str](), list(built.blocks.values())
    first_traced: dict[bool, TracedPass] = {}
    common: dict[str, Any] = {"blocks": built.units, "exchanged": built.exchanged}
    gathered_in = config.parallel.param_dtype
    traced: dict[PrecisionName, PrecisionName] = {"bf16" if p == "fp16" else p: p for p in reversed(precisions)}

    def trace(precision: PrecisionName) -> tuple[PassFacts, TracedPass]:
        with inside or contextlib.nullcontext():
            autocast: Callable[[], Any] = Precision(precision, _CPU).autocast
            first, second = (
                trace_pass(built.forward, batch, n, **common, autocast=autocast, as_on_gpu=gpu)
                for n, batch in batches.items()
            )
        return _pass_facts(first, second), second

    for again in sorted(recompute):
        if again and blocks:
            recompute_activations(blocks, _CPU, config.compute)
        for precision in reversed(traced) if blocks or not again else ():
            try:
                found[precision, again, None], second = trace(precision)
                first_traced.setdefault(again, second)
            except Untraceable as error:
                if inside is not None:
                    raise
                notes.append(f"they cannot be computed here in {traced[precision]}: {error}. Activations are unknown")
                continue
            if gathered_in is None:
                continue
            try:
                with model.gathered_in(built.model, _DTYPES[gathered_in]):
                    found[precision, again, gathered_in], _ = trace(precision)
            except Untraceable as error:
                what = f"parallel.param_dtype={gathered_in} in {traced[precision]} cannot be traced: {error.where}: "
                notes.append(f"{what}{error}; activations are estimated without it")
    return found, first_traced, notes


def _pass_facts(first: TracedPass, second: TracedPass) -> PassFacts:
    sizes = first.samples, second.samples
    segments = [segment for a, b in _pairs(first.segments, second.segments) for segment in _segments(a, b, sizes)]
    names = {"batch": "batch_bytes", "kept": "kept_bytes", "kept_casts": "kept_casts_bytes"}
    parts = {name: _affine(getattr(first, of), getattr(second, of), sizes) for name, of in names.items()}
    exchanged = {}
    for kind in dict(first.exchanged):
        a, b = ([size for name, size in each.exchanged if name == kind] for each in (first, second))
        exchanged[kind] = len(a), _affine(sum(a), sum(b), sizes)
    return PassFacts(tuple(segments), **parts, exchanged=exchanged)


def _pairs(
    first: Sequence[TracedSegment], second: Sequence[TracedSegment]
) -> list[tuple[TracedSegment, TracedSegment]]:
    """Corresponding segments of two passes: by order or, if the passes differ, those with the most bytes by phase."""
    if [s.place for s in first] == [s.place for s in second]:
        return list(zip(first, second, strict=True))
    pairs = []
    for phase in ("forward", "backward"):
        chosen = [max((s for s in side if s.phase == phase), key=lambda s: s.most) for side in (first, second)]
        pairs.append((chosen[0], chosen[1]))
    return pairs


_MICRO_BATCHES = 2.0 ** np.arange(LARGEST.bit_length())  # all that the search tries
# The parts of a snapshot that coexist: with one rank, next to buckets, with fsdp, and with fsdp without copies.
_TOGETHER = np.array([(1, 1, 1, 0), (1, 1, 0, 0), (1, 1, 0, 1), (1, 0, 0, 1)], dtype=np.float64)


def _segments(a: TracedSegment, b: TracedSegment, sizes: tuple[int, int]) -> Iterator[Segment]:
    """A segment for each moment that may have the most bytes.

    Which moment that is depends on the micro-batch: with few samples, the gradients of large matrices; with many, the
    activations. The bytes at each moment grow in proportion to the samples.
    """
    first, second = _snapshots(a, b)
    slopes = (second - first) / (sizes[1] - sizes[0])
    constants = first - slopes * sizes[0]
    bytes_at = (constants @ _TOGETHER.T)[..., None] + (slopes @ _TOGETHER.T)[..., None] * _MICRO_BATCHES
    for moment in np.unique(bytes_at.argmax(axis=0)):
        yield Segment(a.phase, a.block, a.before, *map(Affine, constants[moment].tolist(), slopes[moment].tolist()))


def _snapshots(a: TracedSegment, b: TracedSegment) -> tuple[np.ndarray, np.ndarray]:
    """The snapshots of both passes, (moments, parts) each. If the passes differ, the largest of each."""
    if len(a.snapshots) == len(b.snapshots):
        return np.array(a.snapshots, dtype=np.float64), np.array(b.snapshots, dtype=np.float64)
    first, second = (np.array(side.snapshots, dtype=np.float64) for side in (a, b))
    most = [side[(side @ _TOGETHER.T).argmax(axis=0)] for side in (first, second)]
    return most[0], most[1]


def _affine(a: float, b: float, sizes: tuple[int, int]) -> Affine:
    slope = (b - a) / (sizes[1] - sizes[0])
    return Affine(a - slope * sizes[0], slope)


def _parameter_facts(built: Built, of_unit: dict[int, int]) -> Iterator[ParameterFacts]:
    known: dict[Any, tuple[float, int]] = {}
    group_of = {id(p): number for number, g in enumerate(built.optimizer.param_groups) for p in g["params"]}
    held = built.model.state_dict()
    for name, parameter in built.model.named_parameters():
        states = (0.0, 0)
        if parameter.requires_grad:
            key = (group_of[id(parameter)], parameter.dtype, tuple(parameter.shape))
            if key not in known:
                known[key] = states_of(built.optimizer, parameter)
            states = known[key]
        yield ParameterFacts(
            name=name,
            shape=tuple(parameter.shape),
            element_bytes=parameter.element_size(),
            trainable=parameter.requires_grad,
            block=of_unit.get(id(parameter)),
            state_element_bytes=states[0],
            state_other_bytes=states[1],
            saved=name in held,
            cut_over=getattr(parameter, "cut_over", 1),
        )


def _optimizer_facts(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> OptimizerFacts:
    whole, temporaries = False, []
    for member in optimizer_class.members(optimizer):
        temporaries.append(temporaries_of(member, dtype))
        try:
            optimizer_class.check_shardable(member)
        except UsageError:
            whole = True
    of_all, of_largest = (max(figures) for figures in zip(*temporaries, strict=True))
    return OptimizerFacts(optimizer_class.classes(optimizer), of_all, of_largest, needs_whole_matrices=whole)


def states_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[float, int]:
    """The bytes of state that `optimizer` keeps for `parameter`, measured on a separate small tensor.

    Returns:
        bytes per element, of tensors with the shape of the parameter; and bytes of other tensors.
    """
    group, optimizer = next(
        (group, member)
        for member in optimizer_class.members(optimizer)
        for group in member.param_groups
        if any(own is parameter for own in group["params"])
    )
    sides = _SIDES[: parameter.ndim] + (2,) * max(0, parameter.ndim - len(_SIDES))
    small = nn.Parameter(torch.ones(sides, dtype=parameter.dtype))
    trial = _trial(optimizer, [small], group)
    per_element, other = 0.0, 0
    for value in trial.state[small].values():
        if not isinstance(value, Tensor):
            continue
        if value.shape == small.shape and small.ndim:
            per_element += value.element_size()
        elif value.ndim == small.ndim:  # a factor, such as Adafactor's sums over rows
            shape = [
                real if side == kept else kept
                for real, side, kept in zip(parameter.shape, sides, value.shape, strict=True)
            ]
            other += math.prod(shape) * value.element_size()
        else:
            other += value.nbytes
    return per_element, other


def temporaries_of(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> tuple[float, float]:
    """Temporary bytes of an update: per element of all parameters, and per element of the largest parameter."""
    side = 64
    peaks = {}
    for count in (1, 2, 6):
        small = [nn.Parameter(torch.ones(side, side, dtype=dtype)) for _ in range(count)]
        trial = _trial(optimizer, small, optimizer.param_groups[0])
        fixed = [*small, *(p.grad for p in small if p.grad is not None)]
        fixed += [v for state in trial.state.values() for v in state.values() if isinstance(v, Tensor)]
        with LiveBytes(fixed) as live:
            trial.step()
        peaks[count] = max(segment.most for segment in live.segments) / side**2
    of_all = (peaks[6] - peaks[2]) / 4  # with two, a loop over parameters still holds a tensor of the previous one
    of_all = max(0.0, round(of_all, 2))  # counters of a few bytes
    return of_all, max(0.0, round(peaks[1] - of_all, 2))


def _trial(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], group: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer like `optimizer` over `parameters`, after its first update."""
    options = {key: value for key, value in group.items() if key not in ("params", "name", "base_lr", "initial_lr")}
    make: Any = type(optimizer)
    try:
        trial: torch.optim.Optimizer = make([{"params": parameters, **options}], lr=options["lr"])
    except (TypeError, ValueError) as error:
        what = f"cannot make a second {type(optimizer).__name__} from its options to measure its state: {error}"
        raise UsageError(what, where="optim", remedy="measure a run: log.memory=table") from error
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    trial.step()
    return trial
