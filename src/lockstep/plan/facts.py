"""Facts of a task, from its real model without memory and from traced passes."""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from lockstep import build
from lockstep.data.order import MicroBatchPlan, StepPlan
from lockstep.data.tensors import map_tensors
from lockstep.distributed.meta_init import take_values
from lockstep.distributed.precision import Precision
from lockstep.distributed.world import World as Ranks
from lockstep.engine import task_checks
from lockstep.engine.blocks import recompute_activations
from lockstep.errors import UsageError
from lockstep.plan import update
from lockstep.plan.model_facts import (
    Affine,
    ModelFacts,
    Moment,
    OptimizerFacts,
    ParameterFacts,
    PassFacts,
    Segment,
)
from lockstep.plan.setting import PrecisionName
from lockstep.plan.trace import Peak, TracedPass, TracedSegment, Untraceable, trace_pass

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.tasks.task import Task

_SIZES = (2, 8)  # samples of the micro-batches that are traced
_REAL_SIZES = (2, 4)  # the same, where tensors need values
_REAL_ELEMENTS = 150e6  # largest model, in parameters, whose passes are computed where they cannot be traced otherwise
_LAST = 2**60  # a step after all parameters are unfrozen
_CPU = torch.device("cpu")


class _Built(NamedTuple):
    forward: Any
    model: nn.Module
    blocks: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    notes: list[str]


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
    with tempfile.TemporaryDirectory() as folder, _quiet():
        build.seed_everything(config)
        task.setup(Path(folder), False)
        data = task_checks.data(task.train_data(), "Task.train_data")
        length = len(data)  # type: ignore[arg-type]
        batches = {n: _batch(config, task, data, n) for n in dict.fromkeys((*_SIZES, *_REAL_SIZES))}
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        built, notes = _build(task, config, fake, gpu=device == "cuda")
        notes += built.notes
        wanted = [(p, r) for r in sorted(recompute) for p in precisions if built.blocks or not r]
        traced: dict[tuple[PrecisionName, bool], tuple[TracedPass, TracedPass]] = {}
        sizes = _SIZES
        try:
            traced = _trace_all(built, wanted, _fakes(batches, fake, _SIZES), inside=fake, gpu=device == "cuda")
        except Untraceable as error:
            where = {"": "Task.loss", "model": "the model's own forward"}.get(error.module, f"module {error.module}")
            notes.append(f"the passes cannot be traced without values: {where}: {error}")
            elements = sum(parameter.numel() for parameter in built.model.parameters())
            if elements <= _REAL_ELEMENTS:
                sizes = _REAL_SIZES
                try:
                    real = _real(task, config, gpu=device == "cuda")
                    traced = _trace_all(real, wanted, {n: batches[n] for n in sizes}, inside=None, gpu=device == "cuda")
                    notes.append("they were computed on this machine instead, in small")
                except Untraceable as second:
                    notes.append(f"they cannot be computed here either: {second}. Activations are not known")
            else:
                notes.append("activations are not known")
    passes = {key: _pass_facts(*pair, sizes) for key, pair in traced.items()}
    plain = next((pair[1] for pair in traced.values()), None)
    of_block = {id(p): i for i, block in enumerate(built.blocks.values()) for p in block.parameters()}
    return ModelFacts(
        name=config.name,
        parameters=tuple(_parameter_facts(built, of_block)),
        blocks=tuple(built.blocks),
        buffers_bytes=sum(buffer.nbytes for buffer in built.model.buffers()),
        optimizer=_optimizer_facts(built),
        passes=passes,
        flops_per_sample=plain.flops / sizes[1] if plain else None,
        forward_flops_per_sample=plain.forward_flops / sizes[1] if plain else None,
        block_flops_per_sample=plain.block_flops / sizes[1] if plain else None,
        samples=length if has_data else None,
        global_batch=config.batch.global_ or 32,
        epochs=config.train.known_epochs,
        steps=config.train.steps,
        learning_rate=config.optim.lr,
        lr_scaling=config.optim.lr_scaling,
        reference_batch=config.optim.reference_batch,
        averages=config.train.ema_decay is not None,
        traced_samples=sizes,
        data=("samples of the training data" if has_data else "made-up samples") + _kind_of_samples(data),
        notes=notes,
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
    loader = build.make_loader(_on_one_rank(config), data, task, _alone(), training=True)
    epoch = max(0, (config.train.known_epochs or 1) - 1)  # in which pictures are largest, where their size changes
    plans = [MicroBatchPlan(tuple(order), epoch, False)]
    with contextlib.closing(loader.run(lambda: plans)) as micro_batches:
        return next(micro_batches).collated


def _alone() -> Ranks:
    return Ranks(rank=0, size=1, local_rank=0, device=_CPU)


def _on_one_rank(config: RunConfig) -> RunConfig:
    """The config of one process on the CPU, without what changes no byte that is traced here."""
    return config.model_copy(
        update={
            "device": "cpu",
            "data": config.data.model_copy(update={"workers": 0}),
            "parallel": config.parallel.model_copy(update={"strategy": "single", "cpu_offload": False}),
            "compute": config.compute.model_copy(
                update={
                    "compile": None,
                    "compile_mode": "default",
                    "activation_checkpointing": False,
                    "channels_last": False,
                }
            ),
        }
    )


def _build(task: Task, config: RunConfig, fake: FakeTensorMode, *, gpu: bool) -> tuple[_Built, list[str]]:
    """The model with tensors that have no values: made without values, or else made in full and emptied."""
    notes: list[str] = []
    cause: Exception | None = None
    for makes in (_without_values(fake), _on_meta()):
        try:
            with makes:
                model = task_checks.model(task)
            return _wrapped(task, config, _emptied(model, fake), fake, gpu=gpu), notes
        except Exception as error:
            cause = error
    gc.collect()
    model = task_checks.model(task)
    _check_not_lazy(model)
    kind = type(cause).__name__
    notes.append(f"the model cannot be made without values ({kind}), and was made in full on this machine")
    return _wrapped(task, config, _emptied(model, fake), fake, gpu=gpu), notes


def _check_not_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            what = f"the model is made lazily: {name} has no shape before the first forward pass"
            remedy = "give the layer its sizes, such as nn.Linear(10, 16) for nn.LazyLinear(16)"
            raise UsageError(what, where="Task.model", remedy=remedy)


@contextlib.contextmanager
def _without_values(fake: FakeTensorMode) -> Iterator[None]:
    with fake:
        yield


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def _emptied(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """The model with tensors of `fake` on the CPU, where it has others. Tied tensors stay tied."""
    take_values(model)
    made: dict[int, Tensor] = {}
    with fake:
        for module in model.modules():
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    holder[key] = made[id(tensor)]  # type: ignore[assignment]
    return model


def _real(task: Task, config: RunConfig, *, gpu: bool) -> _Built:
    build.seed_everything(config)
    return _wrapped(task, config, task_checks.model(task), None, gpu=gpu)


def _wrapped(task: Task, config: RunConfig, model: nn.Module, fake: FakeTensorMode | None, *, gpu: bool) -> _Built:
    """The model as a training wraps it, by the functions of a training."""
    alone = _on_one_rank(config)
    vars(task)["model"] = lambda: model
    vars(model)["to"] = lambda *_, **__: model  # it is there already, and torch cannot move tensors without values
    try:
        with fake or contextlib.nullcontext():
            built = build.build_model(alone, task, _alone(), steps_per_epoch=1, step=_LAST)
            fuses = gpu and config.precision != "fp16"
            optimizer = build.make_optimizer(alone, built.model, built.blocks, fuses_adam=fuses)
    finally:
        del vars(task)["model"], vars(model)["to"]
    if gpu:  # torch chooses these kernels on a GPU where nothing else is asked for
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
    notes = []
    if config.train.unfreeze:
        notes.append("train.unfreeze: this is the last phase, in which all its parameters train")
    if config.compute.compile:
        notes.append("compute.compile is not modelled: compiled code needs other temporary tensors, mostly fewer")
    if config.compute.channels_last:
        notes.append("compute.channels_last is not modelled: the bytes stay the same, but some kernels copy")
    blocks = {name: built.model.get_submodule(name) for name in built.blocks}
    return _Built(built.strategy.forward, built.model, blocks, optimizer, notes)


def _fakes(batches: dict[int, Any], fake: FakeTensorMode, sizes: Sequence[int]) -> dict[int, Any]:
    return {n: map_tensors(batches[n], lambda tensor: fake.from_tensor(tensor)) for n in sizes}


def _trace_all(
    built: _Built,
    wanted: Sequence[tuple[PrecisionName, bool]],
    batches: dict[int, Any],
    *,
    inside: FakeTensorMode | None,
    gpu: bool,
) -> dict[tuple[PrecisionName, bool], tuple[TracedPass, TracedPass]]:
    """The passes of micro-batches of two sizes, for each precision and with recomputation."""
    traced: dict[tuple[PrecisionName, bool], tuple[TracedPass, TracedPass]] = {}
    recomputes = False
    for precision, again in wanted:
        same: tuple[PrecisionName, bool] = ("bf16", again)
        if precision == "fp16" and same in traced:
            traced[precision, again] = traced[same]
            continue
        if again and not recomputes:
            recompute_activations(list(built.blocks.values()), _CPU)
            recomputes = True
        autocast: Callable[[], Any] = Precision("bf16" if precision == "fp16" else precision, _CPU).autocast
        with inside or contextlib.nullcontext():
            pair = [
                trace_pass(built.forward, batch, blocks=list(built.blocks.values()), autocast=autocast, as_on_gpu=gpu)
                for batch in batches.values()
            ]
        traced[precision, again] = (pair[0], pair[1])
    return traced


def _pass_facts(first: TracedPass, second: TracedPass, sizes: tuple[int, int]) -> PassFacts:
    pairs = _pairs(first.segments, second.segments)
    segments = [
        Segment(
            a.phase,
            a.block,
            a.before,
            alone=_moment(a.alone, b.alone, sizes),
            beside=_moment(a.beside, b.beside, sizes),
            of_block=_moment(a.of_block, b.of_block, sizes),
        )
        for a, b in pairs
    ]
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
        chosen = [max((s for s in side if s.phase == phase), key=lambda s: s.alone.total) for side in (first, second)]
        pairs.append((chosen[0], chosen[1]))
    return pairs


def _moment(a: Peak, b: Peak, sizes: tuple[int, int]) -> Moment:
    return Moment(
        activations=_affine(a.activations, b.activations, sizes),
        casts=_affine(a.casts, b.casts, sizes),
        gradients=_affine(a.gradients, b.gradients, sizes),
    )


def _affine(a: float, b: float, sizes: tuple[int, int]) -> Affine:
    slope = (b - a) / (sizes[1] - sizes[0])
    return Affine(a - slope * sizes[0], slope)


def _parameter_facts(built: _Built, of_block: dict[int, int]) -> Iterator[ParameterFacts]:
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


def _optimizer_facts(built: _Built) -> OptimizerFacts:
    name = type(built.optimizer).__name__
    dtype = next(p.dtype for p in built.model.parameters() if p.requires_grad)
    of_all, of_largest = update.temporaries_of(built.optimizer, dtype)
    try:
        build.check_shardable(name, fused=bool(built.optimizer.param_groups[0].get("fused")))
        whole = False
    except UsageError:
        whole = True
    return OptimizerFacts(name, of_all, of_largest, needs_whole_matrices=whole)
