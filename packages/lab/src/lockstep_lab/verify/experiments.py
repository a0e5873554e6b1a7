"""The trainings and evaluations that checks compare. Each runs once, and its result is kept for all checks."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lockstep.core import devices
from lockstep.core.data import same_samples
from lockstep_lab.verify import compare, cut_model, worker_functions
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.compare import TrainingDifference
from lockstep_lab.verify.constant_baseline import ConstantBaseline, constant_baseline
from lockstep_lab.verify.data_probe import probe_data
from lockstep_lab.verify.hash_seed import OtherInterpreter, digests
from lockstep_lab.verify.recorder import RecorderOptions, Recording
from lockstep_lab.verify.reference.checkpoint import newest
from lockstep_lab.verify.task_probe import TaskProbe, probe_task
from lockstep_lab.verify.worker_functions import Answer, TrainingRun
from lockstep_lab.verify.workers import WorkerEnded, Workers

_BASELINE_SAMPLES = 512
_TIMEOUT_OF_COLLECTIVES_S = 30.0  # without progress, if the task's collectives may make ranks wait forever

Method = TypeVar("Method", bound=Callable[..., Any])


class ExperimentFailed(Exception):
    """An experiment failed on some rank.

    Args:
        name: of the experiment.
        error: the text of the error.
        known, refused: see `Answer`.
    """

    def __init__(self, name: str, error: str, *, known: bool = False, refused: bool = False) -> None:
        super().__init__(f"{name}: {error}")
        self.error, self.known, self.refused = error, known, refused
        self.has_different_data = same_samples.DIFFERENT in error
        """The ranks did not have the same samples."""


def values_of(name: str, answers: Sequence[Any]) -> list[Any]:
    """What the ranks of an experiment returned, in rank order.

    Raises:
        ExperimentFailed: a rank failed, or its process ended.
    """
    # Processes that ended by themselves first, then those that were killed because of them.
    ended = sorted((answer for answer in answers if isinstance(answer, WorkerEnded)), key=lambda end: end.reason)
    failed = sorted(
        (answer for answer in answers if isinstance(answer, Answer) and answer.error),
        key=lambda answer: (not answer.refused, answer.known),
    )
    crashed = any(not end.reason for end in ended)
    # If a process crashed, the other ranks only report that: the crash itself is more informative.
    only_reports_crash = crashed and failed and failed[0].known and not failed[0].refused
    if failed and not only_reports_crash:
        raise ExperimentFailed(name, str(failed[0].error), known=failed[0].known, refused=failed[0].refused)
    if ended:
        raise ExperimentFailed(name, "; ".join(map(str, ended)))
    return [answer.value for answer in answers]


def once(method: Method) -> Method:
    """Call the method once for the same arguments, and keep its result, or its `ExperimentFailed`."""

    @functools.wraps(method)
    def kept(self: ExperimentRunner, *arguments: Any) -> Any:
        key = (method, arguments)
        if key not in self._outcomes:
            try:
                self._outcomes[key] = method(self, *arguments)
            except ExperimentFailed as error:
                self._outcomes[key] = error
        outcome = self._outcomes[key]
        if isinstance(outcome, ExperimentFailed):
            raise outcome.with_traceback(None)
        return outcome

    return kept  # type: ignore[return-value]


@dataclass
class ExperimentRunner:
    """Runs trainings and evaluations on workers, and keeps their results."""

    config: Mapping[str, Any]
    """Of the training to verify, with a number as its global batch."""
    nproc: int
    """Number of ranks."""
    folder: Path
    """The folder of the experiments. Each training has its own folder in it, with its name."""
    workers: Workers
    steps: int = 12
    """Of a training that is compared with another."""
    learning_steps: int = 60
    """Of the training that must learn something."""
    patience: int = 4
    """The factor on `learning_steps` if the first training was inconclusive."""
    wrap: Callable[..., Any] = worker_functions.answering
    """Calls the function on a rank. Tests pass a function that breaks the engine first."""
    deterministic: bool | None = None
    """True if trainings that must repeat exactly use deterministic kernels. None: on a GPU they do."""
    not_deterministic: str = ""
    """The operation without a deterministic kernel, so that these trainings use none. Empty: none is known."""
    _outcomes: dict[Any, Any] = field(default_factory=dict)
    _longest_learning: int = 1
    _loss_communicates: bool = False

    def __post_init__(self) -> None:
        if self.deterministic is None:
            self.deterministic = self.config["device"] != "cpu" and devices.gpus() > 0

    # ---- configs

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return int(self.config["batch"]["global"])

    @property
    def train_samples(self) -> int:
        """Training samples of a comparison. An epoch has four steps and a partial fifth, so that it ends soon."""
        return 4 * self.global_batch + max(1, self.global_batch // 3)

    @property
    def groups(self) -> int:
        """Number of tensor groups that samples are divided over. Without a mesh, each rank is a group."""
        return max(1, self.nproc // int(self.config["parallel"]["tensor"]))

    @property
    def hybrid_sharding(self) -> bool:
        """True if parameters are sharded within groups of ranks, and replicated between the groups."""
        groups = self.config["parallel"]["shard_ranks"]
        return self.strategy == "fsdp" and groups is not None and groups < self.nproc

    @property
    def gpus(self) -> int:
        """Number of GPUs on which ranks may compute."""
        return 0 if self.config["device"] == "cpu" else devices.gpus()

    @property
    def most_ranks(self) -> int:
        """The largest world on this machine: a rank per GPU, or without GPUs one rank more than requested."""
        return self.gpus or self.nproc + 1

    @property
    def strategy(self) -> str:
        """The config's strategy on several ranks."""
        strategy = str(self.config["parallel"]["strategy"])
        return "ddp" if strategy == "single" else strategy

    @property
    def small_micro_batch(self) -> int:
        """The size of a micro-batch that gives each group about three per step, not all of the same size."""
        return max(1, -(-self.global_batch // (3 * self.groups)) - 1)

    def short_config(self, **changes: Any) -> dict[str, Any]:
        """The config as it is, except for a short training.

        Args:
            changes: values by dotted path, with two underscores for the dot.
        """
        config: dict[str, Any] = copy.deepcopy(dict(self.config))
        steps = changes.get("train__steps", self.steps)
        short = {
            "parallel__strategy": self.strategy,
            "train__epochs": None,
            "train__min_steps": None,
            "train__steps": steps,
            "train__stop_when": None,
            "train__max_time": None,
            "train__parts": [],
            "train__allow_mean_loss": True,  # a check reports how far the gradient is off
            "data__eval_limit": None,
            "data__samples_per_epoch": None,
            "train__eval_every_epochs": None,
            "train__eval_every_steps": 0,
            "schedule__warmup_steps": min(config["schedule"]["warmup_steps"], steps // 4),
            "log__every_steps": 1,
            "log__writers": ["text_log", "json_lines"],
            "log__model_summary": False,
            "log__pictures": 0,
            "log__flops": False,
            "log__train_metrics": False,
            "checkpoint__every_steps": 0,
            "checkpoint__keep_best": None,
            "checkpoint__keep_every_steps": None,
            "checkpoint__keep_last": 1,
        }
        if config["schedule"]["plateau"] is not None:  # without evaluations, its factor is 1
            short |= {"schedule__name": "constant", "schedule__plateau": None}
        if self._loss_communicates:
            # Ranks that make such collectives unequally often wait for each other.
            short["parallel__timeout_s"] = min(config["parallel"]["timeout_s"], _TIMEOUT_OF_COLLECTIVES_S)
        for path, value in (short | changes).items():
            *sections, key = path.split("__")
            section = config
            for name in sections:
                section = section[name]
            section[key] = value
        return config

    def exact_config(self, **changes: Any) -> dict[str, Any]:
        """The same without autocast, TF32 and compiled code, which round differently."""
        formats = {"precision": "fp32", "parallel__param_dtype": None, "parallel__reduce_dtype": None}
        compute = {"compute__compile": None, "compute__compile_mode": "default", "compute__matmul_precision": "highest"}
        return self.short_config(**formats, **compute, **changes)

    def config_with_checkpoints(self, **changes: Any) -> dict[str, Any]:
        """The short config, with checkpoints on the way."""
        every = max(1, self.steps // 4)
        exact = {"compute__deterministic": True} if self.deterministic else {}
        return self.short_config(checkpoint__every_steps=every, checkpoint__keep_last=2, **exact, **changes)

    def exact_changes(self, reverse: bool = False) -> TaskChanges:
        """The changes to the task for comparisons of different numbers of ranks.

        An epoch ends with fewer samples than groups, so some ranks get a filler.
        """
        probe, remainder = self.probe(), min(self.groups - 1, self.global_batch - 1)
        return TaskChanges(
            exact=True,
            float64=probe.float64,
            reverse=reverse,
            train_samples=4 * self.global_batch + remainder if remainder else self.train_samples,
            fixed_buffers=tuple(probe.moving_buffers),
        )

    # ---- running experiments

    def train(
        self,
        name: str,
        world: int,
        config: Mapping[str, Any],
        *,
        changes: TaskChanges,
        record: RecorderOptions | None = None,
        resume: str | None = None,
        keep: bool = True,
        **more: Any,
    ) -> list[Recording]:
        """Train on `world` ranks.

        Args:
            name: of the experiment and of its folder.
            changes: to the task.
            record: what is recorded besides samples and losses.
            resume: the name of an earlier training, whose folder this training uses and resumes.
            keep: whether its checkpoint will be needed.
            more: further fields of `TrainingRun`.

        Returns:
            What was recorded on each rank.

        Raises:
            ExperimentFailed: some rank failed.
        """
        run = TrainingRun(name, world, config, str(self.folder / (resume or name)), changes, record, **more)
        recordings = self.run(name, world, worker_functions.train, run)
        if not keep:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return recordings

    def run(self, name: str, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on each of `world` ranks.

        Returns:
            Its return value on each rank.

        Raises:
            ExperimentFailed: some rank failed.
        """
        answers = self.workers.run(world, self.wrap, function, *arguments)
        return values_of(name, answers)

    # ---- facts about the task

    @once
    def probe(self) -> TaskProbe:
        """The facts that a forward and a backward pass show about the task."""
        (probe,) = self.run("task-probe", 1, probe_task, self.short_config(), self.train_samples)
        self._loss_communicates = bool(probe.collectives)
        return probe  # type: ignore[no-any-return]

    @once
    def cut(self) -> str:
        """What differs in the model that a mesh shards; see `cut_model`. Empty: nothing, or there is no mesh."""
        return cut_model.examined(self)

    @once
    def data_sizes(self) -> tuple[int, int]:
        """Number of training samples and of evaluation samples."""
        (sizes,) = self.run("data-sizes", 1, worker_functions.data_sizes, self.short_config())
        return sizes  # type: ignore[no-any-return]

    @once
    def train_lengths(self, count: int | None) -> list[int] | None:
        """The lengths of `count` training samples (None: of all), if they determine the order. None: they do not."""
        if not self.config["data"]["group_by_length"]:
            return None
        (lengths,) = self.run("train-lengths", 1, worker_functions.train_lengths, self.short_config(), count)
        return lengths  # type: ignore[no-any-return]

    @once
    def epoch_length(self, short: bool) -> int:
        """Number of samples of an epoch, with `short_config` or with the config as it is."""
        config = self.short_config() if short else self.config
        (length,) = self.run("epoch-length", 1, worker_functions.epoch_length, config)
        return length  # type: ignore[no-any-return]

    @once
    def planned_draws(self, count: int) -> list[list[int]] | None:
        """The samples of each step if the data set of `count` samples draws them. None: an epoch has each once."""
        (found,) = self.run("draws", 1, worker_functions.planned_draws, self.short_config(), count, self.steps)
        return found  # type: ignore[no-any-return]

    @once
    def data_remarks(self) -> list[str]:
        """The facts about the data that may make a metric too good."""
        return self.run("data-probe", 1, probe_data, self.short_config())[0]  # type: ignore[no-any-return]

    @once
    def dependence_on_hashes(self) -> str:
        """Data that a different interpreter reads differently; see `hash_seed`. Only for tasks in files."""
        config = self.short_config()
        if ".py:" not in str(config["task"].get("kind", "")):
            return ""
        other = OtherInterpreter(config)
        first, second = (self.run(f"hash-seed-{number}", 1, digests, config)[0] for number in range(2))
        return other.difference(first) if first == second else ""  # else `determinism` reports it

    @once
    def baseline(self) -> ConstantBaseline:
        """Loss and metrics of the best constant output."""
        (baseline,) = self.run("baseline", 1, constant_baseline, self.short_config(), _BASELINE_SAMPLES)
        return baseline  # type: ignore[no-any-return]

    # ---- trainings that several checks use

    @once
    def one_process(self) -> list[Recording]:
        """One process with the whole global batch as its micro-batch: the reference for other trainings."""
        config = self.exact_config(batch__micro=None)
        record = RecorderOptions(repeat_updates=True)
        return self.train("one-process", 1, config, changes=self.exact_changes(), record=record)

    @once
    def one_process_reversed(self) -> list[Recording]:
        """The same with the samples of each batch in reversed order, which rounds differently."""
        config = self.exact_config(batch__micro=None)
        return self.train("one-process-reversed", 1, config, changes=self.exact_changes(reverse=True))

    @once
    def all_ranks(self) -> list[Recording]:
        """All ranks with one micro-batch each."""
        config = self.exact_config(batch__micro=None)
        return self.train(f"{self.nproc}-ranks", self.nproc, config, changes=self.exact_changes())

    @once
    def accumulated(self) -> list[Recording]:
        """All ranks with several uneven micro-batches each.

        Some gradients are compared with plain torch's, one of them that of the partial batch at the end of an epoch.
        """
        config = self.exact_config(batch__micro=self.small_micro_batch)
        record = RecorderOptions(gradient_steps=(0, min(4, self.steps - 1), self.steps - 2))
        return self.train("accumulated", self.nproc, config, changes=self.exact_changes(), record=record)

    @once
    def undisturbed(self) -> list[Recording]:
        """All ranks, the unchanged training, with checkpoints on the way; on a GPU with deterministic kernels.

        If an operation has no deterministic kernel, `not_deterministic` names it, and the training runs without.
        """
        try:
            return self._undisturbed()
        except ExperimentFailed as failed:
            if not self.deterministic or "has no deterministic implementation" not in failed.error:
                raise
            self.deterministic, self.not_deterministic = False, failed.error.splitlines()[0]
            shutil.rmtree(self.folder / "undisturbed", ignore_errors=True)
            return self._undisturbed()

    def _undisturbed(self) -> list[Recording]:
        record = RecorderOptions(digest_every=1, digest_batches=True, probe_steps=(1, self.steps // 2, self.steps))
        compiled = bool(self.config["compute"]["compile"])  # compiled code cannot look at the generators
        changes = TaskChanges(train_samples=self.train_samples, note_generators=not compiled)
        config = self.config_with_checkpoints()
        return self.train("undisturbed", self.nproc, config, changes=changes, record=record, slow_writing=True)

    @once
    def undisturbed_again(self) -> list[Recording]:
        """The same training a second time, with different states of the random generators between the steps."""
        record = RecorderOptions(digest_every=1, digest_batches=True, disturb_generators=True)
        changes, config = TaskChanges(train_samples=self.train_samples), self.config_with_checkpoints()
        return self.train("again", self.nproc, config, changes=changes, record=record, keep=False)

    @once
    def without_recomputation(self) -> list[Recording]:
        """The same without `compute.activation_checkpointing`."""
        record = RecorderOptions(digest_every=1, digest_batches=True)
        changes = TaskChanges(train_samples=self.train_samples)
        config = self.config_with_checkpoints(compute__activation_checkpointing=False)
        return self.train("not-recomputed", self.nproc, config, changes=changes, record=record, keep=False)

    @once
    def learned(self, factor: int) -> list[Recording]:
        """All ranks, the unchanged training, on all its data, for `factor` times `learning_steps`."""
        self._longest_learning = max(self._longest_learning, factor)
        config = self.short_config(train__steps=self.learning_steps * factor)
        record = RecorderOptions(unused_parameters=True)
        return self.train(f"learned-{factor}", self.nproc, config, changes=TaskChanges(), record=record)

    def learned_folder(self) -> Path:
        """The run directory of the longest training by `learned` so far."""
        return self.folder / f"learned-{self._longest_learning}"

    # ---- comparing with one process

    def rounding_bound(self) -> float:
        """The largest difference from `one_process` that rounding explains."""
        return self._bound_of(self.difference_from_one_process("one-process-reversed", self.one_process_reversed()))

    def own_rounding_bound(
        self, name: str, recordings: list[Recording], train: Callable[[str], list[Recording]]
    ) -> float | None:
        """The largest difference that rounding explains in the training `name`. None: a repetition differs from it.

        Args:
            train: trains as `<name>-again`, and with the samples of each micro-batch in reversed order as
                `<name>-reversed`. It gets `again` or `reversed`.
        """
        if self._difference(name, recordings, f"{name}-again", train("again")).largest:
            return None
        return self._bound_of(self._difference(name, recordings, f"{name}-reversed", train("reversed")))

    def _bound_of(self, noise: TrainingDifference) -> float:
        return compare.rounding_bound(noise, epsilon=self.probe().epsilon, steps=len(self.one_process()[0].losses))

    def difference_from_one_process(self, name: str, recordings: list[Recording]) -> TrainingDifference:
        """The distance of the weights and losses of the training `name` from those of `one_process`."""
        return self._difference("one-process", self.one_process(), name, recordings)

    def _difference(
        self, name: str, recordings: list[Recording], other: str, others: list[Recording]
    ) -> TrainingDifference:
        checkpoint, other_checkpoint = newest(self.folder / name), newest(self.folder / other)
        if checkpoint is None or other_checkpoint is None:
            raise ExperimentFailed(other if checkpoint else name, "it left no checkpoint")
        (reference,) = self.one_process()
        return compare.difference(
            checkpoint,
            other_checkpoint,
            reference.parameters,
            moved=reference.moved,
            losses=recordings[0].losses,
            other_losses=others[0].losses,
        )
