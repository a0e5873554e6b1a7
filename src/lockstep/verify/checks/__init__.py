"""The checks by name, in the order in which they are made. Each is a function from the experiments to its result."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.verify.checks import evaluation, gradients, learning, replicas, resume, samples
from lockstep.verify.experiments import Experiments
from lockstep.verify.result import CheckResult

CHECKS: dict[str, Callable[[Experiments], CheckResult]] = {
    "loss": learning.loss,
    "metric": learning.metric,
    "overfit": learning.overfit,
    "gradients": gradients.gradients,
    "predictions": evaluation.predictions,
    "probe": replicas.probe,
    "replicas": replicas.replicas,
    "ranks": replicas.ranks,
    "accumulation": replicas.accumulation,
    "strategies": replicas.strategies,
    "resume": resume.resume,
    "elastic": resume.elastic,
    "samples": samples.samples,
    "evaluation": evaluation.evaluation,
    "collectives": gradients.collectives,
    "determinism": resume.determinism,
}
