"""Can the model overfit a few samples, or is its loss of them at least lower than that of a constant output?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep_lab.verify.checks.learning import t_of_slope
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.experiments import ExperimentFailed, ExperimentRunner
from lockstep_lab.verify.free_outputs import least_loss, losses_by_draw
from lockstep_lab.verify.reference import schedule
from lockstep_lab.verify.result import CheckResult, fault, not_shown, passed
from lockstep_lab.verify.task_probe import TaskProbe

_LEFT_OF_LOSS = 0.05  # fraction of the first loss at which samples count as overfitted
_FEW_SAMPLES = 8
_LONGER = 4  # times as many steps, if samples are almost overfitted
_LARGE_GAIN = 0.5  # of the loss of the best constant output; a loss with a floor may end there
_DRAWS, _T_OF_GAIN, _LEAST_GAIN = 32, 2.6, 0.05  # the gain is a share of the same
_FALLS, _LAST = -2.6, 20  # t of the slope; steps


def overfit(experiments: ExperimentRunner) -> CheckResult:
    """The model can overfit a few training samples, the same in each epoch and without augmentation.

    A loss that draws random numbers, or cannot get close to zero, is compared with that of the best constant output.
    """
    probe = experiments.probe()
    if text := probe.need_not_fall():
        return not_shown(text)
    changes = TaskChanges(exact=True, train_samples=_FEW_SAMPLES, no_augmentation=True, same_in_each_epoch=True)
    draws = bool(probe.random_without_dropout)
    (least,) = (0.0,) if draws else experiments.run("least-loss", 1, least_loss, experiments.short_config(), changes)
    curves: dict[float, list[float]] = {}
    exploded: ExperimentFailed | None = None
    steps = experiments.learning_steps * experiments.patience
    until = None if draws else (_LEFT_OF_LOSS, least)
    for tried in (1.0, 10.0, 0.1):
        try:
            curves[tried] = _overfitted(experiments, changes, factor=tried, until=until, steps=steps)
        except ExperimentFailed as failed:  # such as a loss that explodes, because there is no warm-up here
            if failed.refused or (tried == 1.0 and not failed.known):
                raise
            exploded = exploded or failed
            continue
        if t_of_slope(curves[tried]) < _FALLS if draws else _left(curves[tried], least) <= _LEFT_OF_LOSS:
            break
    if exploded is not None and not curves:
        raise exploded
    factor = min(curves, key=lambda one: statistics.fmean(curves[one][-_LAST:]) if draws else _left(curves[one], least))
    if not draws and _left(curves[factor], least) > _LEFT_OF_LOSS and _still_falls(curves[factor], least):
        # A correct model may be slow, and --quick has fewer steps. So there is no fault while the loss falls.
        steps *= _LONGER
        curves[factor] = _overfitted(experiments, changes, factor=factor, until=until, steps=steps)
    curve = curves[factor]
    left = _left(curve, least)
    more: dict[str, Any] = {"curves": {f"loss, optim.lr x {factor:g}": curve}}
    if least > 0.01 * curve[0]:
        more["notes"] = [
            f"no output can have a loss below {least:.4g} on these samples; the loss is measured from there"
        ]
    if not draws:
        more |= {"value": left, "bound": _LEFT_OF_LOSS, "what": "remaining fraction of the first loss"}
        if curve[0] > least and -_LEFT_OF_LOSS < left <= _LEFT_OF_LOSS:
            return passed(f"overfits {_FEW_SAMPLES} samples in {len(curve)} steps, with optim.lr x {factor:g}", **more)
    config, folder = experiments.short_config(), str(experiments.folder / f"overfit-{factor:g}-{steps}")
    (losses,) = experiments.run("losses-by-draw", 1, losses_by_draw, config, folder, changes, _DRAWS if draws else 1)
    after = f"{len(curve)} steps, with optim.lr x {factor:g} ({', '.join(f'x {one:g}' for one in curves)} were tried)"
    after += ", and still falls" if draws and t_of_slope(curve[len(curve) // 2 :]) < _FALLS else ""
    return _judge(probe, losses, least if curve[0] > least and left > -_LEFT_OF_LOSS else None, after, more)


def _judge(
    probe: TaskProbe, losses: Mapping[str, Sequence[float]], least: float | None, after: str, more: dict[str, Any]
) -> CheckResult:
    """The result for a loss that draws random numbers, or that does not get close to its least value.

    Args:
        losses: see `losses_by_draw`.
        least: the least loss that any output could have. None: it may be below zero.
    """
    names = probe.random_without_dropout
    cause = "Likely cause: a part of the model that has no effect, labels that contradict each other, too small a model"
    cause += "" if names else ", or a loss with a floor above zero"
    if "constant" not in losses:
        text = f"{after} do not overfit {_FEW_SAMPLES} samples, and no constant output could be fitted to compare with"
        return not_shown(text, **more) if names or least is None else fault(f"{text}. {cause}", **more)
    constant = statistics.fmean(losses["constant"])
    gains = [one - other for one, other in zip(losses["constant"], losses["trained"], strict=True)]
    scale = max(abs(constant) if names or least is None else constant - least, 1e-30)
    gain = statistics.fmean(gains) / scale
    error = _T_OF_GAIN * statistics.stdev(gains) / math.sqrt(len(gains)) / scale if len(gains) > 1 else 0.0
    enough = _LEAST_GAIN if names or least is None else _LARGE_GAIN
    more |= {"value": gain, "bound": enough, "what": "gain over the best constant output"}
    text = f"the loss of {_FEW_SAMPLES} samples is {statistics.fmean(losses['trained']):.4g} after {after}; "
    text += f"the best constant output has {constant:.4g}"
    if names:
        text = f"{text}: a gain of {gain:.2g} +- {error:.1g}, because the loss draws {', '.join(names[:3])}"
    if gain - error > enough:
        is_usual = names or least is None or probe.compares_samples or probe.gathers or probe.without_labels
        text += "" if names or least is None else ". A floor above zero may be the reason for the rest"
        return passed(text, **more) if is_usual or probe.by_statistics else not_shown(text, **more)
    if names and (gain + error > enough or "still falls" in after):
        return not_shown(f"{text}, which is too little to judge", **more)
    return fault(f"cannot overfit: {text}. {cause}", **more)


def _left(curve: Sequence[float], least: float) -> float:
    """The rest of the first loss, measured from the smallest that any output has."""
    return (min(curve) - least) / (curve[0] - least) if curve[0] > least else 0.0


def _still_falls(curve: Sequence[float], least: float) -> bool:
    """True if half of the loss is gone, and the last quarter of the steps removes a tenth of the rest."""
    before = curve[: -(len(curve) // 4)]
    return bool(before) and _left(curve, least) < min(0.5, 0.9 * _left(before, least))


def _overfitted(
    experiments: ExperimentRunner,
    changes: TaskChanges,
    *,
    factor: float,
    until: tuple[float, float] | None,
    steps: int,
) -> list[float]:
    """The losses of a training on a few samples, with `factor` times the training's base learning rate.

    Args:
        until: see `TrainingRun`.
    """
    config = experiments.short_config(
        train__steps=steps,
        batch__global=_FEW_SAMPLES,
        batch__micro=None,
        train__unfreeze=[],
    )
    optim = config["optim"]
    scale, decay = schedule.scaled_lr(optim, experiments.global_batch), optim["weight_decay"]
    groups = [group | {"lr": group["lr"] and group["lr"] * scale} for group in optim["groups"]]
    config["schedule"] = {"name": "constant"}
    optim |= {"lr": optim["lr"] * scale * factor, "groups": groups, "lr_scaling": "none"}
    optim["weight_decay"] = decay and 0.0
    name = f"overfit-{factor:g}-{steps}"
    return experiments.train(name, experiments.nproc, config, changes=changes, until=until)[0].losses
