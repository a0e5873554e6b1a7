"""The checks by name, in the order in which they run. Each is a function from the experiments to its result."""

from __future__ import annotations

from collections.abc import Callable

from lockstep_lab.verify.checks import bits, evaluation, gradients, learning, on_mesh, overfit, replicas, resume
from lockstep_lab.verify.experiments import ExperimentRunner
from lockstep_lab.verify.result import CheckResult

CHECKS: dict[str, Callable[[ExperimentRunner], CheckResult]] = {
    "loss": learning.loss,
    "metric": learning.metric,
    "overfit": overfit.overfit,
    "gradients": gradients.gradients,
    "predictions": evaluation.predictions,
    "probe": replicas.probe,
    "replicas": replicas.replicas,
    "ranks": replicas.ranks,
    "accumulation": replicas.accumulation,
    "strategies": on_mesh.strategies,
    "resume": resume.resume,
    "elastic": resume.elastic,
    "samples": on_mesh.samples,
    "evaluation": evaluation.evaluation,
    "collectives": gradients.collectives,
    "determinism": resume.determinism,
    "bits": bits.bits,
}
BY_NAME = ("bits",)
"""The checks that are made only if they are named. `bits` takes about half as long as all others together."""
DEFAULT = tuple(name for name in CHECKS if name not in BY_NAME)
