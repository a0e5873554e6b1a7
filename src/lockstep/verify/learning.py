"""Checks of whether anything is learned, and from what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.engine.schedule import Schedule, scaled_lr
from lockstep.verify import trial
from lockstep.verify.adjusted import Adjustment
from lockstep.verify.bench import Bench, TrialFailed
from lockstep.verify.outputs import least_loss
from lockstep.verify.plain import predict_by_hand
from lockstep.verify.trivial import Trivial, trivial
from lockstep.verify.verdict import Verdict, fault, not_shown, passed
from lockstep.verify.witness import Seen

_SIGNIFICANT = -2.6  # of a slope's t statistic: chance alone gives less once in 200 trials
_NEAR_ZERO = 0.05
_TINY = 8
_SHOWN = 64
_ROUNDINGS = 1000.0
_EPSILON_64, _EPSILON_32 = 2.0**-52, 2.0**-23


def loss(bench: Bench) -> Verdict:
    """Loss falls: its slope over steps is negative beyond chance, and it does not explode on the way."""
    for factor in (1, bench.patience):
        curve = bench.learned(factor)[0].losses
        slope = t_of_slope(curve)
        if slope < _SIGNIFICANT:
            break
    first = sum(curve[: max(3, len(curve) // 10)]) / max(3, len(curve) // 10)
    highest = max(curve[len(curve) // 4 :])
    more = {"value": slope, "bound": _SIGNIFICANT, "what": "t of the loss's slope", "curves": {"loss": curve}}
    path = f"{curve[0]:.4g} to {curve[-1]:.4g} in {len(curve)} steps"
    if not all(map(math.isfinite, curve)):
        return fault(f"the loss is not finite: {path}", **more)
    if not slope < _SIGNIFICANT:
        known: Trivial = bench.ask("trivial", 1, trivial, bench.natural(), 512)
        if not known.obstacle and max(curve) < 0.5 * known.values["loss"]:
            return not_shown(
                f"the loss neither falls nor is there much to fall: {path}, where a constant output has {known.values['loss']:.4g}",
                **more,
            )
        return fault(f"the loss does not fall: {path}; look at the gradients, the labels and optim.lr", **more)
    if highest - first > abs(first):
        return fault(
            f"the loss oscillates wildly: {path}, up to {highest:.4g} on the way; lower optim.lr or set optim.clip_norm",
            **more,
        )
    return passed(f"falls from {path}", **more)


def t_of_slope(curve: Sequence[float]) -> float:
    """Slope of the least-squares line through a curve, divided by its standard error; 0 for a flat or very short curve."""
    count = len(curve)
    if count < 4 or not all(map(math.isfinite, curve)):
        return 0.0
    centre, level = (count - 1) / 2, sum(curve) / count
    spread = sum((place - centre) ** 2 for place in range(count))
    slope = sum((place - centre) * (value - level) for place, value in enumerate(curve)) / spread
    rest = sum((value - level - slope * (place - centre)) ** 2 for place, value in enumerate(curve)) / (count - 2)
    error = math.sqrt(rest / spread)
    return slope / error if error > 0 else math.copysign(math.inf, slope) if slope else 0.0


def metric(bench: Bench) -> Verdict:
    """Evaluation is better than that of the best constant output, found on the training labels of this very data."""
    known: Trivial = bench.ask("trivial", 1, trivial, bench.natural(), 512)
    if known.obstacle:
        return not_shown(known.obstacle)
    values = known.values
    for factor in (1, bench.patience):
        bench.learned(factor)
        folder = str(bench.folder / f"learned-{factor}")
        after = bench.ask(
            f"evaluated-{factor}", bench.nproc, trial.evaluate, bench.natural(), folder, Adjustment(eval_part=2000)
        )
        better = [one for one in known.directed if known.is_better(one, after[one], values[one])]
        if after["loss"] < values["loss"] and (better or not known.directed):
            break
    what = known.directed[0] if known.directed else "loss"
    rows = [
        {
            "metric": one,
            "before": known.before.get(one),
            "after": after.get(one),
            "best constant output": values.get(one),
        }
        for one in values
    ]
    more = {"value": after[what], "bound": values[what], "what": what, "rows": rows}
    losses = f"loss {after['loss']:.4g} against {values['loss']:.4g} after {bench.learning_steps * factor} steps"
    fell = t_of_slope(bench.learned(factor)[0].losses) < _SIGNIFICANT
    if fell and all(math.isclose(after[one], known.before[one], rel_tol=1e-5) for one in values):
        return fault(
            f"the evaluation after training gives what the untrained model gave, though the loss fell: {what} {after[what]:.4g}",
            **more,
        )
    if not after["loss"] < values["loss"]:
        return fault(f"no better than a constant output: {losses}", **more)
    if known.directed and not better:
        same = all(math.isclose(after[one], values[one], rel_tol=1e-3, abs_tol=1e-6) for one in known.directed)
        text = f"better than a constant output in {losses}, but {what} is {after[what]:.4g} against {values[what]:.4g}"
        return (
            not_shown(text, **more)
            if same
            else fault(f"{text}: look at Task.predict, update_metrics and metrics", **more)
        )
    return passed(
        f"{what} {after[what]:.4g}, best constant output {values[what]:.4g}, before training {known.before[what]:.4g}",
        **more,
    )


def overfit(bench: Bench) -> Verdict:
    """A tiny fixed set of training samples can be learned by heart."""
    how = Adjustment(exact=True, part=_TINY, plain=True)
    least = bench.ask("least-loss", 1, least_loss, bench.natural(), how)
    for factor in (1.0, 10.0, 0.1):
        config = bench.natural(
            train__steps=bench.learning_steps * bench.patience,
            batch__global=_TINY,
            batch__micro=None,
            train__unfreeze=[],
        )
        decay = config["optim"]["weight_decay"]
        config["schedule"] = {"name": "constant"}
        config["optim"] |= {"lr": config["optim"]["lr"] * factor, "lr_scaling": "none", "weight_decay": decay and 0.0}
        try:
            curve = bench.train(f"overfit-{factor:g}", bench.nproc, config, how, until=(_NEAR_ZERO, least), keep=False)[
                0
            ].losses
        except TrialFailed as failed:  # such as a loss that explodes with ten times the learning rate
            if factor == 1.0 or failed.refused:
                raise
            continue
        left = (min(curve) - least) / (curve[0] - least) if curve[0] > least else 0.0
        if left <= _NEAR_ZERO:
            break
    more = {
        "value": left,
        "bound": _NEAR_ZERO,
        "what": "loss left of that of the first step",
        "curves": {f"loss, optim.lr x {factor:g}": curve},
    }
    if least > 0.01 * curve[0]:
        more["notes"] = [
            f"no output whatever has a loss below {least:.4g} on these samples; the loss is counted from there"
        ]
    if left <= _NEAR_ZERO:
        return passed(f"{_TINY} samples learned by heart in {len(curve)} steps, with optim.lr x {factor:g}", **more)
    text = f"{_TINY} samples cannot be learned by heart in {len(curve)} steps, with optim.lr x 1, x 10 or x 0.1"
    return fault(f"{text}: labels that contradict each other, a dead part, or too small a model", **more)


def gradients(bench: Bench) -> Verdict:
    """What the optimizer gets: the gradient of plain torch, clipped, at the scheduled learning rate, for every trainable parameter."""
    learned, exact = bench.learned(), bench.accumulated()
    wrong = _wrong_norms(learned[0], bench) + _wrong_rates(learned[0], bench) + _wrong_updates(bench)
    if any(seen.modes for seen in learned):
        step = min(step for seen in learned for step in seen.modes)
        wrong.append(f"the model was in evaluation mode in step {step + 1}")
    misled = next((seen.misled for seen in learned if seen.misled), [])
    if misled:
        named = f"{', '.join(misled[:5])}{' and others' if len(misled) > 5 else ''}"
        wrong.append(f"when training began, modules were not in the mode that model.train() gives them: {named}")
    dead = [one for one in learned[0].unused if all(one in seen.unused for seen in learned)]
    if dead:
        wrong.append(
            f"{len(dead)} trainable parameters got no gradient other than zero in {len(learned[0].losses)} steps: {', '.join(dead[:5])}"
        )
    updates = exact[0].updates
    far = max(
        updates.values(), key=lambda one: math.inf if math.isnan(one.difference) else one.difference, default=None
    )
    if far is None:
        return fault("; ".join([*wrong, "no update was made"]))
    bound = _ROUNDINGS * far.epsilon * max(1.0, far.condition)
    more = {
        "value": far.difference,
        "bound": bound,
        "what": "difference from plain torch's gradient",
        "notes": bench.nature.notes(),
    }
    if bench.nature.obstacle() is None and not far.difference <= bound:
        text = f"the gradient is not plain torch's: {far.difference:.2g} off, {far.ratio:.6g} times as long, most in {far.worst}"
        wrong.append(f"{text}. {bench.nature.diagnosis()}".rstrip(". "))
    if wrong:
        return fault("; ".join(wrong), **more)
    if bench.nature.obstacle() is not None:
        return not_shown(str(bench.nature.obstacle()), **more)
    return passed(
        f"as plain torch's in {len(updates)} steps; finite and for all {len(learned[0].trainable)} trainable parameters in {len(learned[0].norms)}",
        **more,
    )


def _wrong_norms(seen: Seen, bench: Bench) -> list[str]:
    """Norms that are not finite, zero, or not what was logged after clipping."""
    logged = {int(entry["step"]) - 1: entry["train/grad_norm"] for entry in seen.entries if "train/grad_norm" in entry}
    clip = bench.config["optim"]["clip_norm"]
    for step, norm in seen.norms:
        if not math.isfinite(norm) or norm == 0:
            return [f"the gradient's norm is {norm:g} at step {step + 1}"]
        expected = min(logged.get(step, norm), clip if clip is not None else math.inf)
        if abs(norm - expected) > 1e-3 * expected:
            return [
                f"at step {step + 1} the optimizer got a gradient of norm {norm:.6g}, after {expected:.6g} was logged (clipped to {clip})"
            ]
    return []


def _wrong_rates(seen: Seen, bench: Bench) -> list[str]:
    """Learning rates that are not the schedule's."""
    config = bench.natural(train__steps=seen.stop)
    schedule = Schedule(total=seen.stop, steps_per_epoch=seen.steps_per_epoch, **config["schedule"])
    optim = config["optim"]
    base = scaled_lr(
        optim["lr"], optim["lr_scaling"], global_batch=bench.global_batch, reference_batch=optim["reference_batch"]
    )
    own = any(group.get("lr") for group in optim["groups"])  # the last group may be one of these
    if not own and not math.isclose(seen.base_lr, base, rel_tol=1e-9):
        return [
            f"the base learning rate is {seen.base_lr:.6g}; lr {optim['lr']:g} scaled to a global batch of {bench.global_batch} is {base:.6g}"
        ]
    for place, (updates, rate, base_lr) in enumerate(seen.rates):
        if updates != place or not math.isclose(rate, base_lr * schedule(updates), rel_tol=1e-9, abs_tol=1e-15):
            return [
                f"update {place + 1} was made with a learning rate of {rate:.6g}; the schedule says {base_lr * schedule(place):.6g}"
            ]
    skipped = int(seen.entries[-1].get("train/skipped", 0)) if seen.entries else 0
    if len(seen.rates) != len(seen.losses) - skipped:
        return [f"{len(seen.losses)} steps, of which {skipped} were skipped, made {len(seen.rates)} updates"]
    return []


def _wrong_updates(bench: Bench) -> list[str]:
    """Where weights, averages or what trains are not what torch.optim and train.unfreeze make of the same gradients."""
    (seen,) = bench.alone()
    allowed = _ROUNDINGS * (_EPSILON_64 if bench.nature.double else _EPSILON_32) * max(seen.moved, 1e-30)
    name = bench.config["optim"]["name"]
    off = {kind: apart for kind, apart in seen.followed.items() if not apart <= allowed}
    words = [
        f"{kind} are not those of a new torch.optim.{name}: {apart / max(seen.moved, 1e-30):.2g} of what training moved"
        for kind, apart in off.items()
    ]
    return words + seen.wrongly[:1]


def predictions(bench: Bench) -> Verdict:
    """Samples with the top prediction and the truth: on all ranks those of a plain loop, and not all alike where their truths differ."""
    bench.learned()
    known: Trivial = bench.ask("trivial", 1, trivial, bench.natural(), 512)
    if known.no_data or known.no_predict:
        return not_shown("there is no evaluation data" if known.no_data else "the task has no predict")
    if bench.nature.predicting:
        return not_shown(
            f"Task.predict draws random numbers ({', '.join(bench.nature.predicting[:3])}), others for each micro-batch"
        )
    how, folder = Adjustment(eval_part=_SHOWN), str(bench.folder / f"learned-{bench.last_factor}")
    rows = bench.ask("predicted-by-hand", 1, predict_by_hand, bench.natural(), folder, how)
    engine = bench.ask("predicted", bench.nproc, trial.predict, bench.natural(), folder, how)
    truths = {repr(row["truth"]) for row in rows}
    answers = [{key: value for key, value in row.items() if key not in ("truth", "probability")} for row in rows]
    different = {repr(one) for one in answers}
    more = {
        "value": float(len(different)),
        "what": f"different predictions of {len(rows)}",
        "rows": [{"sample": n} | row for n, row in enumerate(rows[:12])],
    }
    tolerance = 1e-3 if bench.config["precision"] == "fp32" else 5e-2
    off = [
        number for number, row in enumerate(rows) if len(engine) <= number or not _alike(row, engine[number], tolerance)
    ]
    if len(off) > len(rows) // 20 or len(engine) != len(rows):  # a few may be on the edge between two classes
        first = off[0] if off else len(rows)
        text = (
            f"sample {first} alone is {rows[first]}, and {engine[first]} on {bench.nproc} ranks"
            if first < min(len(rows), len(engine))
            else ""
        )
        return fault(
            f"{len(off)} of {len(rows)} predictions, {len(engine)} made, are not those of a plain loop. {text}".rstrip(
                ". "
            ),
            **more,
        )
    if len(different) == 1 and len(truths) > 1:
        return fault(f"all {len(rows)} samples are predicted alike, though there are {len(truths)} truths", **more)
    return passed(
        f"{len(different)} different predictions for {len(rows)} samples with {len(truths)} different truths, as by a plain loop",
        **more,
    )


def _alike(plain: Any, other: Any, tolerance: float) -> bool:
    """Whether two descriptions of an output are the same, numbers to rounding; `truth` is in the first one alone."""
    if isinstance(plain, float) and isinstance(other, float):
        return math.isclose(plain, other, rel_tol=tolerance, abs_tol=tolerance) or (
            math.isnan(plain) and math.isnan(other)
        )
    if isinstance(plain, Mapping) and isinstance(other, Mapping):
        keys = plain.keys() - {"truth"}
        return keys == other.keys() and all(_alike(plain[key], other[key], tolerance) for key in keys)
    if isinstance(plain, list | tuple) and isinstance(other, list | tuple):
        return len(plain) == len(other) and all(map(_alike, plain, other, [tolerance] * len(plain)))
    return repr(plain) == repr(other)
