"""Does the training learn anything? The loss falls, and metrics improve."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lockstep.core.errors import number_of
from lockstep_lab.verify import worker_functions
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.experiments import ExperimentRunner
from lockstep_lab.verify.recorder import Recording
from lockstep_lab.verify.result import CheckResult, fault, not_shown, passed

_SIGNIFICANT_T = -2.6  # of the slope of a loss; by chance, t is smaller once in 200 trainings
_FEWEST_EPOCHS, _T_OF_EPOCHS = 6, -10.0  # of later epochs against the first; by chance once in 200 trainings
_NO_LOSS = 1e-3  # of the untrained model's loss
_LEAST_FALL = 0.01  # of the first epoch's mean: less may be rounding
_EVAL_SAMPLES = 2000
_TOO_FEW_EVAL_SAMPLES = 20  # by chance, a good model may be worse than a constant on so few samples


def loss(experiments: ExperimentRunner) -> CheckResult:
    """The slope of the loss over steps is negative beyond chance, and the loss does not explode on the way."""
    if text := experiments.probe().need_not_fall():
        return not_shown(text)
    for factor in (1, experiments.patience):
        recording = experiments.learned(factor)[0]
        curve = recording.losses
        slope = _slope(curve)
        by_epoch = _means_of_epochs(curve, recording.steps_per_epoch)
        falls, highest = _falls(recording), max(curve[len(curve) // 4 :])
        is_wild = _is_wild(curve, by_epoch, recording.steps_per_epoch)
        if falls and not (is_wild and 0 < len(by_epoch) < _FEWEST_EPOCHS):  # more epochs may show that it is calm
            break
    more: dict[str, Any] = {
        "value": slope,
        "bound": _SIGNIFICANT_T,
        "what": "t of the loss's slope",
        "curves": {"loss": curve},
    }
    wanted = experiments.config["schedule"]["warmup_steps"]
    used = experiments.short_config(train__steps=len(curve))["schedule"]["warmup_steps"]
    more["notes"] = [f"the warm-up is shortened from {wanted} to {used} updates here"] if used < wanted else []
    path = f"{curve[0]:.4g} to {curve[-1]:.4g} in {len(curve)} steps"
    if not all(map(math.isfinite, curve)):
        return fault(f"the loss is not finite: {path}", **more)
    if not falls:
        baseline = experiments.baseline()
        if not baseline.obstacle and max(curve) < 0.5 * baseline.values.get("loss", -math.inf):
            return not_shown(
                f"the loss does not fall, but is already low: {path}; "
                f"the best constant output reaches {baseline.values['loss']:.4g}",
                **more,
            )
        return fault(f"the loss does not fall: {path}; check the gradients, the labels and optim.lr", **more)
    if is_wild:
        return fault(
            f"the loss oscillates wildly: {path}, up to {highest:.4g} on the way; "
            "lower optim.lr or set optim.clip_norm",
            **more,
        )
    if not slope < _SIGNIFICANT_T:
        more |= {"value": t_of_epochs(by_epoch), "bound": _T_OF_EPOCHS, "what": "t of the later epochs' mean losses"}
        path = f"{by_epoch[0]:.4g} to {by_epoch[-1]:.4g}, the means of {len(by_epoch)} epochs; steps differ more"
    return passed(f"falls from {path}", **more)


def _falls(recording: Recording) -> bool:
    """True if the loss falls beyond chance, from step to step or from epoch to epoch."""
    by_epoch = _means_of_epochs(recording.losses, recording.steps_per_epoch)
    return _slope(recording.losses) < _SIGNIFICANT_T or t_of_epochs(by_epoch) < _T_OF_EPOCHS


def _slope(curve: Sequence[float]) -> float:
    """The steeper fall of two: of the losses, and of their ranks, which single steps with a large loss do not move."""
    if not all(map(math.isfinite, curve)):
        return 0.0
    places = {loss: float(place) for place, loss in enumerate(sorted(curve))}
    return min(t_of_slope(curve), t_of_slope([places[loss] for loss in curve]))


def _means_of_epochs(curve: Sequence[float], steps_per_epoch: int) -> list[float]:
    """The mean losses of whole epochs, which have the same samples. Samples differ from step to step."""
    count = len(curve) // steps_per_epoch if steps_per_epoch else 0
    epochs = [curve[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch] for epoch in range(count)]
    return [sum(losses) / len(losses) for losses in epochs]


def _is_wild(curve: Sequence[float], by_epoch: Sequence[float], steps_per_epoch: int) -> bool:
    """True if a loss is more than twice that of the first steps later on, and so are the means of the epochs."""
    count = max(3, len(curve) // 10)
    first = sum(curve[:count]) / count
    usual = statistics.median(curve[: steps_per_epoch or 1])
    return max(curve[len(curve) // 4 :]) - first > abs(first) and not _are_calm(by_epoch, usual)


def _are_calm(means: Sequence[float], first: float) -> bool:
    """True if the epochs' mean losses never double, and end below `first`.

    Single steps may still be far apart: some have few samples, or units of a head that most steps lack.

    Args:
        first: the median loss of the steps of the first epoch.
    """
    enough = len(means) >= _FEWEST_EPOCHS and 0 < means[0] <= 5 * first
    return enough and max(means) <= 2 * means[0] and means[-1] < first


def t_of_epochs(means: Sequence[float]) -> float:
    """The fall of the epochs' mean losses from the first half to the second, in standard deviations; 0 if none."""
    later = means[len(means) // 2 :]
    if len(means) < _FEWEST_EPOCHS or not all(map(math.isfinite, means)):
        return 0.0
    fall = means[0] - statistics.fmean(later)
    if fall <= _LEAST_FALL * abs(means[0]):
        return 0.0
    deviation = statistics.stdev(later) * math.sqrt(1 + 1 / len(later))
    return -fall / deviation if deviation else -math.inf


def t_of_slope(curve: Sequence[float]) -> float:
    """Slope of the least-squares line through a curve, divided by its standard error; 0 for a very short curve."""
    count = len(curve)
    if count < 4 or not all(map(math.isfinite, curve)):
        return 0.0
    mean_x, mean_y = (count - 1) / 2, sum(curve) / count
    spread = sum((x - mean_x) ** 2 for x in range(count))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(curve)) / spread
    residual = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in enumerate(curve)) / (count - 2)
    error = math.sqrt(residual / spread)
    return slope / error if error > 0 else math.copysign(math.inf, slope) if slope else 0.0


def metric(experiments: ExperimentRunner) -> CheckResult:
    """The trained model beats every constant output that was tried, by more than chance explains."""
    baseline, probe = experiments.baseline(), experiments.probe()
    if baseline.obstacle:
        return not_shown(baseline.obstacle)
    constant, names = baseline.values, baseline.comparable_metrics
    if not names and ("loss" not in constant or probe.need_not_fall()):
        no_loss = "the loss needs Task.embed, so an evaluation has none"
        return not_shown(f"{probe.need_not_fall() or no_loss}, and no metric has a known direction")
    config, changes = experiments.short_config(), TaskChanges(eval_samples=_EVAL_SAMPLES)
    for factor in (1, experiments.patience):
        fell = _falls(experiments.learned(factor)[0])
        folder = str(experiments.folder / f"learned-{factor}")
        trained = experiments.run(
            f"evaluated-{factor}", experiments.nproc, worker_functions.evaluate, config, folder, changes
        )[0]
        better = [name for name in names if baseline.is_beaten(name, trained[name])]
        too_few = trained.get("samples", math.inf) < _TOO_FEW_EVAL_SAMPLES
        # With Task.embed there is no loss.
        lower = probe.need_not_fall() or "loss" not in constant or trained["loss"] < constant["loss"]
        if (too_few and fell) or (lower and (better or not names)):
            break
    what = names[0] if names else "loss"
    rows = [
        {
            "metric": name,
            "before": baseline.untrained.get(name),
            "after": trained.get(name),
            "best constant output": constant.get(name),
        }
        for name in constant
    ]
    chance = baseline.chance(what) if names else 0.0
    more = {"value": trained[what], "bound": constant[what] + chance, "what": what, "rows": rows}
    more["notes"] = experiments.data_remarks()
    steps = experiments.learning_steps * factor
    losses = f"after {number_of(steps, 'step')}"
    if "loss" in constant:
        losses = f"loss {trained['loss']:.4g} against {constant['loss']:.4g} {losses}"
    better_loss = f"better than a constant output in {losses}" if "loss" in constant else losses
    if fell and all(math.isclose(trained[name], baseline.untrained[name], rel_tol=1e-5) for name in constant):
        return fault(
            "the evaluation after training equals that of the untrained model, although the loss fell: "
            f"{what} {trained[what]:.4g}",
            **more,
        )
    if too_few and fell and not lower and math.isfinite(trained["loss"]):
        text = (
            f"{number_of(int(trained['samples']), 'evaluation sample', 'is', 'are')} too few to decide "
            "whether it beats a constant output"
        )
        return not_shown(f"{text}: {losses}", **more)
    if not lower and probe.without_labels and 0 <= constant["loss"] < _NO_LOSS * baseline.untrained["loss"]:
        text = "the loss has no labels, and a constant output has almost no loss: it compares outputs of one sample"
        return not_shown(f"{text}; {losses}", **more)
    if not lower:
        return fault(f"no better than a constant output: {losses}", **more)
    if names and not better:
        within = [name for name in names if abs(trained[name] - constant[name]) <= baseline.chance(name)]
        if within:
            what, reached = within[0], constant[within[0]] + baseline.chance(within[0])
            text = (
                f"{what} {trained[what]:.4g} is within chance of the best constant output, {constant[what]:.4g}: on "
                f"{baseline.units:g} evaluation labels, chance may reach {reached:.4g}; {losses}"
            )
            return not_shown(text, **more)
        same = all(math.isclose(trained[name], constant[name], rel_tol=1e-3, abs_tol=1e-6) for name in names)
        text = f"{better_loss}, but {what} is {trained[what]:.4g} against {constant[what]:.4g}"
        return not_shown(text, **more) if same else fault(f"{text}: check Task.predict and Task.metrics", **more)
    return passed(
        f"{what} {trained[what]:.4g}, best constant output {constant[what]:.4g}"
        f"{f' (by chance up to {constant[what] + chance:.4g})' if chance else ''}, "
        f"before training {baseline.untrained[what]:.4g}",
        **more,
    )
