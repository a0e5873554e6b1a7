"""All checks of a run, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lockstep.core.evaluation_run import named_results
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.part import Training
from lockstep.core.run_data import EvaluationData
from lockstep.core.task import needs_global_batch
from lockstep.parts.checks import dry_run, optimizer_check, untouched_data
from lockstep.parts.checks.first_steps import FirstSteps


class RunChecks(FirstSteps):
    """Tries the loss and the evaluation on a few samples, and examines the first steps. It adds warnings to the run.

    Create it before anything runs the model.
    """

    def before_first_step(self, evaluated: Sequence[EvaluationData]) -> list[str]:
        """For a new run, try the loss and the evaluation on a few samples, after the state was loaded. A collective.

        Args:
            evaluated: the sets of evaluation data. Empty: nothing is evaluated.

        Returns:
            messages for the log.

        Raises:
            UsageError: `checkpoint.keep_best` or `train.stop_when` does not name a result of an evaluation.
        """
        run, state, chosen = self.run, self.run.state, self._chosen_results
        messages: list[str] = []
        train = run.config.train
        is_said = train.eval_every_epochs is not None or train.eval_every_steps is not None
        # Recipes keep the best, even if there are no evaluation data or the user wants no evaluation.
        if not evaluated and is_said and "checkpoint.keep_best" in chosen:
            del chosen["checkpoint.keep_best"]
            messages.append("note: the run never evaluates, so checkpoint.keep_best keeps no checkpoint")
        dry_run.check_is_evaluated(chosen, bool(evaluated))
        optimizer_check.check(state.optimizer, state.strategy.unwrapped.model)
        optimizer_check.check_formats(state)
        if state.step:  # a restart must be quick
            dry_run.check_results_of_saved(chosen, run.folder / "checkpoints", state.world)
            return messages
        samples = {run.batches.loader: run.plan.indices(0)[0].tolist()}
        samples |= {data.loader: data.plan.first(8) for data in evaluated}
        last_epoch = max(0, run.stop - 1) // run.plan.steps_per_epoch
        for loader, indices in samples.items():
            run.warnings += untouched_data.check(loader, indices, last_epoch if loader is run.batches.loader else 0)
        with contextlib.ExitStack() as stack:
            for loader, indices in samples.items():
                stack.enter_context(untouched_data.watched(loader, indices[0]))
            forward = stack.enter_context(state.strategy.inference())
            stack.enter_context(dry_run.without_trace(forward, state.world, run.is_compiled))
            phase = state.world.heartbeat.phase
            state.world.heartbeat.enter(Phase.EVALUATING)  # running out of memory is then reported for the evaluation
            run.warnings += dry_run.look_at_losses(
                forward,
                run.batches.loader,
                run.plan,
                most=min((data.plan.micro_batch for data in evaluated), default=run.plan.micro_batch_at(0)),
                world=state.world,
                precision=state.precision,
                must_run=bool(evaluated),
                allow_mean=self.run.config.train.allow_mean_loss,
                compares=needs_global_batch(run.task),
            )
            names: list[str] = []
            for data in evaluated:
                found = dry_run.look_at_evaluation(
                    data.task, forward, data.loader, plan=data.plan, world=state.world, precision=state.precision
                )
                messages += [text for text in found.messages if text not in messages]
                names += [
                    f"eval/{of_set}" for of_set in named_results(data.name, dict.fromkeys(found.names or (), 0.0))
                ]
                if found.names is None:  # the metrics need more samples
                    chosen = {}
            state.world.heartbeat.enter(Phase(phase))
            if evaluated:
                dry_run.check_results(chosen, names)
            return messages

    def after_evaluation(self, training: Training) -> None:
        names = [name for name in training.results if name.startswith("eval/")]
        dry_run.check_results(self._chosen_results, names)

    @property
    def _chosen_results(self) -> dict[str, str]:
        """The results of evaluations that config keys name, by key."""
        best, stop_when = self.run.config.checkpoint.keep_best, self.run.config.train.stop_when
        plateau = self.run.config.schedule.plateau
        chosen = {"checkpoint.keep_best": best.split()[1]} if best else {}
        chosen |= {"train.stop_when.metric": stop_when.metric} if stop_when else {}
        return chosen | ({"schedule.plateau.metric": plateau.metric} if plateau else {})
