"""Facts of a task, from its real model without memory and from traced passes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep import run_data, run_model, shortages
from lockstep.data.order import MicroBatchPlan, StepPlan
from lockstep.data.tensors import map_tensors
from lockstep.distributed.precision import Precision
from lockstep.engine import task_checks
from lockstep.engine.blocks import recompute_activations
from lockstep.errors import UsageError
from lockstep.plan import model, update
from lockstep.plan.model import Built
from lockstep.plan.model_facts import (
    Affine,
    ModelFacts,
    Moment,
    OptimizerFacts,
    ParameterFacts,
    PassFacts,
    Segment,
)
from lockstep.plan.search import LARGEST
from lockstep.plan.setting import PrecisionName
from lockstep.plan.trace import TracedPass, TracedSegment, Untraceable, trace_pass

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.tasks.task import Task

_SIZES = (2, 8)  # samples of the micro-batches that are traced
_REAL_SIZES = (2, 4)  # the same, where tensors need values
_REAL_ELEMENTS = 150e6  # largest model, in parameters, whose passes are computed where they cannot be traced otherwise
_CPU = torch.device("cpu")
_DTYPES: dict[PrecisionName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_Pair = tuple[TracedPass, TracedPass]


def facts_of(
    task: Task,
    config: RunConfig,
    *,
    device: Literal["cpu", "cuda"] = "cuda",
    precisions: tuple[PrecisionName, ...] = ("fp32", "bf16"),
    recompute: tuple[bool, ...] = (False, True),
    has_data: bool = True,
) -> ModelFacts:
    """Make the task's model without memory, and trace its passes.

    Args:
        config: with a global batch as a number.
        device: whose operators the trace shall resemble. Nothing is computed on either.
        precisions: whose passes are traced. fp16 has the bytes of bf16.
        recompute: whether activations are recomputed, in the passes that are traced.
        has_data: whether the task's data are those of the training. Otherwise they stand in for them.

    Raises:
        DataError, UsageError: the task's data or model cannot be made.
    """
    with shortages.temporary_folder() as folder, _quiet():
        run_model.seed_everything(config)
        task.setup(folder, False)
        data = task_checks.data(task.train_data(), "Task.train_data")
        length = len(data)  # type: ignore[arg-type]
        batches = {n: _batch(config, task, data, n) for n in dict.fromkeys((*_SIZES, *_REAL_SIZES))}
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        built, notes = model.without_values(task, config, fake, gpu=device == "cuda")
        notes += built.notes
        wanted = [(p, r) for r in sorted(recompute) for p in precisions if built.blocks or not r]
        trace = partial(_trace_all, wanted=wanted, gathered_in=config.parallel.param_dtype, gpu=device == "cuda")
        traced, sizes = _Traced(), _SIZES
        try:
            traced = trace(built, batches=_fakes(batches, fake, _SIZES), inside=fake)
        except Untraceable as error:
            notes.append(f"the passes cannot be traced without values: {error.where}: {error}")
            elements = sum(parameter.numel() for parameter in built.model.parameters())
            if elements <= _REAL_ELEMENTS:
                sizes = _REAL_SIZES
                real = model.with_values(task, config, gpu=device == "cuda")
                traced = trace(real, batches={n: batches[n] for n in sizes}, inside=None)
                if traced.passes:
                    notes.append("they were computed on this machine instead, in small")
            else:
                notes.append("activations are not known")
    plain = next((pair[1] for pair in traced.passes.values()), None)
    dtype = next(p.dtype for p in built.model.parameters() if p.requires_grad)
    of_block = {id(p): i for i, block in enumerate(built.blocks.values()) for p in block.parameters()}
    return ModelFacts(
        name=config.name,
        parameters=tuple(_parameter_facts(built, of_block)),
        blocks=tuple(built.blocks),
        buffers_bytes=sum(buffer.nbytes for buffer in built.model.buffers()),
        optimizer=_optimizer_facts(built.optimizer, dtype),
        optimizer_of_fp16=_optimizer_facts(built.optimizer_of_fp16, dtype),
        passes={key: _pass_facts(*pair, sizes) for key, pair in traced.passes.items()},
        gathered_passes={key: _pass_facts(*pair, sizes) for key, pair in traced.gathered.items()},
        flops_per_sample=plain.flops / sizes[1] if plain else None,
        forward_flops_per_sample=plain.forward_flops / sizes[1] if plain else None,
        block_flops_per_sample=plain.block_flops / sizes[1] if plain else None,
        samples=length if has_data else None,
        global_batch=config.batch.global_ or 32,
        epochs=None if config.train.steps else config.train.epochs or 1,
        min_steps=config.train.min_steps or 0,
        steps=config.train.steps,
        drop_last=config.data.drop_last,
        learning_rate=config.optim.lr,
        lr_scaling=config.optim.lr_scaling,
        reference_batch=config.optim.reference_batch,
        averages=config.train.ema_decay is not None,
        data=("samples of the training data" if has_data else "made-up samples") + _kind_of_samples(data),
        notes=[*notes, *dict.fromkeys(traced.notes)],
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, torch does not log the operations that failed without values: the notes of the facts name them."""
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _kind_of_samples(data: Any) -> str:
    return ", the longest" if getattr(data, "lengths", None) is not None else ""


def _batch(config: RunConfig, task: Task, data: Any, samples: int) -> Any:
    """A micro-batch: the longest samples, where lengths are known, else the first samples of the training."""
    lengths = getattr(data, "lengths", None)
    if lengths is not None:
        order = sorted(range(len(data)), key=lambda index: -float(lengths[index]))[:samples]
    else:
        plan = StepPlan(len(data), min(samples, len(data)), samples, 1, config.seed)
        order = plan.indices(0)[0].tolist()
    order = (order * samples)[:samples]  # a small data set is repeated
    loader = run_data.make_loader(model.on_one_rank(config), data, task, model.alone(), training=True)
    epoch = max(0, (config.train.epochs or 1) - 1)  # in which pictures are largest, where their size changes
    plans = [MicroBatchPlan(tuple(order), epoch, False)]
    with contextlib.closing(loader.run(lambda: plans)) as micro_batches:
        return next(micro_batches).collated


def _fakes(batches: dict[int, Any], fake: FakeTensorMode, sizes: Sequence[int]) -> dict[int, Any]:
    return {n: map_tensors(batches[n], lambda tensor: fake.from_tensor(tensor)) for n in sizes}


@dataclass
class _Traced:
    """Passes of micro-batches of two sizes, by precision and by whether activations are recomputed."""

    passes: dict[tuple[PrecisionName, bool], _Pair] = field(default_factory=dict)
    gathered: dict[tuple[PrecisionName, bool, PrecisionName], _Pair] = field(default_factory=dict)
    """The same with parameters that FSDP gathers in another number format, which is the last part of the key."""
    notes: list[str] = field(default_factory=list)


def _trace_all(
    built: Built,
    *,
    wanted: Sequence[tuple[PrecisionName, bool]],
    gathered_in: PrecisionName | None,
    batches: dict[int, Any],
    inside: FakeTensorMode | None,
    gpu: bool,
) -> _Traced:
    """Trace the passes that are `wanted`.

    Args:
        gathered_in: `parallel.param_dtype`.
        batches: by their number of samples.
        inside: the mode of the tensors. None: they have values.

    Raises:
        Untraceable: a pass could not be traced without values. With values, such a pass is left out, and noted.
    """
    found, blocks = _Traced(), list(built.blocks.values())
    recomputes = False
    for precision, again in wanted:
        same: tuple[PrecisionName, bool] = ("bf16", again)
        if precision == "fp16" and same in found.passes:
            found.passes[precision, again] = found.passes[same]
            if gathered_in and (*same, gathered_in) in found.gathered:
                found.gathered[precision, again, gathered_in] = found.gathered[*same, gathered_in]
            continue
        if again and not recomputes:
            recompute_activations(blocks, _CPU)
            recomputes = True
        autocast: Callable[[], Any] = Precision("bf16" if precision == "fp16" else precision, _CPU).autocast

        def both(autocast: Callable[[], Any] = autocast) -> _Pair:
            with inside or contextlib.nullcontext():
                first, second = (
                    trace_pass(built.forward, batch, blocks=blocks, autocast=autocast, as_on_gpu=gpu)
                    for batch in batches.values()
                )
            return first, second

        try:
            found.passes[precision, again] = both()
        except Untraceable as error:
            if inside is not None:
                raise
            found.notes.append(f"they cannot be computed here in {precision}: {error}. Activations are not known")
            continue
        if gathered_in is None:
            continue
        try:
            with model.gathered_in(built.model, _DTYPES[gathered_in]):
                found.gathered[precision, again, gathered_in] = both()
        except Untraceable as error:
            what = f"parallel.param_dtype={gathered_in} in {precision} cannot be traced: {error.where}: {error}"
            found.notes.append(f"{what}; activations are told as without it")
    return found


def _pass_facts(first: TracedPass, second: TracedPass, sizes: tuple[int, int]) -> PassFacts:
    pairs = _pairs(first.segments, second.segments)
    segments = [segment for a, b in pairs for segment in _segments(a, b, sizes)]
    return PassFacts(
        tuple(segments),
        batch=_affine(first.batch_bytes, second.batch_bytes, sizes),
        kept=_affine(first.kept_bytes, second.kept_bytes, sizes),
        kept_casts=_affine(first.kept_casts_bytes, second.kept_casts_bytes, sizes),
    )


def _pairs(
    first: Sequence[TracedSegment], second: Sequence[TracedSegment]
) -> list[tuple[TracedSegment, TracedSegment]]:
    """Segments of two passes that belong together: by order; where passes differ, those with most bytes by phase."""
    if [s.place for s in first] == [s.place for s in second]:
        return list(zip(first, second, strict=True))
    pairs = []
    for phase in ("forward", "backward"):
        chosen = [max((s for s in side if s.phase == phase), key=lambda s: s.most) for side in (first, second)]
        pairs.append((chosen[0], chosen[1]))
    return pairs


_MICRO_BATCHES = 2.0 ** np.arange(LARGEST.bit_length())  # all that the search tries
# Which parts of a snapshot live together: with one rank, beside buckets, with fsdp, and with fsdp without copies.
_TOGETHER = np.array([(1, 1, 1, 0), (1, 1, 0, 0), (1, 1, 0, 1), (1, 0, 0, 1)], dtype=np.float64)


def _segments(a: TracedSegment, b: TracedSegment, sizes: tuple[int, int]) -> Iterator[Segment]:
    """A segment for each moment that may be the one with most bytes.

    Which moment this is depends on the micro-batch: with few samples the gradients of large matrices, with many samples
    the activations. Bytes of each moment grow in proportion to the samples.
    """
    first, second = _snapshots(a, b)
    slopes = (second - first) / (sizes[1] - sizes[0])
    constants = first - slopes * sizes[0]
    bytes_at = (constants @ _TOGETHER.T)[..., None] + (slopes @ _TOGETHER.T)[..., None] * _MICRO_BATCHES
    for moment in np.unique(bytes_at.argmax(axis=0)):
        activations, casts, gradients, of_block = map(Affine, constants[moment].tolist(), slopes[moment].tolist())
        yield Segment(
            a.phase,
            a.block,
            a.before,
            alone=Moment(activations, casts, gradients),
            beside=Moment(activations, casts),
            of_block=Moment(activations, casts, of_block),
        )


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


def _parameter_facts(built: Built, of_block: dict[int, int]) -> Iterator[ParameterFacts]:
    known: dict[Any, tuple[float, int]] = {}
    group_of = {id(p): number for number, g in enumerate(built.optimizer.param_groups) for p in g["params"]}
    for name, parameter in built.model.named_parameters():
        states = (0.0, 0)
        if parameter.requires_grad:
            key = (group_of[id(parameter)], parameter.dtype, tuple(parameter.shape))
            if key not in known:
                known[key] = update.states_of(built.optimizer, parameter)
            states = known[key]
        yield ParameterFacts(
            name=name,
            shape=tuple(parameter.shape),
            element_bytes=parameter.element_size(),
            trainable=parameter.requires_grad,
            block=of_block.get(id(parameter)),
            state_element_bytes=states[0],
            state_other_bytes=states[1],
        )


def _optimizer_facts(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> OptimizerFacts:
    name = type(optimizer).__name__
    of_all, of_largest = update.temporaries_of(optimizer, dtype)
    try:
        run_model.check_shardable(name, fused=bool(optimizer.param_groups[0].get("fused")))
        whole = False
    except UsageError:
        whole = True
    return OptimizerFacts(name, of_all, of_largest, needs_whole_matrices=whole)
