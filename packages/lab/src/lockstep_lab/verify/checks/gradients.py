"""Does the optimizer get the right gradients? They must equal plain torch's, and be reduced once per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.core.errors import number_of
from lockstep.core.parallel import single
from lockstep.updates.players import Player
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.compare import SAFETY, is_too_large
from lockstep_lab.verify.experiments import ExperimentRunner
from lockstep_lab.verify.recorder import RecorderOptions, Recording
from lockstep_lab.verify.reference import order, schedule
from lockstep_lab.verify.reference.gradient import GradientComparison
from lockstep_lab.verify.result import CheckResult, fault, not_shown, passed

_ROUNDINGS = 1000.0
_BACKWARD = f"{Path(single.__file__).name}:"  # the file that runs the backward pass
_EPSILON_64, _EPSILON_32 = 2.0**-52, 2.0**-23
_EXPECTED_COLLECTIVES = {  # of buffers, and of sharded parameters
    "broadcast",
    "allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
}


def gradients(experiments: ExperimentRunner) -> CheckResult:
    """Every trainable parameter gets plain torch's gradient, clipped as configured, at the scheduled learning rate."""
    learned, probe = experiments.learned(1), experiments.probe()
    complaints = _wrong_norms(learned[0], experiments) + _wrong_learning_rates(learned[0], experiments)
    complaints += _wrong_updates(experiments) + _wrong_modules(learned) + _endless_warmup(experiments)
    if probe.collectives:  # uneven micro-batches would not fit the loss
        return fault("; ".join(complaints)) if complaints else not_shown(str(probe.obstacle()))
    comparisons = experiments.accumulated()[0].gradients
    worst = max(
        comparisons.values(),
        key=lambda one: math.inf if math.isnan(one.difference) else one.difference / _bound(one, probe.epsilon),
        default=None,
    )
    if worst is None:
        if complaints or learned[0].grad_norms:
            few = "no step whose gradients were to be compared has a valid unit"
            return fault("; ".join(complaints)) if complaints else not_shown(few)
        return fault("training made no update")
    bound = _bound(worst, probe.epsilon)
    more = {
        "value": worst.difference,
        "bound": bound,
        "what": "difference from plain torch's gradient",
        "notes": probe.notes() + probe.remarks,
    }
    obstacle, cause = probe.obstacle(), ""
    if obstacle is None and worst.difference <= bound and is_too_large(bound):
        obstacle = f"rounding may change the gradient by {bound:.2g}, which could hide a fault"
        obstacle += probe.precision()
    if obstacle is None and not worst.difference <= bound:
        complaints.append(
            f"the gradient differs from plain torch's: {worst.difference:.2g} off, {worst.ratio:.6g} times as long, "
            f"most in {worst.worst}"
        )
        cause = experiments.cut() or probe.diagnosis()
    drawn = probe.random_without_dropout and not (probe.unrepeatable() or probe.random_in_collate)
    if drawn and probe.is_no_sum:  # for draws that were the same for each sample
        complaints.append("the loss of a batch is not the sum over its samples")
        cause = probe.diagnosis()
    if complaints:
        return fault("; ".join(complaints), cause, **more)
    if obstacle is not None:
        return not_shown(obstacle, **more)
    return passed(
        f"equal to plain torch's in {number_of(len(comparisons), 'step')}; in "
        f"{number_of(len(learned[0].grad_norms), 'step')} "
        "finite, "
        f"and nonzero for each of {number_of(len(learned[0].trainable), 'trainable parameter')}{probe.precision()}"
        f"{probe.own_gradients()}",
        **more,
    )


def _bound(comparison: GradientComparison, epsilon: float) -> float:
    """The largest difference of two gradients that rounding explains.

    A model may amplify rounding, for example by dividing by small deviations. So the change caused by reordering the
    samples counts as well.
    """
    rounding = _ROUNDINGS * max(comparison.epsilon, epsilon) * max(1.0, comparison.condition)
    return max(rounding, SAFETY * comparison.noise)


def _wrong_norms(recording: Recording, experiments: ExperimentRunner) -> list[str]:
    """Complaints about norms that are not finite, are zero, or differ from the logged norms, after clipping."""
    logged = {
        int(entry["step"]) - 1: entry["train/grad_norm"] for entry in recording.entries if "train/grad_norm" in entry
    }
    clip = experiments.config["optim"]["clip_norm"]
    for step, norm in recording.grad_norms:
        if not math.isfinite(norm) or norm == 0:
            return [f"the gradient's norm is {norm:g} at step {step + 1}"]
        expected = min(logged.get(step, norm), clip if clip is not None else math.inf)
        if abs(norm - expected) > 1e-3 * expected:
            return [
                f"at step {step + 1} the optimizer got a gradient of norm {norm:.6g}, "
                f"after {expected:.6g} was logged (clipped to {clip})"
            ]
    return []


def _wrong_learning_rates(recording: Recording, experiments: ExperimentRunner) -> list[str]:
    """Complaints about learning rates that are not the schedule's."""
    config = experiments.short_config(train__steps=experiments.learning_steps)
    optim, total, batch = config["optim"], experiments.learning_steps, experiments.global_batch
    length = experiments.epoch_length(True)
    steps_per_epoch = order.steps_per_epoch(length, batch, drop_last=config["data"]["drop_last"])
    base = optim["lr"] * schedule.scaled_lr(optim, batch)
    # The last parameter group, whose rates are recorded, may have its own rate.
    has_own_rates = any(group.get("lr") for group in optim["groups"])
    has_own_rates = has_own_rates or recording.own_rates
    if not has_own_rates and not math.isclose(recording.base_lr, base, rel_tol=1e-9):
        return [
            f"the base learning rate is {recording.base_lr:.6g}; lr {optim['lr']:g} scaled to a global batch "
            f"of {batch} is {base:.6g}"
        ]
    for place, (updates, rate, base_lr) in enumerate(() if recording.own_rates else recording.learning_rates):
        factor = schedule.factor(config["schedule"], place, total=total, steps_per_epoch=steps_per_epoch)
        if updates != place or not math.isclose(rate, base_lr * factor, rel_tol=1e-9, abs_tol=1e-15):
            return [
                f"update {place + 1} was made with a learning rate of {rate:.6g}; "
                f"the schedule says {base_lr * factor:.6g}"
            ]
    skipped = int(recording.entries[-1].get("train/skipped", 0)) if recording.entries else 0
    # A step without units makes no update and has no loss, so losses do not count steps.
    steps, updates = len(recording.samples), len(recording.learning_rates)
    if updates != steps - skipped:
        return [f"{steps} steps, {skipped} of them skipped, made {updates} updates"]
    return []


def _endless_warmup(experiments: ExperimentRunner) -> list[str]:
    """A complaint if the whole training, as configured, is shorter than its warm-up."""
    config, length = experiments.config, experiments.epoch_length(False)
    train, curve = config["train"], config["schedule"]
    steps_per_epoch = order.steps_per_epoch(length, experiments.global_batch, drop_last=config["data"]["drop_last"])
    total = train["steps"] or max(math.ceil((train["epochs"] or 1) * steps_per_epoch), train["min_steps"] or 0)
    warmup = schedule.warmup_updates(curve, int(curve["total_steps"] or total))
    if warmup < max(total, 2):
        return []
    return [f"the warm-up never ends: it has {number_of(warmup, 'update')}, and the training has {total}"]


def _wrong_updates(experiments: ExperimentRunner) -> list[str]:
    """Complaints about updates, averages or frozen parameters that differ from torch.optim and train.unfreeze."""
    (recording,) = experiments.one_process()
    epsilon = _EPSILON_64 if experiments.probe().float64 else _EPSILON_32
    moved = max(recording.moved, 1e-30)
    name = experiments.config["optim"]["name"]
    return [
        f"{kind} differ from those of a new torch.optim.{name}: {difference / moved:.2g} of what training moved"
        for kind, difference in recording.reference_differences.items()
        if not difference <= _ROUNDINGS * epsilon * moved
    ] + recording.wrongly_trainable[:1]


def _wrong_modules(recordings: list[Recording]) -> list[str]:
    """Complaints about modules in a wrong mode, and parameters without gradient."""
    complaints = []
    steps = [step for recording in recordings for step in recording.steps_in_eval_mode]
    if steps:
        complaints.append(f"the model was in evaluation mode in step {min(steps) + 1}")
    wrong = next((recording.wrong_modes for recording in recordings if recording.wrong_modes), [])
    if wrong:
        names = f"{', '.join(wrong[:5])}{' and others' if len(wrong) > 5 else ''}"
        complaints.append(f"when training began, modules were not in the mode that model.train() sets: {names}")
    unused = [name for name in recordings[0].unused if all(name in recording.unused for recording in recordings)]
    if unused:
        complaints.append(
            f"{number_of(len(unused), 'trainable parameter')} got only zero gradients in "
            f"{len(recordings[0].losses)} steps: "
            f"{', '.join(unused[:5])}"
        )
    return complaints


def collectives(experiments: ExperimentRunner) -> CheckResult:
    """Each gradient is reduced once per step, also under accumulation, and the host never waits for the device."""
    if experiments.probe().collectives:
        return not_shown(str(experiments.probe().obstacle()))
    recordings = _record_communication(experiments)
    first, nproc = recordings[0], experiments.nproc
    if not first.communication:
        return not_shown(
            f"{number_of(experiments.steps, 'step', 'is', 'are')} too few to record the collectives of one step"
        )
    # The step with the fewest collectives has only the necessary ones.
    quietest = [
        min(recording.communication.values(), key=lambda step: len(step.own_reductions) + len(step.other_collectives))
        for recording in recordings
    ]
    elements, reduced = _elements(first, nproc, experiments.probe().players), sum(quietest[0].reductions)
    micro_batches = -(-experiments.global_batch // (experiments.small_micro_batch * nproc))
    waits, notes = _host_waits(recordings, experiments)
    without = " with parallel.tensor=1" if experiments.groups < nproc else ""  # a mesh also exchanges activations
    without += " without virtual ranks" if experiments.config["parallel"]["virtual_ranks"] else ""
    text = (
        f"{number_of(len(quietest[0].reductions), 'reduction')} of {reduced:,} elements "
        f"in a step of {micro_batches} micro-batches{without}, "
        f"for {elements:,} parameters"
    )
    more: dict[str, Any] = {
        "value": reduced / elements if nproc > 1 else 0.0,
        "bound": 1.0,
        "what": "times that each gradient is reduced",
        "notes": notes,
    }
    if experiments.hybrid_sharding:
        return not_shown(
            "gradients are reduced within groups of ranks and between groups, but only one of the two is counted",
            **more,
        )
    if nproc > 1 and reduced != elements:
        return fault(text, **more)
    integers = sum(quietest[0].reductions_of_integers)
    expected = len(first.trainable) if experiments.config["parallel"]["find_unused_parameters"] else 0
    if integers > expected:
        return fault(f"{integers:,} integers are reduced in every step, but only {expected:,} are needed", **more)
    own_reductions = len(quietest[0].own_reductions)
    gathers = experiments.probe().gathers
    if own_reductions > 2 + gathers:
        return fault(
            f"{own_reductions} small reductions in a step; "
            "counting units takes one, and the norm of sharded gradients another",
            **more,
        )
    unexpected = sorted({name for step in quietest for name in step.other_collectives} - _EXPECTED_COLLECTIVES)
    unexpected = [name for name in unexpected if not (gathers and name == "allgather")]
    if unexpected:
        return fault(f"every step makes unnecessary collectives: {', '.join(unexpected)}", **more)
    broadcast = max(step.broadcast_bytes for step in quietest)
    if broadcast > first.buffer_bytes * micro_batches:
        return fault(
            f"{broadcast:,} bytes are broadcast in every step, but buffers have {first.buffer_bytes:,} bytes", **more
        )
    if waits:
        return fault(f"the host waits for the device in every step, at {', '.join(waits[:3])}", **more)
    return passed(f"{text}; no host synchronisation", **more)


def _record_communication(experiments: ExperimentRunner) -> list[Recording]:
    """Train on all ranks with several micro-batches each, without logging, so that steps do only what they need."""
    config = experiments.short_config(
        batch__micro=experiments.small_micro_batch, log__every_steps=experiments.steps, train__unfreeze=[]
    )
    config["parallel"] |= {"tensor": 1, "virtual_ranks": None}
    return experiments.train(
        "communication",
        experiments.nproc,
        config,
        changes=TaskChanges(train_samples=4 * experiments.global_batch),
        record=RecorderOptions(communication_steps=tuple(range(2, experiments.steps - 1))),
        keep=False,
    )


def _elements(recording: Recording, nproc: int, players: Sequence[Player] = ()) -> int:
    """Gradient elements that a step must reduce, if only alternating optimizers that update every step update."""
    names = {name: recording.names.get(name, [name]) for name in recording.trainable}
    in_turn = [
        name for one in players if one.every == 1 for name in names if one.owns(names[name]) for _ in range(one.updates)
    ]
    shapes = [recording.trainable[name] for name in (in_turn if players else recording.trainable)]
    if not recording.sharded:
        return sum(math.prod(shape) for shape in shapes)
    # Rows are padded to a multiple of the ranks that share them.
    return sum(-(-shape[0] // nproc) * nproc * math.prod(shape[1:]) for shape in shapes)


def _host_waits(recordings: list[Recording], experiments: ExperimentRunner) -> tuple[list[str], list[str]]:
    """The places at which the package waits for the device, and notes about waits that are not faults."""
    # At its first turn, an alternating optimizer checks its gradients.
    first = max((player.every for player in experiments.probe().players), default=0)
    steps = [step for one in recordings for number, step in one.communication.items() if number >= first]
    waits = {wait for step in steps for wait in step.host_waits}
    by_package = sorted(place for place, in_package in waits if in_package)
    by_task = sorted(place for place, in_package in waits if not in_package)
    notes = [f"the task itself makes the host wait for the device at {', '.join(by_task[:3])}"] if by_task else []
    if experiments.config["precision"] == "fp16" and by_package:
        # GradScaler must know whether a step overflowed, and waits only for that.
        by_scaler = [place for place in by_package if place.startswith("step.py:")][:3]
        by_package = [place for place in by_package if place not in by_scaler]
        notes.append("fp16: the loss scaler waits for the device once per step, to know whether the step overflowed")
    if experiments.config["parallel"]["find_unused_parameters"] and by_package:
        by_backward = [place for place in by_package if place.startswith(_BACKWARD)][:1]
        by_package = [place for place in by_package if place not in by_backward]
        notes.append(
            "find_unused_parameters: DDP waits for the device in each step, to know which parameters were used"
        )
    return by_package, notes
