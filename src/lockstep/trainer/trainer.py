"""`Trainer`: train, evaluate, predict and export as a config says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lockstep.configs import config_file
from lockstep.core import caller, joined_parts, keywords, this_process
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import Preempted, UsageError
from lockstep.core.parallel import signals
from lockstep.core.part import Part
from lockstep.core.task import Task
from lockstep.launch.decision import NOT_BEGUN
from lockstep.launch.device_check import judgement as device_check
from lockstep.launch.device_check import run as device_check_run
from lockstep.launch.preflight import run as preflight
from lockstep.launch.preflight import variables
from lockstep.launch.preflight.judgement import PreflightFinding
from lockstep.parts import profile as profiling
from lockstep.trainer import assemble, local_ranks
from lockstep.trainer.joining import Recorder
from lockstep.trainer.trained_run import TrainedRun, given, parsed

_PREFLIGHT_S = 25.0  # in `preflight`, ranks wait so long for each other


@keywords.speaks_python
class Trainer(TrainedRun):
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
        config = parsed(config)
        script = caller.script_name() if run_dir is None and "name" not in config.model_fields_set else None
        if script is not None:
            config = config.model_copy(update={"name": script})
        self.config = config
        self.run_dir = Path(run_dir) if run_dir is not None else Path("runs") / config.name
        self._has_chosen_folder = script is not None
        self.fresh, self.allow_change, self.quiet = fresh, tuple(allow_change), quiet
        self.checkpoint = checkpoint
        joined_parts.check(parts)
        self.parts = tuple(parts)

    @property
    def setup(self) -> assemble.Setup:
        """What the trainings of this object are made of."""
        return assemble.Setup(
            self.config, self.run_dir, self.fresh, self.allow_change, self.quiet, self.profile, self.parts
        )

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
        given(task)
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

    def preflight(self, task: Task | None = None, *, deep: bool = False) -> list[PreflightFinding]:
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
        given(task)
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
            self.results = local_ranks.fit(self.setup, task, main=run_rank, nproc=nproc, max_restarts=max_restarts)
        except Preempted as stopped:
            if "SIGINT" not in str(stopped) and str(stopped) != NOT_BEGUN:
                raise
            if not self.quiet:
                print("the next fit resumes from there" if "saved" in str(stopped) else stopped, flush=True)
            self.results = self._latest()
        if (self.run_dir / "config.yaml").is_file():
            self.config = config_file.read_run(self.run_dir)
        if any(self.setup.checkpoints.glob("step-*")):
            self._load_newest(task)
        return dict(self.results)


def run_rank(arguments: Sequence[str]) -> None:
    """The main function of a rank that `Trainer.fit(nproc=...)` has started."""
    local_ranks.run_rank(arguments, lambda config, task, options: Trainer(config, **options).fit(task))
