"""The checks that go further on a mesh of ranks: models that are sharded over tensor groups."""

from __future__ import annotations

from lockstep_lab.verify import cut_model
from lockstep_lab.verify.checks import replicas
from lockstep_lab.verify.checks import samples as of_samples
from lockstep_lab.verify.experiments import ExperimentRunner
from lockstep_lab.verify.recorder import Recording
from lockstep_lab.verify.result import CheckResult, fault, not_shown


def strategies(experiments: ExperimentRunner) -> CheckResult:
    """The same with FSDP instead of DDP, or DDP instead of FSDP. For a mesh: both, each with and without a mesh."""
    groups, nproc, tensor = experiments.groups, experiments.nproc, int(experiments.config["parallel"]["tensor"])
    if nproc == 1:
        return not_shown("one rank shards nothing; give --nproc 2 or more")
    ways = {name: (name, 1) for name in ("ddp", "fsdp") if groups < nproc or name != experiments.strategy}
    for strategy in () if groups == nproc else ("ddp", "fsdp") if groups > 1 else (experiments.strategy,):
        ways[f"{strategy} and parallel.tensor={tensor}"] = strategy, tensor

    def compared(name: str, strategy: str, tensor: int) -> CheckResult:
        config = experiments.exact_config(batch__micro=None, parallel__strategy=strategy, parallel__tensor=tensor)
        config["parallel"]["virtual_ranks"] = None  # the process that it is compared with has none

        def train(how: str = "") -> list[Recording]:
            changes = experiments.exact_changes(reverse=how == "reversed")
            return experiments.train(f"{name}-{how}" if how else name, nproc, config, changes=changes)

        words = f"{nproc} ranks with {name}"
        return replicas.compare_with_one_process(experiments, name, train, words=words, rounds_differently=True)

    found = [compared(name, *way) for name, way in ways.items()]
    worst = max(found, key=lambda one: (one.status == "fault", one.status == "not shown", one.value or 0.0))
    worst.curves = {name: curve for one in found for name, curve in one.curves.items()}
    if worst.status == "passed":
        worst.reason = worst.reason.replace(next(name for name in ways if name in worst.reason), ", ".join(ways))
    return worst


def samples(experiments: ExperimentRunner) -> CheckResult:
    """Each sample once per epoch. On a mesh, the ranks of a tensor group get the same batches, bit for bit."""
    complaint = (
        cut_model.other_batches(experiments, experiments.undisturbed())
        if experiments.groups < experiments.nproc
        else ""
    )
    return fault(complaint) if complaint else of_samples.samples(experiments)
