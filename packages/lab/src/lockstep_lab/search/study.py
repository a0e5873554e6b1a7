"""The trials of a sweep, in Optuna's storage. Only this file imports Optuna.

The values of a trial are a function of the seed, its number and the trials before it: each trial gets a new sampler,
so there is no state that a kill could lose.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.data.order import derive_seed
from lockstep.core.errors import UsageError
from lockstep_lab.search.grid import Grid

if TYPE_CHECKING:
    import optuna
    from optuna.study import Study as OptunaStudy

FILE = "optuna.jsonl"
DONE, PRUNED, FAILED, OPEN = "done", "pruned", "failed", "open"
_NAME = "sweep"


@dataclass(frozen=True)
class TrialRecord:
    """A trial in the storage."""

    number: int
    state: str
    """DONE, PRUNED, FAILED or OPEN."""
    values: dict[str, Any]
    """By key of the config."""
    results: list[float]
    """Of the evaluations, in order."""
    value: float | None
    """The result that counts. None: there is none."""
    error: str


class Open:
    """An unfinished trial."""

    def __init__(self, study: Study, trial: optuna.Trial) -> None:
        self._study, self._trial = study, trial
        self.number = trial.number
        self.values = {key: study.suggest(trial, key) for key in study.grid.keys}
        self.reported = len(study.study.trials[trial.number].intermediate_values)

    def report(self, value: float) -> bool:
        """Add the result of the next evaluation. True: the trial should be pruned."""
        self._trial.report(value, self.reported + 1)  # evaluations are counted: steps differ with the batch
        self.reported += 1
        return self.should_be_pruned()

    def should_be_pruned(self) -> bool:
        """True if the trial should be pruned after its last result."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about results that are not numbers
            return self.reported > 0 and self._trial.should_prune()

    def finish(self, state: str, value: float | None = None, error: str = "") -> None:
        """End the trial."""
        from optuna.trial import TrialState

        if error:
            self._trial.set_user_attr("error", error)
        states = {DONE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED, FAILED: TrialState.FAIL}
        self._study.study.tell(self._trial, value if state == DONE else None, state=states[state])


class _HeldAlready:
    """A lock of the storage: the sweep folder's lock keeps others out, and ends with its process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Study:
    """The trials in a folder. The caller holds the lock of the folder.

    Raises:
        UsageError: Optuna is not installed.
    """

    def __init__(self, folder: Path, grid: Grid, seed: int) -> None:
        optuna = module()
        self.grid, self.seed = grid, seed
        path = folder / FILE
        _mend(path)
        journal = optuna.storages.journal
        pruners = {
            "median": optuna.pruners.MedianPruner,
            "hyperband": optuna.pruners.HyperbandPruner,
            "none": optuna.pruners.NopPruner,
        }
        self.study: OptunaStudy = optuna.create_study(
            storage=journal.JournalStorage(journal.JournalFileBackend(str(path), lock_obj=_HeldAlready())),
            study_name=_NAME,
            direction=self._direction(),
            pruner=pruners[grid.pruner](),
            load_if_exists=True,
        )

    def __len__(self) -> int:
        return len([trial for trial in self.study.trials if trial.state.name != "WAITING"])

    def records(self) -> list[TrialRecord]:
        """All trials that have started, by number."""
        names = {"COMPLETE": DONE, "PRUNED": PRUNED, "FAIL": FAILED, "RUNNING": OPEN}
        return [
            TrialRecord(
                trial.number,
                names[trial.state.name],
                {key: self._decoded(key, value) for key, value in trial.params.items()},
                [value for _, value in sorted(trial.intermediate_values.items())],
                trial.value if trial.state.name == "COMPLETE" else None,
                trial.user_attrs.get("error", ""),
            )
            for trial in self.study.trials
            if trial.state.name in names
        ]

    def left_open(self) -> list[Open]:
        """The trials that an earlier sweep started and did not finish."""
        optuna = module()
        running = [trial for trial in self.study.trials if trial.state.name == "RUNNING"]
        return [Open(self, optuna.trial.Trial(self.study, trial._trial_id)) for trial in running]

    def ask(self) -> Open:
        """Start the next trial."""
        if not any(trial.state.name == "WAITING" for trial in self.study.trials):
            # The values are written together: a kill between two of them would change the values after it.
            self.study.enqueue_trial(self._sample(len(self.study.trials)))
        return Open(self, self.study.ask())

    def suggest(self, trial: optuna.Trial, key: str) -> Any:
        """The value of a key in a trial."""
        values = self.grid.keys[key]
        if isinstance(values, list):
            return self._decoded(key, trial.suggest_categorical(key, [json.dumps(value) for value in values]))
        if values.is_whole:
            low, high = int(values.low), int(values.high)
            return trial.suggest_int(key, low, high, step=int(values.step or 1), log=values.log)
        return trial.suggest_float(key, values.low, values.high, step=values.step, log=values.log)

    def _sample(self, number: int) -> dict[str, Any]:
        """The values of the next trial, in the storage's form."""
        if self.grid.sampler == "grid":
            chosen = self.grid.combinations()[number]
            return {key: self._encoded(key, value) for key, value in chosen.items()}
        optuna = module()
        seed = derive_seed(self.seed, number) % 2**32
        samplers = optuna.samplers
        sampler = samplers.RandomSampler(seed) if self.grid.sampler == "random" else samplers.TPESampler(seed=seed)
        apart = optuna.create_study(direction=self._direction(), sampler=sampler)
        apart.add_trials([trial for trial in self.study.trials if trial.state.name != "WAITING"])
        trial = apart.ask()
        for key in self.grid.keys:
            self.suggest(trial, key)
        return dict(trial.params)

    def _direction(self) -> str:
        return {"max": "maximize", "min": "minimize"}[self.grid.direction]

    def _encoded(self, key: str, value: Any) -> Any:
        """A value of a list as JSON: Optuna stores texts, and confuses True with 1."""
        return json.dumps(value) if isinstance(self.grid.keys[key], list) else value

    def _decoded(self, key: str, value: Any) -> Any:
        return json.loads(value) if isinstance(self.grid.keys[key], list) else value


def module() -> Any:
    """Optuna, without its messages.

    Raises:
        UsageError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from its imports
            import optuna
    except ImportError as error:
        remedy = "pip install optuna"
        raise UsageError("requires the package optuna", where="lockstep sweep", remedy=remedy) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _mend(path: Path) -> None:
    """Truncate a last line that a killed process has half written: Optuna would append to it."""
    if path.is_file():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
