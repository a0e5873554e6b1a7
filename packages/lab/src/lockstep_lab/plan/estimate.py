"""From facts and a setting to bytes, operations and seconds: arithmetic without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.core.errors import UsageError
from lockstep.core.parallel import virtual
from lockstep.core.schedule import scaled_lr
from lockstep_lab.plan.inputs import ModelFacts, ParameterFacts, PassFacts, PrecisionName, Segment, Setting

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one GPU, of the rank that needs the most.

    Each part is given at its largest. The parts do not peak at the same time, so `peak_bytes` may be less than their
    sum. `at_peak` has the parts at one moment; their sum is `peak_bytes`.
    """

    parameters_bytes: int
    """Parameters and buffers, as they are stored."""
    gradients_bytes: int
    optimizer_bytes: int
    averages_bytes: int
    """Moving averages of the weights (EMA)."""
    activations_bytes: int | None
    """Tensors that the backward pass needs, and temporary tensors. None: unknown, as the model cannot be traced."""
    communication_bytes: int
    """Gathered parameters, and buffers of collectives."""
    batch_bytes: int
    peak_bytes: int
    """Without activations, if they are unknown."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """Bytes by part (the names above without `_bytes`) at the moment of the peak."""
    peak_is_in: str = ""
    """Where the peak is: `forward`, `backward` or `update`."""
    host_bytes: int = 0
    """Bytes in one rank's host memory: offloaded tensors."""

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients, optimizer state and averages: everything that does not depend on the batch."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.averages_bytes


class Traffic(NamedTuple):
    """Collectives of one kind in a step, in one of the GPU's groups."""

    group: str
    """`tensor`, `shard`, `replicate`; `all` for all GPUs of a training without shards, and for buffers."""
    collective: str
    """`all_reduce`, `all_gather`, `all_to_all`, `reduce_scatter` or `broadcast`."""
    times: int | None
    """How many there are. None: torch decides."""
    bytes: float
    """Of the whole tensors that are reduced, gathered, scattered or sent, in all of these collectives."""
    ranks: int
    """Ranks of the group."""
    span: int
    """GPUs from the first rank of the group to its last, if nodes are filled in the order of ranks."""
    on_node: int
    """Ranks of the group that share a node."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that a GPU sends in rings of NCCL: (n-1)/n of the data for a gather, a scatter or an exchange of all
        with all, and twice that for a reduction (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
        """
        share = (self.ranks - 1) / self.ranks
        return self.bytes * {"broadcast": 1, "all_reduce": 2 * share}.get(self.collective, share)


@dataclass(frozen=True)
class CommunicationEstimate:
    """The bytes that one GPU sends in a step."""

    traffic: list[Traffic]
    seconds: float | None
    """Time at the bandwidths of the setting. None: they are unknown."""

    @property
    def sent_bytes(self) -> dict[str, int]:
        """By collective."""
        kinds = dict.fromkeys(each.collective for each in self.traffic)
        return {kind: round(sum(t.sent_bytes for t in self.traffic if t.collective == kind)) for kind in kinds}

    @property
    def total_bytes(self) -> int:
        """Over all collectives."""
        return sum(self.sent_bytes.values())


@dataclass(frozen=True)
class Estimate:
    """The needs of a training in a setting."""

    setting: Setting
    memory: MemoryEstimate
    communication: CommunicationEstimate
    flops_per_sample: float | None
    """Forward and backward pass, without recomputation."""
    flops_per_step: float | None
    """Of the whole global batch, over all GPUs, without recomputation."""
    compute_seconds: float | None
    """Passes of a step, at the stated utilisation, with recomputation. None: the GPU's throughput is unknown."""
    step_seconds: float | None
    """The longer of computing and communicating, as if they overlapped fully."""
    epoch_seconds: float | None
    training_seconds: float | None
    steps_per_epoch: int | None
    samples_per_epoch: int | None
    effective_batch: int
    learning_rate: float
    """Scaled for the effective batch by the config's rule."""
    checkpoint_bytes: int

    def fits(self, reserve: float = 0.1) -> bool | None:
        """True if the peak leaves `reserve` of the GPU's memory free. None: memory or activations are unknown."""
        limit = self.setting.world.memory_bytes
        if limit is None:
            return None
        if self.memory.peak_bytes > limit * (1 - reserve):
            return False
        return True if self.memory.activations_bytes is not None else None


def estimate(facts: ModelFacts, setting: Setting) -> Estimate:
    """The needs of the training of `facts` in `setting`. Pure: the same arguments give the same result.

    Raises:
        UsageError: the strategy cannot train with this optimizer, or there are no blocks to recompute.
    """
    _check(facts, setting)
    memory = memory_of(facts, setting)
    communication = _communication(facts, setting)
    flops = facts.flops_per_sample
    per_step = None if flops is None else flops * setting.effective_batch * setting.tensor
    compute = _compute_seconds(facts, setting)
    step = None
    if compute is not None and communication.seconds is not None:
        step = max(compute, communication.seconds)
    rounded = math.floor if facts.drop_last else math.ceil
    steps = None if facts.samples is None else max(1, rounded(facts.samples / setting.effective_batch))
    epoch = None if step is None or steps is None else step * steps
    total_steps = facts.steps
    if steps and facts.epochs:
        total_steps = max(math.ceil(steps * facts.epochs), facts.min_steps)
    whole = [(p, p.elements * p.cut_over) for p in facts.parameters]
    states = sum(size * p.state_element_bytes + p.state_other_bytes for p, size in whole if p.trainable)
    parameters = sum(p.saved * size * p.element_bytes for p, size in whole) + facts.buffers_bytes
    averages = sum(_average_bytes(p) * p.cut_over for p in facts.parameters) if facts.averages else 0
    return Estimate(
        setting=setting,
        memory=memory,
        communication=communication,
        flops_per_sample=flops,
        flops_per_step=per_step,
        compute_seconds=compute,
        step_seconds=step,
        epoch_seconds=epoch,
        training_seconds=None if step is None or total_steps is None else step * total_steps,
        steps_per_epoch=steps,
        samples_per_epoch=facts.samples,
        effective_batch=setting.effective_batch,
        learning_rate=scaled_lr(
            facts.learning_rate,
            facts.lr_scaling,
            global_batch=setting.effective_batch,
            reference_batch=facts.reference_batch,
        ),
        checkpoint_bytes=round(parameters + states + averages),
    )


def _check(facts: ModelFacts, setting: Setting) -> None:
    if setting.is_sharded and facts.optimizer.needs_whole_matrices:
        what, where = f"{facts.optimizer.name} cannot train sharded parameters", f"strategy {setting.strategy}"
        raise UsageError(what, where=where, remedy="use AdamW or SGD, or ddp")
    if setting.recompute and not facts.blocks:
        remedy = "name them in parallel.shard_modules"
        raise UsageError("the model has no repeated blocks", where="recompute", remedy=remedy)


# ---- memory


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the tensors that a strategy keeps or gathers, by unit: a block, or None for the root."""

    gathered: dict[int | None, int]
    """Parameters of a unit, gathered."""
    reduced: dict[int | None, int]
    """Gradients of a unit, as they are reduced."""
    sharded: dict[int | None, int]
    """Gradients of a unit, on one rank."""


def memory_of(facts: ModelFacts, setting: Setting) -> MemoryEstimate:
    """Bytes of one GPU. For the lifetime of each tensor, see lockstep --explain plan."""
    shards = setting.shards
    trainable = [p for p in facts.parameters if p.trainable]
    local = {p.name: p.elements_per_rank(shards) for p in facts.parameters}
    parameters = sum(local[p.name] * p.element_bytes for p in facts.parameters)
    gradients = sum(local[p.name] * p.element_bytes for p in trainable)
    optimizer = round(sum(local[p.name] * p.state_element_bytes + p.state_other_bytes for p in trainable))
    averages = round(sum(_average_bytes(p) * local[p.name] / max(1, p.elements) for p in facts.parameters))
    averages = averages if facts.averages else 0
    on_gpu = {"parameters": parameters + facts.buffers_bytes, "optimizer": optimizer, "averages": averages}
    host = 0
    if setting.offload:
        host = parameters + gradients + optimizer + averages
        on_gpu = {"parameters": facts.buffers_bytes, "optimizer": 0, "averages": 0}
    passes = pass_of(facts, setting)
    batch = passes.batch.at(setting.micro_batch) if passes else 0
    if setting.accumulate > 1:  # the next micro-batch is copied ahead
        batch *= 2
    found: list[tuple[str, dict[str, int]]]
    segments = passes.segments if passes else (_UNKNOWN,)
    if setting.is_sharded:
        sizes = _sizes(facts, setting)
        found = [(s.phase, _sharded_moment(facts, setting, s, gradients, sizes)) for s in segments]
        found.append(("backward", _last_reduction(facts, setting, gradients, sizes)))
    else:
        found = [(s.phase, _whole_moment(setting, s, gradients)) for s in segments]
    moments = [(phase, {**on_gpu, **parts, "batch": batch}) for phase, parts in found]
    elements = sum(local[p.name] for p in trainable)
    largest = max((local[p.name] for p in trainable), default=0)
    update_facts = (facts.optimizer_of_fp16 if setting.precision == "fp16" else None) or facts.optimizer
    temporary = update_facts.temporary_element_bytes * elements + update_facts.temporary_largest_bytes * largest
    kept = 0 if setting.offload else gradients
    update = {"gradients": kept, "activations": 0 if setting.offload else round(temporary), "communication": 0}
    is_ddp = setting.strategy == "ddp" and setting.world.gpus > 1 and not setting.is_sharded
    if is_ddp and setting.virtual_ranks:
        update["communication"] = round(_received(setting) * gradients)
    elif is_ddp and not setting.gradient_as_bucket_view:
        update["communication"] = gradients
    moments.append(("update", {**on_gpu, **update, "batch": batch}))
    phase, at_peak = max(moments, key=lambda moment: sum(moment[1].values()))
    most = {part: max(moment[part] for _, moment in moments) for part in at_peak}
    return MemoryEstimate(
        parameters_bytes=on_gpu["parameters"],
        gradients_bytes=kept,
        optimizer_bytes=on_gpu["optimizer"],
        averages_bytes=on_gpu["averages"],
        activations_bytes=most["activations"] if passes else None,
        communication_bytes=most["communication"],
        batch_bytes=batch,
        peak_bytes=sum(at_peak.values()),
        at_peak=at_peak,
        peak_is_in=phase,
        host_bytes=host,
    )


_UNKNOWN = Segment("backward")


def pass_of(facts: ModelFacts, setting: Setting) -> PassFacts | None:
    """The traced passes of a setting. None: they are unknown."""
    precision: PrecisionName = "bf16" if setting.precision == "fp16" else setting.precision
    found = None
    if setting.is_sharded and setting.param_dtype:
        found = facts.passes.get((precision, setting.recompute, setting.param_dtype))
    return found or facts.passes.get((precision, setting.recompute, None))


def _whole_moment(setting: Setting, segment: Segment, gradients: int) -> dict[str, int]:
    """single, ddp: each rank has all parameters."""
    samples, is_ddp = setting.micro_batch, setting.strategy == "ddp" and setting.world.gpus > 1
    if setting.virtual_ranks and setting.virtual_ranks > 1:
        return {
            "gradients": _in_tree(setting) * gradients,
            "activations": segment.activations.at(samples) + segment.casts.at(samples),
            "communication": round((1 + _received(setting)) * gradients) if is_ddp else 0,
        }
    # Buckets hold the gradients and always exist. Passes without reduction add up gradients in their own tensors,
    # which the last pass copies into the buckets.
    is_beside = setting.accumulate > 1 or (is_ddp and setting.gradient_as_bucket_view)
    has_copies = is_ddp and (setting.accumulate > 1 or not setting.gradient_as_bucket_view)
    return {
        "gradients": gradients if is_beside or segment is _UNKNOWN else segment.gradients.at(samples),
        "activations": segment.activations.at(samples) + segment.casts.at(samples),
        "communication": gradients if has_copies else 0,
    }


def _in_tree(setting: Setting) -> int:
    """Sums of gradients that a GPU keeps at most, with that of the virtual rank in progress. 0 without virtual ranks.

    A GPU with one virtual rank keeps none beyond its buckets, to which gradients go as they come.
    """
    most, gpus, count = 0, setting.world.gpus, setting.virtual_ranks or 0
    for rank in range(gpus if count else 0):
        numbers = virtual.held(rank, gpus, count)
        kept = [len(virtual.nodes_of(range(numbers.start, number), count)) for number in numbers]
        most = max(most, max(kept) + (len(numbers) > 1))
    return most


def _received(setting: Setting) -> float:
    """Virtual ranks on several GPUs: whole gradients that a GPU has received in the exchange."""
    return sum(_subtrees(setting)) / setting.world.gpus


def _subtrees(setting: Setting) -> list[int]:
    """Virtual ranks: the number of subtrees that each GPU sends."""
    gpus, count = setting.world.gpus, setting.virtual_ranks or 1
    return [len(virtual.nodes_of(virtual.held(rank, gpus, count), count)) for rank in range(gpus)]


def _sizes(facts: ModelFacts, setting: Setting) -> _Sizes:
    shards = setting.shards
    gathered: dict[int | None, int] = {}
    reduced: dict[int | None, int] = {}
    sharded: dict[int | None, int] = {}
    for p in facts.parameters:
        mine = p.elements_per_rank(shards)
        gathered[p.block] = gathered.get(p.block, 0) + gathered_bytes(p, setting)
        if p.trainable:
            reduced[p.block] = reduced.get(p.block, 0) + mine * shards * _reduce_bytes(p, setting)
            sharded[p.block] = sharded.get(p.block, 0) + mine * p.element_bytes
    return _Sizes(gathered, reduced, sharded)


def gathered_bytes(parameter: ParameterFacts, setting: Setting) -> int:
    """Bytes of a parameter that FSDP has gathered, including the rows that pad the shards."""
    element = _BYTES[setting.param_dtype] if setting.param_dtype else parameter.element_bytes
    return parameter.elements_per_rank(setting.shards) * setting.shards * element


def _reduce_bytes(parameter: ParameterFacts, setting: Setting) -> int:
    if setting.reduce_dtype:
        return _BYTES[setting.reduce_dtype]
    return 4 if setting.param_dtype else parameter.element_bytes


def _sharded_moment(
    facts: ModelFacts, setting: Setting, segment: Segment, gradients: int, sizes: _Sizes
) -> dict[str, int]:
    """fsdp, hybrid: the root stays gathered, and one block while it runs, with buffers around it.

    In the forward pass, the buffer of an all-gather is kept until the next block is gathered. In the backward pass, the
    next block is gathered ahead, and the input of a reduction is kept until the next one.

    Args:
        gradients: bytes of all gradients of a rank.
    """
    samples, gathered, block = setting.micro_batch, sizes.gathered, segment.block
    last = facts.stay_from + facts.ends[1] - 1
    root = gathered.get(None, 0)
    unsharded, given, waiting = 0, 0, 0
    if segment is _UNKNOWN:
        around = gathered.get(last, 0) * 2
    elif segment.phase == "forward":
        current = block if block is not None else segment.before
        around = gathered.get(block, 0) if block is not None else 0
        stay_from = facts.stay_from if setting.reshard_after_forward else 0
        if current is not None and current >= stay_from:
            around = sum(gathered.get(other, 0) for other in range(stay_from, current + 1))
        around += gathered.get(current, 0) if setting.shards > 1 else 0  # a copy, and not a buffer
    else:
        current = block if block is not None else segment.before
        following = last if current is None else current - 1
        around = gathered.get(block, 0) if block is not None else 0
        if not setting.reshard_after_forward:
            around = sum(gathered.get(other, 0) for other in range(following + 1)) + around
        elif following >= 0 and setting.shards > 1:  # copies are not made ahead
            around += gathered.get(following, 0)
        done = last + 1 if current is None else current if block is None else current + 1
        waiting = sizes.reduced.get(done, 0)
        given = sum(sizes.sharded.get(other, 0) for other in range(done, last + 1))
    gradient_bytes = segment.gradients_of_block.at(samples)
    if setting.accumulate > 1 and setting.reduce_each_micro_batch:  # the sum of earlier micro-batches
        given = gradients
    elif setting.accumulate > 1:  # without reduction, gradients stay whole until the last micro-batch
        gradient_bytes, given = 0, 0
        unsharded = (_in_tree(setting) or 1) * sum(sizes.reduced.values())
    casts = 0 if setting.param_dtype == setting.precision else segment.casts.at(samples)
    kept = 0 if setting.offload else (gradients if segment is _UNKNOWN else given)
    return {
        "gradients": kept + unsharded,
        "activations": segment.activations.at(samples) + casts,
        "communication": root + around + waiting + gradient_bytes,
    }


def _last_reduction(facts: ModelFacts, setting: Setting, gradients: int, sizes: _Sizes) -> dict[str, int]:
    """fsdp, hybrid: at the end of the backward pass, the gradients of the root and of embeddings are reduced."""
    units = [sizes.reduced.get(unit, 0) for unit in (None, *range(facts.ends[0]))]
    # On a mesh also: a copy of each gradient that is not sharded, and all of them in one tensor.
    communication = max(sum(units) + max(units), 2 * _uncut_bytes(facts, setting) if setting.tensor > 1 else 0)
    return {"gradients": 0 if setting.offload else gradients, "activations": 0, "communication": communication}


def _average_bytes(parameter: ParameterFacts) -> int:
    return parameter.saved * parameter.elements * max(4, parameter.element_bytes)


# ---- communication and time


def _communication(facts: ModelFacts, setting: Setting) -> CommunicationEstimate:
    """The collectives of a step, and their time. The units of the loss and the norm (8 bytes each) are left out."""
    traffic = list(_traffic(facts, setting))
    seconds: float | None = 0.0 if setting.tensor == 1 or pass_of(facts, setting) else None
    for each in traffic:
        bandwidth = setting.world.bandwidth(each.span, each.on_node)
        seconds = None if bandwidth is None or seconds is None else seconds + each.sent_bytes / bandwidth
    return CommunicationEstimate(traffic, seconds)


def _traffic(facts: ModelFacts, setting: Setting) -> Iterator[Traffic]:
    world, gpus, shards, tensor = setting.world, setting.world.gpus, setting.shards, setting.tensor
    if gpus == 1:
        return
    on_node = min(gpus, world.gpus_per_node) // tensor  # tensor groups, or GPUs
    if facts.buffers_bytes:
        yield Traffic("all", "broadcast", None, facts.buffers_bytes, gpus, gpus, on_node * tensor)
    if not setting.is_sharded:
        trainable = sum(p.elements * p.element_bytes for p in facts.parameters if p.trainable)
        if setting.virtual_ranks:  # with one subtree on each GPU, together the traffic of an all-reduce
            yield Traffic("all", "all_to_all", None, max(_subtrees(setting)) * trainable, gpus, gpus, on_node)
            yield Traffic("all", "all_gather", None, trainable, gpus, gpus, on_node)
            return
        yield Traffic("all", "all_reduce", None, trainable, gpus, gpus, on_node)
        return
    sizes, units = _sizes(facts, setting), facts.stay_from if setting.reshard_after_forward else 0
    reduced = sum(sizes.reduced.values())
    if shards > 1:
        group = (shards, shards * tensor, min(shards, on_node))
        passes, times = setting.accumulate, setting.accumulate if setting.reduce_each_micro_batch else 1
        # Blocks are gathered before they run in either pass. The root and the last layers stay gathered.
        gathered = [size for unit, size in sizes.gathered.items() for _ in range(1 + (unit in range(units)))]
        yield Traffic("shard", "all_gather", passes * len(gathered), passes * sum(gathered), *group)
        if setting.virtual_ranks:
            yield Traffic("shard", "all_to_all", len(sizes.reduced), max(_subtrees(setting)) * reduced, *group)
        else:
            yield Traffic("shard", "reduce_scatter", times * len(sizes.reduced), times * reduced, *group)
    if (replicas := setting.replicas) > 1:
        group = (replicas, gpus, max(1, on_node // shards))
        yield Traffic("replicate", "all_reduce", len(sizes.reduced), reduced / shards, *group)
    if tensor > 1:
        traced, times = pass_of(facts, setting), setting.accumulate
        for kind, (count, size) in traced.exchanged.items() if traced else ():
            yield Traffic("tensor", kind, times * count, times * size.at(setting.micro_batch), tensor, tensor, tensor)
        yield Traffic("tensor", "all_reduce", 1, _uncut_bytes(facts, setting), tensor, tensor, tensor)


def _uncut_bytes(facts: ModelFacts, setting: Setting) -> int:
    """Gradients of one rank that a tensor group averages: those of parameters that are not sharded."""
    uncut = (p for p in facts.parameters if p.trainable and p.cut_over == 1)
    return sum(p.elements_per_rank(setting.shards) * p.element_bytes for p in uncut)


def _compute_seconds(facts: ModelFacts, setting: Setting) -> float | None:
    peaks = setting.world.peak_flops
    if facts.flops_per_sample is None or not peaks or not peaks.get(setting.precision):
        return None
    flops = facts.flops_per_sample + ((facts.recomputed_flops_per_sample or 0) if setting.recompute else 0)
    return flops * setting.micro_batch * setting.accumulate / (peaks[setting.precision] * setting.world.utilisation)
