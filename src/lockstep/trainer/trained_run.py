"""What a `Trainer` does with a run that has trained: evaluations, predictions, exports, replays."""

from __future__ import annotations

import abc
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from lockstep.configs import config_file
from lockstep.core import evaluate as evaluation
from lockstep.core import evaluation_run, run_data, run_model, task_checks
from lockstep.core.build import Run
from lockstep.core.checkpoint import choice
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World
from lockstep.core.run_model import SpreadModel
from lockstep.core.task import Samples, Task
from lockstep.trainer import assemble, export, memory_shortage, prediction_run, replaying, training_state
from lockstep.trainer.trained_model import TrainedModel


class TrainedRun(abc.ABC):
    """The base of `Trainer`: a run in its directory. Methods load one of its checkpoints, and all ranks call them."""

    config: RunConfig
    run_dir: Path
    checkpoint: str | int | None
    loaded_step: int | None = None
    """The step of the checkpoint that was evaluated, or that gave predictions. None: there was none yet."""
    _model: nn.Module | None = None

    @property
    @abc.abstractmethod
    def setup(self) -> assemble.Setup:
        """What the trainings of this object are made of."""

    @property
    def model(self) -> nn.Module:
        """The model of the last `fit`, `evaluate`, `predict` or `describe`, always in evaluation mode.

        After `fit`, it has the last weights; otherwise those of `checkpoint`. If the run keeps a moving average of the
        weights, the model holds the average. It is on the device of this process.

        Raises:
            UsageError: nothing has trained or loaded a model, or, with FSDP, this rank holds only parts of it.
        """
        if self._model is None:
            raise UsageError(
                "there is no model",
                where="Trainer.model",
                remedy="call fit, evaluate or predict first. If the ranks of FSDP hold shards of the model: export, "
                "or evaluate in a separate process",
            )
        return self._model.eval()

    @property
    def history(self) -> list[dict[str, float]]:
        """The log of the run: a dict for each entry, in their order, as `metrics.jsonl` has them.

        The keys are `step`, `epoch`, `time_s` and names such as `train/loss`. An entry of an evaluation has `eval/...`
        keys. `pandas.DataFrame(trainer.history)` is a table with a row for each entry. Damaged lines are left out.

        Raises:
            UsageError: the config's `log.writers` lacks `json_lines`, so that there is no such file.
        """
        if "json_lines" not in self.config.log.writers:
            remedy = "add json_lines to log.writers"
            raise UsageError("the run writes no metrics.jsonl", where="log.writers", remedy=remedy)
        path = self.run_dir / "metrics.jsonl"
        if not path.is_file():
            return []
        entries = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # the end of a line is missing after a kill, and while it is written
                entries.append(json.loads(line))
        return [entry for entry in entries if isinstance(entry, dict)]

    def _latest(self) -> dict[str, float]:
        """The last logged value of each name."""
        has_file = "json_lines" in self.config.log.writers
        return {name: value for entry in (self.history if has_file else ()) for name, value in entry.items()}

    def evaluate(self, task: Task | None = None) -> dict[str, float]:
        """Loss and metrics of the run's checkpoint on the task's evaluation data.

        Returns:
            results by name, as `core.evaluate.evaluate` gives them. If `data.eval` names several sets of data,
            each name begins with that of its set: `clean/loss`.
        """
        with self._using(task) as used:
            strategy, setup, world = used.load(), used.setup, used.world
            # All sets are opened first: a wrong path in the last is found before the first is evaluated.
            tasks = assemble.evaluated_tasks(setup, used.task, world)
            sets = [used.evaluation_data(name, task) for name, task in tasks.items()]

            def show(text: str) -> None:
                if world.rank == 0 and not setup.quiet:
                    print(text, file=sys.stderr, flush=True)

            for line in (line for evaluated in sets for line in evaluated.limit()):
                show(line)
            report = evaluation_run.PresenterReport(lambda name, _, text: show(f"{name}:\n{text}" if name else text))
            precision = Precision(setup.config.precision, world.device)
            with memory_shortage.noted(setup.run_dir, setup.config, world), strategy.inference() as forward:
                return evaluation_run.evaluate(
                    sets, forward, world=world, precision=precision, viewers=[report], tell=show
                )

    def predict(self, task: Task | None = None, data: Samples | None = None) -> list[Any]:
        """The task's outputs for every sample of `data` (default: its evaluation data), in the order of the samples.

        Returns:
            outputs on rank 0, an empty list on the other ranks.
        """
        with self._using(task) as used:
            strategy, setup, world = used.load(), used.setup, used.world
            micro_batch = memory_shortage.fitting(setup.run_dir, setup.config, world).evaluation
            evaluated = run_data.evaluation_data(setup.config, used.task, world, data, micro_batch=micro_batch)
            precision = Precision(setup.config.precision, world.device)
            with memory_shortage.noted(setup.run_dir, setup.config, world), strategy.inference() as forward:
                outputs = evaluation.predict(
                    used.task, forward, evaluated.loader, plan=evaluated.plan, world=world, precision=precision
                )
                return outputs or []

    def describe(
        self,
        inputs: Sequence[str] = (),
        samples: int = 8,
        task: Task | None = None,
        *,
        on_error: Literal["raise", "skip"] | None = None,
    ) -> list[dict[str, Any]]:
        """Predictions in a form for people: a dict for each sample on rank 0, nothing on the other ranks.

        For the arguments, see `describe_each`.
        """
        rows: list[dict[str, Any]] = []
        self.describe_each(lambda row, _: rows.append(row), inputs, samples, task, on_error=on_error)
        return rows

    def describe_each(
        self,
        add: Callable[[dict[str, Any], bool], None],
        inputs: Sequence[str] = (),
        samples: int = 8,
        task: Task | None = None,
        *,
        on_error: Literal["raise", "skip"] | None = None,
        begin: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Predict, and pass each prediction to `add` in a form for people as soon as it is known. All ranks call it.

        The predictions come in the order of the samples. Ranks share the work, and none keeps what was passed on.

        Args:
            add: is called on rank 0 with a dict for each sample, and with whether the sample could be read.
            inputs: read by the task (files, texts). Empty: the first `samples` evaluation samples, next to their truth.
            on_error: `raise` the error if a sample cannot be read; or `skip` the sample: its dict then has the reason
                under `error`. None: as the config's `data.on_error`.
            begin: is called on rank 0 before the first prediction, with the number of samples.

        Raises:
            DataError: a sample cannot be read; or with `skip`, none of many samples in a row can be read.
            UsageError: the task reads no such inputs.
        """
        self.predict_rows(
            lambda rows, readable: add(rows[0], readable),
            inputs,
            samples,
            task,
            on_error=on_error,
            begin=begin,
            by_row=False,
        )

    def predict_rows(
        self,
        add: Callable[[list[dict[str, Any]], bool], None],
        inputs: Sequence[str] = (),
        samples: int = 8,
        task: Task | None = None,
        *,
        on_error: Literal["raise", "skip"] | None = None,
        begin: Callable[[int], None] = lambda count: None,
        by_row: bool = True,
        folder: Path | None = None,
    ) -> None:
        """As `describe_each`, for tasks whose predictions have several rows, such as boxes, or files, such as masks.

        Args:
            add: is called on rank 0 with the rows of each sample, and with whether the sample could be read.
            by_row: whether a sample has the rows of `Presenter.rows`. Otherwise it has the single row of
                `describe_each`.
            folder: every rank writes the files of `Presenter.files` of its samples into this folder. None: no files
                are written.

        Raises:
            UsageError: also if a file cannot be written.
        """
        with self._using(task) as used:
            prediction_run.predict_rows(
                used, add, inputs, samples, on_error=on_error, begin=begin, by_row=by_row, folder=folder
            )

    def export(
        self,
        folder: str | Path,
        task: Task | None = None,
        *,
        program: bool = True,
        merge: bool = False,
        force: bool = False,
    ) -> Path:
        """Write the checkpoint's weights into `folder`: `model.safetensors`, files that the task adds, and `model.pt2`.

        The tensors have the names that they have in the task's model. A warning names values of `get_extra_state` that
        are not tensors: the file cannot hold them. torch runs `model.pt2` without the code of the model: see
        `tasks.program.write_program`. For a task in your own file, the folder has its source, too.

        Args:
            program: whether to write `model.pt2`.
            merge: add adapters to the weights, and write whole weights. Otherwise adapters are written by themselves.
            force: delete an earlier export that is in `folder` first.

        Returns:
            the file of weights.

        Raises:
            LockstepError: as `trainer.export.export_weights`.
        """
        with self._using(task) as used:
            return export.write(used, Path(folder), program=program, merge=merge, force=force)

    def export_training_state(self, file: str | Path, task: Task | None = None, *, force: bool = False) -> Path:
        """Write one file from which plain torch continues: `torch.load(file, weights_only=True)`.

        It has the keys of `training_state.as_torch`. Rank 0 holds the whole state in host memory.

        Args:
            force: replace a file that exists.

        Returns:
            the file.

        Raises:
            LockstepError: the file exists or cannot be written, or there is no checkpoint.
        """

        def write(checkpoint: Checkpoint, built: SpreadModel) -> None:
            config, task = used.setup.config, used.task
            model, sharded = built.strategy.unwrapped.model, built.strategy.is_sharded
            optimizer = run_model.make_optimizer(config, task, model, built.blocks, sharded=sharded)
            used.world.on_rank0(
                lambda: training_state.write(
                    training_state.as_torch(checkpoint, model, optimizer, config, task_checks.schedule(task)),
                    Path(file),
                    force=force,
                )
            )

        with self._using(task) as used:
            used.built(write)
        return Path(file).resolve()

    @contextlib.contextmanager
    def replaying(self, step: int, task: Task | None = None) -> Iterator[tuple[Run, Callable[[], Run | None]]]:
        """The run as it was at the nearest checkpoint before a step, to make its steps again: `watch.replay.steps`.

        All ranks call it, also on a different number of ranks than that of the run. Nothing is written.

        Args:
            step: the first step of a training is 1.

        Yields:
            the run, and a function that makes another as it was after the step; None without a checkpoint of it.

        Raises:
            UsageError: the run has no such step.
        """
        with self._join() as world:
            yield replaying.run_before(self.setup, given(task) or self.task(), world, step)

    def task(self, evaluated: str | None = None) -> Task:
        """A new object of the config's task; see `assemble.make_task`."""
        return assemble.make_task(self.config, evaluated)

    @contextlib.contextmanager
    def _using(self, task: Task | None) -> Iterator[TrainedModel]:
        """The model of `checkpoint`, while the ranks are together. Afterwards `model` and `config` are those of it."""
        self._model = None  # its memory may be needed
        with self._join() as world:
            used = TrainedModel(self.setup, given(task) or self.task(), world, self.checkpoint)
            yield used
            self.config, self._model, self.loaded_step = used.setup.config, used.model, used.loaded_step

    def _load_newest(self, task: Task | None) -> None:
        """Make `model` that of the newest checkpoint, whole: one process can hold the whole model."""
        parallel = self.config.parallel.model_copy(update={"strategy": "ddp"})
        setup = assemble.Setup(self.config.model_copy(update={"parallel": parallel}), self.run_dir, quiet=True)
        with self._join() as world:
            alone = TrainedModel(setup, given(task) or self.task(), world, choice.NEWEST)
            alone.load()
            self._model = alone.model

    def _join(self) -> contextlib.AbstractContextManager[World]:
        """The ranks, together."""
        return assemble.joined(self.config, self.run_dir)


def given(task: Task | None) -> Task | None:
    """The task that a method was given.

    Raises:
        UsageError: it is the class of a task instead of an object.
    """
    if isinstance(task, type):
        name = task.__name__
        raise UsageError(f"the task is the class {name}", where="Trainer", remedy=f"give an object: {name}()")
    return task


def parsed(config: RunConfig | Mapping[str, Any] | str) -> RunConfig:
    """The config that `Trainer` was given.

    Raises:
        UsageError: it has a wrong type or has faults; all are named.
    """
    if isinstance(config, str):
        return config_file.load(config)
    if isinstance(config, RunConfig):
        return config
    if not isinstance(config, Mapping):
        raise UsageError(
            f"the config is of type {type(config).__name__}",
            where="Trainer(config)",
            remedy="give a RunConfig, a mapping with the same keys, or a text: a recipe, FILE.yaml or FILE.py:Task. "
            "A task is the argument of fit",
        )
    return config_file.parse(config, needs_task=False)
