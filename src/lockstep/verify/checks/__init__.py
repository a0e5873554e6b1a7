"""The checks by name, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.verify import learning, persistence, sameness
from lockstep.verify.bench import Bench
from lockstep.verify.verdict import Verdict

CHECKS: dict[str, Callable[[Bench], Verdict]] = {
    "loss": learning.loss,
    "metric": learning.metric,
    "overfit": learning.overfit,
    "gradients": learning.gradients,
    "predictions": learning.predictions,
    "probe": sameness.probe,
    "replicas": sameness.replicas,
    "ranks": sameness.ranks,
    "accumulation": sameness.accumulation,
    "strategies": sameness.strategies,
    "resume": persistence.resume,
    "elastic": sameness.elastic,
    "samples": persistence.samples,
    "evaluation": persistence.evaluation,
    "collectives": sameness.collectives,
    "determinism": persistence.determinism,
}
