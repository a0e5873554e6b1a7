"""`Trainer`: train, evaluate, predict and export as a config says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from lockstep.configs import config_file
from lockstep.core import (
    caller,
    joined_parts,
    keywords,
    this_process,
)
from lockstep.core.build import Run
from lockstep.core.checkpoint import choice
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import Preempted, UsageError
from lockstep.core.parallel import signals
from lockstep.core.parallel.world import World
from lockstep.core.part import Part
from lockstep.core.task import Samples, Task
from lockstep.launch.decision import NOT_BEGUN
from lockstep.launch.device_check import judgement as device_check
from lockstep.launch.device_check import run as device_check_run
from lockstep.launch.preflight import run as preflight
from lockstep.launch.preflight import variables
from lockstep.launch.preflight.judgement import Finding
from lockstep.parts import profile as profiling
from lockstep.trainer import assemble, local_ranks, prediction_run, replaying
from lockstep.trainer.recorder import Recorder
from lockstep.trainer.trained_model import TrainedModel

_PREFLIGHT_S = 25.0  # in `preflight`, ranks wait so long for each other


@keywords.speaks_python
class Trainer:
    """Trains a model as a config says, and evaluates, predicts with and exports the trained model.

    The ranks are those that torchrun's environment variables describe. Without these variables there is one rank: this
    process. `fit(task, nproc=2)` starts two ranks, from a script or from a cell of a notebook.

    Example:
        trainer = Trainer("digits", run_dir="runs/digits")
        trainer.fit(nproc=2)
        trainer.model, trainer.history, trainer.results

    Args:
        config: a `RunConfig`, a mapping with the same keys, or a text as on the command line: a recipe, FILE.yaml or
            FILE.py:Task.
        run_dir: the folder into which everything is written. None: `runs/<name>`, if a config without a name has
            the name of the script.
        fresh: delete the run that the folder holds, and start again. Otherwise that run is resumed.
        allow_change: keys of the config (or `data`, or `task`) that may differ from those of the resumed run.
        checkpoint: the checkpoint that `evaluate`, `predict`, `describe` and `export` use: `newest`, `best` or a step.
            None: the best if the config has `checkpoint.keep_best`, else the newest.
        quiet: print nothing.
        profile: steps that `fit` profiles, as `--profile` takes them: `5-10`, or a number of steps. None: no steps.

        parts: join the trainings of `fit`, after those of the config's `train.parts`; see `lockstep.Part`.

    Raises:
        UsageError: the config has a wrong type or has faults; all are named. Or an object in `parts` is not a Part.
    """

    variables: Sequence[Mapping[str, str | None]] = ()
    """After `preflight`, on rank 0: the environment variables of each rank that matter to a training."""
    results: Mapping[str, float] = {}
    """After `fit`: the results that it returned."""

    def __init__(
        self,
        config: RunConfig | Mapping[str, Any] | str,
        *,
        run_dir: str | Path | None = None,
        fresh: bool = False,
        allow_change: Sequence[str] = (),
        checkpoint: str | int | None = None,
        quiet: bool = False,
        profile: str | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.profile = profiling.parse(profile) if profile is not None else None
        if isinstance(config, str):
            config = config_file.load(config)
        elif not isinstance(config, RunConfig):
            if not isinstance(config, Mapping):
                raise UsageError(
                    f"the config is of type {type(config).__name__}",
                    where="Trainer(config)",
                    remedy="give a RunConfig, a mapping with the same keys, or a text: a recipe, FILE.yaml or "
                    "FILE.py:Task. A task is the argument of fit",
                )
            config = config_file.parse(config, needs_task=False)
        script = caller.script_name() if run_dir is None and "name" not in config.model_fields_set else None
        if script is not None:
            config = config.model_copy(update={"name": script})
        self.config = config
        self.run_dir = Path(run_dir) if run_dir is not None else Path("runs") / config.name
        self._has_chosen_folder = script is not None
        self.fresh, self.allow_change, self.quiet = fresh, tuple(allow_change), quiet
        self.loaded_step: int | None = None
        """The step of the checkpoint that was evaluated, or that gave predictions. None: there was none yet."""
        self.checkpoint = checkpoint
        joined_parts.check(parts)
        self.parts = tuple(parts)
        self._model: nn.Module | None = None

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

    # ---- training

    def fit(
        self,
        task: Task | None = None,
        recorder: Recorder | None = None,
        *,
        nproc: int | Literal["auto"] | None = None,
        max_restarts: int = 3,
    ) -> dict[str, float]:
        """Train to the end. If the run directory holds a run, that run is resumed.

        Args:
            task: the task to train, instead of the config's task. With `nproc`, it is sent to the ranks by pickle, and
                classes of a notebook or a script travel as code, by cloudpickle.
            recorder: records the training on every rank.
            nproc: start this many ranks on this machine, and train on them; `auto`: a rank for each GPU. `model` is
                then loaded from the newest checkpoint. None: this process is the rank, or one of torchrun's ranks.
            max_restarts: with `nproc`: how often the ranks are started again after one was killed or has crashed.

        Returns:
            the last logged value of each name, such as `train/loss` and `eval/accuracy`. With `nproc`, also after
            Ctrl-C, or the stop button of a notebook: the state was saved, and the next `fit` resumes.

        Raises:
            Preempted: SIGINT, SIGTERM, SIGUSR1 or SIGHUP asked to stop; the state was saved, and the next `fit`
                resumes. With `nproc`, only after a signal other than SIGINT.
            KeyboardInterrupt: with `nproc`: Ctrl-C was pressed again, and the ranks were killed.
            CheckpointError: the training reached its end, but a checkpoint could not be written.
            RankError: with `nproc`: a rank failed. Has the message of the rank.
            LockstepError: the config, the data or the model cannot be used, or the training failed.
        """
        _given(task)
        if self._has_chosen_folder and not self.quiet and this_process.is_first():
            print(f"the run directory is {self.run_dir}, named after the script; Trainer(run_dir=...) sets another")
        if nproc is not None:
            return self._fit_on_ranks(task, recorder, nproc, max_restarts)
        self._model = None  # its memory may be needed
        with signals.listening() as flag, self._join() as world:
            with assemble.assemble(self.setup, task, world, flag=flag, recorder=recorder) as training:
                self.config = training.setup.config
                self.results = training.train()
                if "train/loss" not in self.results:  # the run was complete already
                    self.results = world.on_rank0(self._latest) | self.results
            self._model = training.trained  # the recorder has seen the weights, which averages may replace
        return dict(self.results)

    def preflight(self, task: Task | None = None, *, deep: bool = False) -> list[Finding]:
        """Make the checks that `fit` makes before anything expensive, and those that it leaves out on a single node.

        Args:
            deep: also compare what devices compute, keep and exchange with known answers, for some 20 seconds.

        Returns:
            the findings, the same on every rank.

        Raises:
            RankError: the ranks did not meet within 25 seconds.
        """
        patience = self.config.parallel.model_copy(
            update={"timeout_s": min(self.config.parallel.timeout_s, _PREFLIGHT_S)}
        )
        self.config = self.config.model_copy(update={"parallel": patience})
        _given(task)
        with signals.listening(), self._join() as world:
            self.variables = variables.of_ranks(world)
            found = preflight.check(assemble.subject(self.setup, task, world), world, everything=True)
            return found + (device_check.findings(device_check_run.check(world)) if deep else [])

    def _fit_on_ranks(
        self, task: Task | None, recorder: Recorder | None, nproc: int | str, max_restarts: int
    ) -> dict[str, float]:
        """Train on ranks that this process starts. Then take config, model and results from the run directory."""
        if recorder is not None:
            raise UsageError(
                "a recorder cannot be sent to the ranks",
                where="fit(recorder=..., nproc=...)",
                remedy="leave nproc out, or write a writer: log.writers",
            )
        self._model, self.results = None, {}
        try:
            self.results = local_ranks.fit(
                self.config,
                task,
                main=run_rank,
                nproc=nproc,
                max_restarts=max_restarts,
                run_dir=self.run_dir,
                fresh=self.fresh,
                allow_change=self.allow_change,
                quiet=self.quiet,
                parts=self.parts,
            )
        except Preempted as stopped:
            if "SIGINT" not in str(stopped) and str(stopped) != NOT_BEGUN:
                raise
            if not self.quiet:
                print("the next fit resumes from there" if "saved" in str(stopped) else stopped, flush=True)
            self.results = self._latest()
        if (self.run_dir / "config.yaml").is_file():
            self.config = config_file.read_run(self.run_dir)
        if any(self.setup.checkpoints.glob("step-*")):
            # One process can hold the whole model.
            parallel = self.config.parallel.model_copy(update={"strategy": "ddp"})
            setup = assemble.Setup(self.config.model_copy(update={"parallel": parallel}), self.run_dir, quiet=True)
            with self._join() as world:
                alone = TrainedModel(setup, _given(task) or self.task(), world, choice.NEWEST)
                alone.load()
                self._model = alone.model
        return dict(self.results)

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
            yield replaying.run_before(self.setup, _given(task) or self.task(), world, step)

    # ---- a trained model

    def evaluate(self, task: Task | None = None) -> dict[str, float]:
        """Loss and metrics of the run's checkpoint on the task's evaluation data.

        Returns:
            results by name, as `core.evaluate.evaluate` gives them. If `data.eval` names several sets of data,
            each name begins with that of its set: `clean/loss`.
        """
        with self._using(task) as used:
            return used.evaluate()

    def predict(self, task: Task | None = None, data: Samples | None = None) -> list[Any]:
        """The task's outputs for every sample of `data` (default: its evaluation data), in the order of the samples.

        Returns:
            outputs on rank 0, an empty list on the other ranks.
        """
        with self._using(task) as used:
            return used.predict(data)

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
            used.predict_rows(
                add,
                prediction_run.Wanted(inputs, samples),
                on_error=on_error,
                begin=begin,
                by_row=by_row,
                folder=folder,
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
            return used.export(Path(folder), program=program, merge=merge, force=force)

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
        with self._using(task) as used:
            return used.export_training_state(Path(file), force=force)

    # ---- shared by the methods above

    def task(self, evaluated: str | None = None) -> Task:
        """A new object of the config's task; see `assemble.make_task`."""
        return assemble.make_task(self.config, evaluated)

    @contextlib.contextmanager
    def _using(self, task: Task | None) -> Iterator[TrainedModel]:
        """The model of `checkpoint`, while the ranks are together. Afterwards `model` and `config` are those of it."""
        self._model = None  # its memory may be needed
        with self._join() as world:
            used = TrainedModel(self.setup, _given(task) or self.task(), world, self.checkpoint)
            yield used
            self.config, self._model, self.loaded_step = used.setup.config, used.model, used.loaded_step

    def _join(self) -> contextlib.AbstractContextManager[World]:
        return assemble.joined(self.config, self.run_dir)

    @property
    def setup(self) -> assemble.Setup:
        """What the trainings of this object are made of."""
        return assemble.Setup(
            self.config, self.run_dir, self.fresh, self.allow_change, self.quiet, self.profile, self.parts
        )


def run_rank(arguments: Sequence[str]) -> None:
    """The main function of a rank that `Trainer.fit(nproc=...)` has started."""
    local_ranks.run_rank(arguments, lambda config, task, options: Trainer(config, **options).fit(task))


def _given(task: Task | None) -> Task | None:
    """The task that a method was given.

    Raises:
        UsageError: it is the class of a task instead of an object.
    """
    if isinstance(task, type):
        name = task.__name__
        raise UsageError(f"the task is the class {name}", where="Trainer", remedy=f"give an object: {name}()")
    return task
