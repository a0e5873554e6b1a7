"""Checks of whether a training is the same however it is spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lockstep.verify import compare
from lockstep.verify.experiments import ExperimentFailed, Experiments
from lockstep.verify.recorder import Recording
from lockstep.verify.result import CheckResult, fault, not_shown, passed

_EXPECTED = {
    "broadcast",
    "allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
}  # buffers, and what is sharded
_ONE_RANK = "one rank has none to be compared with; give --nproc 2 or more"


def probe(bench: Experiments) -> CheckResult:
    """One batch through every rank after some steps gives the same loss, bit for bit."""
    if bench.nproc == 1:
        return not_shown(_ONE_RANK)
    probes = bench.undisturbed()[0].probes
    for step, losses in sorted(probes.items()):
        if any(loss != losses[0] for loss in losses):
            rank = next(rank for rank, loss in enumerate(losses) if loss != losses[0])
            head = next(head for head in losses[0] if losses[rank][head] != losses[0][head])
            values = [float.fromhex(losses[place][head]) for place in (0, rank)]
            apart = abs(values[0] - values[1])
            text = f"after step {step} the {head} of one batch is {values[0]:.9g} on rank 0 and {values[1]:.9g} on rank {rank}"
            return fault(text, value=apart, bound=0.0, what="difference of the losses of one batch")
    return passed(
        f"one batch has the same loss on {bench.nproc} ranks after steps {', '.join(map(str, sorted(probes)))}",
        value=0.0,
        bound=0.0,
    )


def replicas(bench: Experiments) -> CheckResult:
    """Parameters, buffers and optimizer state are bit-identical on all ranks after every step; of shards, there is one whole copy."""
    if bench.nproc == 1:
        return not_shown(_ONE_RANK)
    seen = bench.undisturbed()
    for step in sorted(seen[0].digests):
        differing = _differing(seen, step)
        if differing:
            name, ranks = differing[0]
            text = f"{name} differs between ranks {ranks[0]} and {ranks[1]} since step {step}, with {len(differing) - 1} other tensors"
            return fault(text, value=float(len(differing)), bound=0.0, what="tensors that differ")
        lacking = _lacking(seen, step)
        if lacking:
            return fault(
                f"the ranks hold no whole copy of {lacking} after step {step}",
                value=1.0,
                bound=0.0,
                what="tensors that are not whole",
            )
    tensors, steps = len(seen[0].shapes), len(seen[0].digests)
    how = "one whole copy between the ranks" if seen[0].sharded else "the same on all ranks"
    return passed(
        f"{tensors} tensors are {how} after each of {steps} steps", value=0.0, bound=0.0, what="tensors that differ"
    )


def _differing(seen: list[Recording], step: int) -> list[tuple[str, tuple[int, int]]]:
    """Tensors of which two ranks hold the same rows with other values; with a pair of ranks."""
    found: dict[str, tuple[int, int]] = {}
    first: dict[tuple[str, int, int], tuple[int, int]] = {}
    for rank, one in enumerate(seen):
        for name, (start, rows, value) in one.digests.get(step, {}).items():
            owner, known = first.setdefault((name, start, rows), (rank, value))
            if value != known:
                found.setdefault(name, (owner, rank))
    return list(found.items())


def _lacking(seen: list[Recording], step: int) -> str | None:
    """A tensor some rows of which no rank holds, or that some rank knows nothing of."""
    shapes = {name: shape for one in seen for name, shape in one.shapes.items()}
    for name in dict.fromkeys(name for one in seen for name in one.digests.get(step, {})):  # state may appear later
        shape, held = shapes[name], [one.digests.get(step, {}).get(name) for one in seen]
        if None in held:
            return name
        covered = 0
        for start, rows, _ in sorted(one for one in held if one is not None):
            covered = max(covered, start + rows) if start <= covered else covered
        if covered < (shape[0] if shape else 1):
            return name
    return None


def ranks(bench: Experiments) -> CheckResult:
    """One process and all ranks train the same model: losses and weights within what rounding explains."""
    if bench.nproc == 1:
        return not_shown(_ONE_RANK)
    return _same(bench, f"{bench.nproc}-ranks", bench.together, f"{bench.nproc} ranks")


def accumulation(bench: Experiments) -> CheckResult:
    """The same, where each rank cuts its share into several uneven micro-batches."""
    count = -(-bench.global_batch // (bench.small_micro * bench.nproc))
    return _same(
        bench,
        "accumulated",
        bench.accumulated,
        f"{bench.nproc} ranks, {count} micro-batches of up to {bench.small_micro}",
    )


def strategies(bench: Experiments) -> CheckResult:
    """The same, with DDP where the config says FSDP, and with FSDP where it says DDP."""
    if bench.nproc == 1:
        return not_shown("one rank shards nothing; give --nproc 2 or more")
    other = "fsdp" if bench.strategy == "ddp" else "ddp"
    config = bench.exact(batch__micro=None)
    config["parallel"]["strategy"] = other
    return _same(
        bench,
        other,
        lambda: bench.train(other, bench.nproc, config, bench.adjustment()),
        f"{bench.nproc} ranks with {other}",
    )


def elastic(bench: Experiments) -> CheckResult:
    """Stopped on some ranks and resumed on another number: the same samples, and weights within what rounding explains."""
    first, half = bench.nproc, bench.steps // 2
    second = first - 1 if first > 1 else 2
    if second > bench.most_ranks:
        return not_shown(_ONE_RANK)

    def run() -> list[Recording]:
        config = bench.exact(batch__micro=None)
        begun = bench.train("elastic", first, config, bench.adjustment(), stop_at=half)
        resumed = bench.train("elastic-resumed", second, config, bench.adjustment(), folder="elastic")
        consumed = [_consumed(begun if step < half else resumed, step) for step in range(bench.steps)]
        if consumed != [_consumed(bench.alone(), step) for step in range(bench.steps)]:
            raise ExperimentFailed(
                "elastic",
                f"after {first} ranks until step {half}, {second} ranks go on with other samples than one process",
            )
        return [replace(begun[0], entries=begun[0].entries[:half] + resumed[0].entries)]

    return _same(bench, "elastic", run, f"{first} ranks, then {second}")


def _consumed(seen: list[Recording], step: int) -> list[int]:
    return sorted(index for one in seen for at, _, indices in one.samples if at == step for index in indices)


def _same(bench: Experiments, folder: str, run: Callable[[], list[Recording]], words: str) -> CheckResult:
    """Compare a trial with the one on one process."""
    nature = bench.nature
    if nature.obstacle() is not None:
        return not_shown(str(nature.obstacle()))
    limit = bench.limit()
    try:
        seen = run()
    except ExperimentFailed as failed:
        if failed.refused:
            return not_shown(failed.error)
        raise
    apart = bench.apart(folder, seen)
    curves = {"one process": bench.alone()[0].losses, words: seen[0].losses}
    more = {
        "value": apart.largest,
        "bound": limit,
        "what": f"difference after {bench.steps} steps",
        "notes": nature.notes(),
        "curves": curves,
    }
    if compare.too_vague(limit):
        text = f"rounding alone moves the weights by {limit / 30:.2g} of what training does, so that a fault could hide in it; try fewer --steps"
        if apart.largest <= limit or not math.isfinite(limit):
            return not_shown(text, **more)
    if apart.missing:
        return fault(f"the models have other tensors: {', '.join(apart.missing[:5])}", **more)
    if not apart.largest <= limit:
        at = compare.first_apart(bench.alone()[0].losses, seen[0].losses, limit)
        since = f" since step {at + 1}" if at is not None else ""
        text = f"{words} train another model than one process: weights {apart.weights:.2g} apart (most in {apart.worst}), losses {apart.losses:.2g}{since}"
        return fault(f"{text}. {nature.diagnosis()}".rstrip(". "), **more)
    return passed(f"{words} and one process train the same model", **more)


def collectives(bench: Experiments) -> CheckResult:
    """Each gradient travels once per step, also under accumulation, and the host never waits for the device."""
    seen = bench.overheard()
    if not seen[0].talk:
        return not_shown(f"{bench.steps} steps are too few to look at one of them")
    # What is said about once a second, whether to stop, is not the step's: the quietest steps are looked at.
    quiet = [min(one.talk.values(), key=lambda talk: len(talk.small) + len(talk.others)) for one in seen]
    elements = sum(math.prod(shape) for shape in seen[0].trainable.values())
    if seen[0].sharded:  # rows are padded to a multiple of the ranks that share them
        elements = sum(
            -(-shape[0] // bench.nproc) * bench.nproc * math.prod(shape[1:]) for shape in seen[0].trainable.values()
        )
    reduced, small = sum(quiet[0].reductions), len(quiet[0].small)
    micros = -(-bench.global_batch // (bench.small_micro * bench.nproc))
    waits = sorted({place for one in seen for talk in one.talk.values() for place, ours in talk.waits if ours})
    theirs = sorted({place for one in seen for talk in one.talk.values() for place, ours in talk.waits if not ours})
    notes = [f"the task itself makes the host wait for the device, at {', '.join(theirs[:3])}"] if theirs else []
    words = f"{len(quiet[0].reductions)} reductions of {reduced:,} elements in a step of {micros} micro-batches, for {elements:,} parameters"
    more = {
        "value": reduced / elements if bench.nproc > 1 else 0.0,
        "bound": 1.0,
        "what": "times that each gradient travels",
        "notes": notes,
    }
    if (
        bench.config["precision"] == "fp16" and waits
    ):  # GradScaler must know whether a step overflowed, and waits for that alone
        waits = [place for place in waits if place not in [one for one in waits if one.startswith("step.py:")][:3]]
        notes.append("fp16: the loss scaler waits for the device once per step, to know whether the step overflowed")
    if bench.hybrid:
        return not_shown("within groups and between them, gradients travel twice; only one of both is counted", **more)
    if bench.nproc > 1 and reduced != elements:
        return fault(words, **more)
    if small > 2:
        return fault(
            f"{small} small reductions in a step; counting its units takes one, the norm of sharded gradients one",
            **more,
        )
    strange = sorted({one for talk in quiet for one in talk.others} - _EXPECTED)
    if strange:
        return fault(f"ranks meet in every step for {', '.join(strange)}, which no step needs", **more)
    most = max(talk.broadcast for talk in quiet)
    if most > seen[0].buffer_bytes * micros:
        return fault(f"{most:,} bytes are broadcast in every step, where buffers have {seen[0].buffer_bytes:,}", **more)
    if waits:
        return fault(f"the host waits for the device in every step, at {', '.join(waits[:3])}", **more)
    return passed(words + "; no host synchronisation", **more)
