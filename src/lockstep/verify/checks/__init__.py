"""The checks by name, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.verify.checks import learning, replicas, resume
from lockstep.verify.experiments import Experiments
from lockstep.verify.result import CheckResult

CHECKS: dict[str, Callable[[Experiments], CheckResult]] = {
    "loss": learning.loss,
    "metric": learning.metric,
    "overfit": learning.overfit,
    "gradients": learning.gradients,
    "predictions": learning.predictions,
    "probe": replicas.probe,
    "replicas": replicas.replicas,
    "ranks": replicas.ranks,
    "accumulation": replicas.accumulation,
    "strategies": replicas.strategies,
    "resume": resume.resume,
    "elastic": replicas.elastic,
    "samples": resume.samples,
    "evaluation": resume.evaluation,
    "collectives": replicas.collectives,
    "determinism": resume.determinism,
}
