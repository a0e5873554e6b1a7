"""Checks of whether samples, results and state survive restarts, repetition and other numbers of ranks."""

from __future__ import annotations

import math
import random
import signal
from collections import Counter
from dataclasses import replace

from lockstep.data.order import StepPlan
from lockstep.verify import compare, trial
from lockstep.verify.adjusted import Adjustment
from lockstep.verify.bench import Bench
from lockstep.verify.plain import evaluate_by_hand
from lockstep.verify.ranks import Ended
from lockstep.verify.trial import Trial
from lockstep.verify.verdict import Verdict, fault, not_shown, passed
from lockstep.verify.witness import Seen, Watch

_PLANNED = 1_000_000


def samples(bench: Bench) -> Verdict:
    """Every sample exactly once per epoch, none shared between ranks, and those that seed, step and global batch alone determine."""
    seen = bench.undisturbed()
    length, config = seen[0].length, bench.config
    drop = config["data"]["drop_last"]
    plan = StepPlan(length, bench.global_batch, bench.global_batch, 1, config["seed"], drop)
    epochs: dict[int, Counter[int]] = {}
    more = {"value": 0.0, "bound": 0.0, "what": "samples lost, repeated or shared"}
    for step in range(bench.steps):
        by_rank = [indices for one in seen for at, _, indices in one.samples if at == step]
        used = Counter(index for indices in by_rank for index in indices)
        wanted, epoch = plan.indices(step)
        repeated = [index for index, count in used.items() if count > 1]
        more["value"] = float(len(repeated) + len(set(wanted.tolist()) ^ used.keys()))
        if repeated:
            owners = [rank for rank, indices in enumerate(by_rank) if repeated[0] in indices]
            return fault(
                f"step {step + 1} uses sample {repeated[0]} {used[repeated[0]]} times, on ranks {owners}", **more
            )
        lost, foreign = sorted(set(wanted.tolist()) - used.keys()), sorted(used.keys() - set(wanted.tolist()))
        if foreign or (lost and config["data"]["on_error"] == "raise"):
            text = f"step {step + 1} uses {len(used)} samples of {len(wanted)}; lost: {lost[:5] or 'none'}, of another step: {foreign[:5] or 'none'}"
            return fault(text, **more)
        epochs.setdefault(epoch, Counter()).update(used)
    for epoch in range(bench.steps // plan.steps_per_epoch):
        counts = epochs.get(epoch, Counter())
        whole = plan.steps_per_epoch * bench.global_batch if drop else length
        more["value"] = float(abs(whole - len(counts)) + sum(counts.values()) - len(counts))
        if (len(counts) != min(whole, length) and config["data"]["on_error"] == "raise") or max(counts.values()) > 1:
            return fault(
                f"epoch {epoch} uses {len(counts)} of {length} samples, some {max(counts.values())} times", **more
            )
    complete, planned = bench.steps // plan.steps_per_epoch, ""
    total, _ = bench.ask("sizes", 1, trial.sizes, bench.natural())
    if total <= _PLANNED:
        planned = f"; and one of all {total}, as planned"
        epoch_plan = StepPlan(total, bench.global_batch, bench.small_micro, bench.nproc, config["seed"], drop)
        chunks = (
            chunk
            for step in range(epoch_plan.steps_per_epoch)
            for rank in epoch_plan.by_rank(step)
            for chunk in rank
            if not chunk.filler
        )
        counts = Counter(index for chunk in chunks for index in chunk.indices)
        if max(counts.values()) > 1 or len(counts) != sum(map(epoch_plan.samples, range(epoch_plan.steps_per_epoch))):
            return fault(
                f"the plan of an epoch of all {total} samples has {len(counts)} of them, some {max(counts.values())} times",
                **more,
            )
    return passed(
        f"{complete} whole epochs of {length} samples on {bench.nproc} ranks, each sample once{planned}", **more
    )


def evaluation(bench: Bench) -> Verdict:
    """Every metric on all ranks is that of one process, and that of a plain loop without the engine.

    Where the evaluation draws random numbers, the plain loop draws others.
    """
    bench.undisturbed()
    if bench.ask("sizes", 1, trial.sizes, bench.natural())[1] == 0:
        return not_shown("there is no evaluation data")
    micro = max(1, min(int(bench.config["batch"]["micro"] or min(bench.global_batch, 256)), 16))
    config = bench.natural(batch__micro=micro)
    # A partial micro-batch at the end, and a number of micro-batches that the ranks cannot share evenly.
    how = Adjustment(eval_part=(2 * bench.nproc + 1) * micro + micro // 2 + 1)
    folder = str(bench.folder / "undisturbed")
    many = bench.ask("evaluated-together", bench.nproc, trial.evaluate, config, folder, how)
    one = bench.ask("evaluated-alone", 1, trial.evaluate, config, folder, replace(how, disturb=True))
    plain = bench.ask("evaluated-by-hand", 1, evaluate_by_hand, config, folder, how, micro)
    drawn = list(dict.fromkeys(bench.nature.evaluating + bench.nature.predicting))
    rows = [
        {
            "metric": key,
            f"{bench.nproc} ranks": many.get(key),
            "one process": one.get(key),
            "plain loop": plain.get(key),
        }
        for key in one | many
    ]
    worst, apart = "", 0.0
    compared = [many] if drawn else [many, plain]
    for key in {key for metrics in (one, *compared) for key in metrics}:
        for other in compared:
            a, b = one.get(key, math.nan), other.get(key, math.nan)
            both_nan = key in one and key in other and math.isnan(a) and math.isnan(b)
            off = (
                0.0
                if a == b or both_nan
                else abs(a - b) / max(abs(a), abs(b))
                if math.isfinite(a) and math.isfinite(b)
                else math.inf
            )
            if off > apart:
                worst, apart = key, off
    bound = 1e-6  # torchmetrics adds in float32; the losses are equal to the last bit
    more = {"value": apart, "bound": bound, "what": "largest relative difference of a metric", "rows": rows}
    if apart > bound:
        values = (
            f"{many.get(worst)} on {bench.nproc} ranks, {one.get(worst)} on one, {plain.get(worst)} by a plain loop"
        )
        return fault(f"{worst} is {values}", **more)
    text = f"{len(one) - 2} metrics over {one['samples']} samples are those of one process"
    if drawn:
        more["notes"] = [
            f"not compared with a plain loop: the evaluation draws random numbers ({', '.join(drawn[:3])})"
        ]
        return passed(text, **more)
    return passed(f"{text} and of a plain loop", **more)


def determinism(bench: Bench) -> Verdict:
    """The same run twice is the same to the last bit."""
    first, again = bench.undisturbed(), _again(bench)
    found = _first_difference(first, again)
    more = {"value": float(found is not None), "bound": 0.0, "what": "runs that differ"}
    if found is None:
        return passed(
            f"{bench.steps} steps on {bench.nproc} ranks, twice: every batch, loss and tensor the same", **more
        )
    step, text = found
    if " gets another batch " not in text:
        text += _first_operation(bench, step)
    return fault(text, **more)


def _again(bench: Bench) -> list[Seen]:
    return bench.train(
        "again", bench.nproc, bench.saving(), Adjustment(part=bench.part), Watch(digests=1, batches=True), keep=False
    )


def _first_difference(first: list[Seen], again: list[Seen]) -> tuple[int, str] | None:
    """(step counted from 0, words) of where two runs part."""
    for step in range(len(first[0].losses)):
        for rank, (one, other) in enumerate(zip(first, again, strict=True)):
            if one.batches.get(step) != other.batches.get(step):
                return step, (
                    f"rank {rank} gets another batch in step {step + 1} of a second run: reading or preparing a sample draws random numbers that "
                    "(seed, epoch, sample) do not determine, such as those of numpy.random.default_rng()"
                )
        if first[0].losses[step] != again[0].losses[step]:
            return (
                step,
                f"the loss of step {step + 1} is {first[0].losses[step]!r}, and {again[0].losses[step]!r} in a second run, on the same batch",
            )
        for rank, (one, other) in enumerate(zip(first, again, strict=True)):
            mine, theirs = one.digests.get(step + 1, {}), other.digests.get(step + 1, {})
            names = [key for key in mine if mine[key] != theirs.get(key)]
            if names:
                return (
                    step,
                    f"{names[0]} and {len(names) - 1} other tensors differ after step {step + 1} of a second run, on rank {rank}",
                )
    return None


def _first_operation(bench: Bench, step: int) -> str:
    """Which operation of a step gives other values on the same input."""
    runs = [
        bench.train(
            f"operations-{number}",
            bench.nproc,
            bench.saving(),
            Adjustment(part=bench.part),
            Watch(operations=step),
            stop_at=step + 1,
            keep=False,
        )
        for number in (1, 2)
    ]
    for rank, (one, other) in enumerate(zip(*runs, strict=True)):
        for place, (mine, theirs) in enumerate(zip(one.operations, other.operations, strict=False)):
            if mine != theirs:
                return f"; the first operation that differs is {mine[0]}, number {place + 1} of the step on rank {rank}"
    return "; every operation of the step was the same when it was run twice more, so it does not happen each time"


def resume(bench: Bench) -> Verdict:
    """Killed with SIGKILL at a random step and resumed: bit for bit the undisturbed run's weights and optimizer state.

    The resumed run has other states of the global generators around each step, and, of several loader workers, one less: what
    a run draws must depend on neither.
    """
    bench.undisturbed()
    every = max(1, bench.steps // 4)
    rank, step = random.randrange(bench.nproc), random.randrange(every + 1, bench.steps)
    one = Trial(
        "killed",
        bench.nproc,
        bench.saving(),
        str(bench.folder / "killed"),
        Adjustment(part=bench.part),
        kill=(rank, step),
    )
    answers = bench.ranks.run(bench.nproc, bench.wrap, trial.fit, one)
    killed = answers[rank]
    words = f"rank {rank} was killed after step {step}"
    if not isinstance(killed, Ended) or killed.exit_code != -signal.SIGKILL or killed.why:
        return fault(
            f"the run failed before it could be killed: {killed if isinstance(killed, Ended) else killed.error}"
        )
    before = compare.last_checkpoint(bench.folder / "killed")
    if before is None:
        return not_shown(f"{words}, before a checkpoint was written")
    workers = bench.config["data"]["workers"]
    config = bench.saving(data__workers=max(min(1, workers), workers - 1))
    seen = bench.train(
        "resumed", bench.nproc, config, Adjustment(part=bench.part), Watch(disturb=True), folder="killed"
    )
    mine, reference = (
        compare.last_checkpoint(bench.folder / "killed"),
        compare.last_checkpoint(bench.folder / "undisturbed"),
    )
    if mine is None or reference is None:
        return fault(f"{words}: the {'resumed' if reference else 'undisturbed'} run left no checkpoint")
    begun = seen[0].samples[0][0] if seen[0].samples else bench.steps
    lacking = [
        one for one in bench.undisturbed()[0].shapes if not one.startswith("buffer.") and one not in reference.index
    ]
    different = compare.differing(reference, mine)
    more = {"value": float(len(different)), "bound": 0.0, "what": "tensors that differ"}
    words += f", resumed from step {begun}"
    if begun != before.step or mine.step != bench.steps:
        return fault(
            f"{words}, though the newest checkpoint was of step {before.step}; it ended at step {mine.step} of {bench.steps}",
            **more,
        )
    if lacking:
        return fault(
            f"a checkpoint does not hold {lacking[0]} and {len(lacking) - 1} others, which are part of the training's state",
            **more,
        )
    if not different:
        lag = f" ({step - begun} steps done again)" if step > begun else ""
        return passed(f"{words}{lag}: weights and optimizer state bit-identical", **more)
    if _first_difference(bench.undisturbed(), _again(bench)) is not None:
        return not_shown("the same run twice already differs, see determinism", **more)
    text = f"{words}: {different[0]} and {len(different) - 1} others differ from the undisturbed run"
    return fault(
        f"{text}; either they were not restored, or something was drawn from a generator that nothing had seeded",
        **more,
    )
