"""All checks of a run, in the order in which they are made."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.core.build import PreparedRun
from lockstep.core.checks import Checks
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.loader import MicroBatch
from lockstep.core.evaluation_run import named_results
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.run_data import EvaluationData
from lockstep.core.task import Task
from lockstep.parts.checks import dry_run, untouched_data
from lockstep.parts.checks.first_steps import FirstSteps


class RunChecks(Checks):
    """Tries the loss and the evaluation on a few samples, and looks at the first steps. It adds warnings to the run.

    It is made before anything runs the model.

    Args:
        tasks: for each set of evaluation data, by its name, the task that has it.
        folder: the run directory.
        tell: writes a line for people into the logs.
    """

    def __init__(
        self,
        config: RunConfig,
        prepared: PreparedRun,
        task: Task,
        tasks: Mapping[str, Task],
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self.config, self.prepared, self.tasks, self.folder = config, prepared, tasks, folder
        self.first_steps = FirstSteps(prepared, task, tell)

    def before_first_step(self, evaluated: Mapping[str, EvaluationData]) -> list[str]:
        """Of a new run, try the loss and the evaluation on a few samples.

        Raises:
            UsageError: `checkpoint.keep_best` or `train.stop_when` names no result of an evaluation.
        """
        prepared, state, chosen = self.prepared, self.prepared.state, self._chosen_results
        dry_run.check_is_evaluated(chosen, bool(evaluated))
        if state.step:  # a restart must be quick
            dry_run.check_results_of_saved(chosen, self.folder / "checkpoints", state.world)
            return []
        samples = {prepared.batches.loader: prepared.plan.indices(0)[0].tolist()}
        samples |= {data.loader: data.plan.first(8) for data in evaluated.values()}
        last_epoch = max(0, prepared.stop - 1) // prepared.plan.steps_per_epoch
        for loader, indices in samples.items():
            of_training = loader is prepared.batches.loader
            prepared.warnings += untouched_data.check(loader, indices, last_epoch if of_training else 0)
        compiled = self.config.compute.compile is not None
        with contextlib.ExitStack() as stack:
            for loader, indices in samples.items():
                stack.enter_context(untouched_data.watched(loader, indices[0]))
            forward = stack.enter_context(state.strategy.inference())
            stack.enter_context(dry_run.without_trace(forward, state.world, compiled))
            prepared.warnings += dry_run.look_at_losses(
                forward,
                prepared.batches.loader,
                prepared.plan,
                world=state.world,
                precision=state.precision,
                must_run=bool(evaluated),
                allow_mean=self.config.train.allow_mean_loss,
            )
            messages: list[str] = []
            names: list[str] = []
            for name, data in evaluated.items():
                phase = state.world.heartbeat.phase
                state.world.heartbeat.enter(Phase.EVALUATING)  # a lack of memory is then that of an evaluation
                found = dry_run.look_at_evaluation(
                    self.tasks[name], forward, data.loader, plan=data.plan, world=state.world, precision=state.precision
                )
                state.world.heartbeat.enter(Phase(phase))
                messages += [text for text in found.messages if text not in messages]
                names += [f"eval/{of_set}" for of_set in named_results(name, dict.fromkeys(found.names or (), 0.0))]
                if found.names is None:  # the metrics need more samples
                    chosen = {}
            if evaluated:
                dry_run.check_results(chosen, names)
            return messages

    def watched(self, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        return itertools.chain(self.first_steps.checked(batches), batches)

    def before_save(self) -> None:
        self.first_steps.check_loadable()

    def results(self, names: Sequence[str]) -> None:
        dry_run.check_results(self._chosen_results, names)

    @property
    def _chosen_results(self) -> dict[str, str]:
        """The results of evaluations that keys of the config name, by key."""
        best, stop_when = self.config.checkpoint.keep_best, self.config.train.stop_when
        chosen = {"checkpoint.keep_best": best.split()[1]} if best else {}
        return chosen | ({"train.stop_when.metric": stop_when.metric} if stop_when else {})
