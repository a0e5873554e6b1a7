"""Rules on the memory of a run: too little, unused, or uneven between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lockstep.core.errors import number_of
from lockstep_lab.plan.run_figures import MIB, Advice, Figures

_UNEVEN = 1.2  # the largest peak of a rank, relative to the smallest
_UNEVEN_MIB = 64
_USED, _MUCH_FREE = 0.9, 0.5  # fractions of the device's memory
_PARTS = ("parameters", "gradients", "optimizer", "activations", "other", "evaluation")


def _uneven(figures: Figures) -> Iterator[Advice]:
    peaks = figures.by_rank("memory/peak_mb", latest=True)
    if len(peaks) < 2:
        return
    most, least = max(peaks, key=lambda rank: peaks[rank]), min(peaks, key=lambda rank: peaks[rank])
    more = peaks[most] - peaks[least]
    if peaks[most] < _UNEVEN * peaks[least] or more < _UNEVEN_MIB:
        return
    parts = {part: figures.by_rank(f"memory/{part}_mb", latest=True) for part in _PARTS}
    differences = {part: by_rank[most] - by_rank[least] for part, by_rank in parts.items() if by_rank}
    part = max(differences, key=lambda name: differences[name], default="")
    where, note = "spread over several parts, before training, or in saving", ""
    if part and differences[part] > more / 2:
        where, note = f"mostly in {part}", _REMEDIES[part]
    yield Advice(
        name="memory by rank",
        finding=f"Rank {most} needs {more:,.0f} MiB more than rank {least}, {where}",
        source=f"memory/peak_mb/rank{most} {peaks[most]:,.0f}, rank{least} {peaks[least]:,.0f}"
        + (f"; memory/{part}_mb {parts[part][most]:,.0f} and {parts[part][least]:,.0f}" if note else ""),
        changes=(),
        gain=f"{more:,.0f} MiB less on the rank that limits the micro-batch, if ranks were even",
        note=note,
    )


_BLOCKS = "parallel.shard_modules chooses the blocks that fsdp shards: smaller blocks balance better"
_REMEDIES = {
    "parameters": _BLOCKS,
    "gradients": _BLOCKS,
    "optimizer": _BLOCKS,
    "activations": "samples of uneven size make unequal batches: use data.group_by_length=50 for data with lengths, or "
    "crop and pad samples",
    "other": "something other than training holds memory there: data that the task loads, or another process",
    "evaluation": "metrics or outputs are kept until the end of an evaluation: keep sums instead",
}


def _accumulation(figures: Figures) -> Iterator[Advice]:
    limit, peak, activations = figures.device_memory, _peak(figures), figures.metrics.last("memory/activations_mb")
    if not limit or peak is None or not activations or figures.halved:
        return
    fixed, micro, now = peak - activations, figures.micro_batch, figures.accumulation
    fits = int((_USED * limit / MIB - fixed) / activations * micro)
    wished = min(fits, figures.per_rank)
    passes = -(-figures.per_rank // max(1, wished))
    source = f"memory/peak_mb {peak:,.0f} of {limit / MIB:,.0f} MiB, memory/activations_mb {activations:,.0f} for a "
    source += f"micro-batch of {micro}"
    if now > 1 and passes < now:
        # Micro-batches of equal size.
        wished = -(-figures.per_rank // passes)
        key = f"batch.micro={wished}" if passes > 1 else "batch.micro=null"
        yield Advice(
            name="accumulation",
            finding=f"A step has {now} forward passes of {micro} samples, but memory suffices for "
            f"{passes if passes > 1 else 'a single pass'} of {wished}",
            source=source,
            changes=(key,),
            gain=f"each step saves {number_of(now - passes, 'pass')}. The log does not show how much time that "
            "saves: most if micro-batches are short",
            note="the same training; assumes that activations grow with the micro-batch",
        )
    elif now == 1 and peak * MIB < _MUCH_FREE * limit and (figures.late("train/mfu") or 1.0) < 0.3:
        yield Advice(
            name="small batches",
            finding=f"{1 - peak * MIB / limit:.0%} of the GPU's memory is free, and its compute units are not busy",
            source=f"{source}; train/mfu {figures.late('train/mfu'):.2f}",
            changes=(f"batch.global={figures.global_batch * max(2, fits // max(1, micro))}",),
            gain="larger matrix products; the log does not show how much faster they are",
            note="The key changes the training: start a new run, and scale the learning rate (optim.lr_scaling)",
        )


def _unneeded_savings(figures: Figures) -> Iterator[Advice]:
    """Recomputation, offloading and sharding that the memory does not require."""
    limit, peak = figures.device_memory, _peak(figures)
    if not limit or peak is None:
        return
    limit_mib = limit / MIB
    wait = figures.late("train/wait_share") or 0.0
    source = f"memory/peak_mb {peak:,.0f} of {limit_mib:,.0f} MiB"
    if figures.key("compute.activation_checkpointing") is True and peak < _MUCH_FREE * limit_mib:
        share = 0.25 * (1 - wait) * figures.training_share
        yield Advice(
            name="recomputation",
            finding="Activations are computed twice, although half of the memory is free",
            source=f"compute.activation_checkpointing=true; {source}",
            changes=("compute.activation_checkpointing=false",),
            gain=f"up to {share:.0%} less time: three passes instead of four",
            saves_share=share,
            note="the log does not show the memory of activations then: try it; a step that does not fit is split",
        )
    states = [figures.metrics.last(f"memory/{part}_mb") for part in ("parameters", "gradients", "optimizer")]
    known = [part for part in states if part is not None]
    if figures.strategy != "fsdp" or len(known) < len(states) or figures.key("parallel.cpu_offload"):
        return
    shards = figures.number("parallel.shard_ranks") or figures.world
    whole = peak + (shards - 1) * sum(known)
    if whole < _USED * limit_mib:
        yield Advice(
            name="sharding",
            finding=f"The whole model would fit on each GPU: {whole:,.0f} of {limit_mib:,.0f} MiB",
            source=f"{source}; parameters, gradients and optimizer {sum(known):,.0f} MiB, which are 1 / {shards}",
            changes=("parallel.strategy=ddp",),
            gain="two thirds of the exchanged bytes: ranks exchange only gradients",
            note="the same training",
        )


def _shortage(figures: Figures) -> Iterator[Advice]:
    halved = figures.halved
    if not halved:
        return
    after, before = halved
    yield Advice(
        name="out of memory",
        finding=f"Out of memory: micro-batches were reduced from {before} to {number_of(after, 'sample')}",
        source="micro.json",
        changes=(f"batch.micro={after}",),
        gain="a new run on this machine starts with what fits; this run already remembers it",
        note="for larger micro-batches: compute.activation_checkpointing=true, precision=bf16, or "
        "parallel.strategy=fsdp",
    )


def _peak(figures: Figures) -> float | None:
    """MiB of the rank that needs the most."""
    return figures.metrics.last("memory/peak_mb")


RULES: tuple[Callable[[Figures], Iterator[Advice]], ...] = (_uneven, _accumulation, _unneeded_savings, _shortage)
