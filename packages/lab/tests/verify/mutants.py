"""Mutants: engines and tasks with one fault each, which `lockstep verify` must find.

Most mutants edit a function of the package by its syntax tree; see `edits`. The edited code goes into the function
object, so that everybody who imported the function calls the broken code. Workers are shared between tests, so each
edit is taken back.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from packages.lab.tests.verify.edits import Edit, edited_code, function_of

HERE = Path(__file__).resolve().parent
TASKS = HERE / "broken_tasks.py"
ENGINE_FAULTS = HERE / "engine_faults.txt"

COMMON = (
    "batch.global=20",
    "train.steps=40",
    "optim.lr=0.02",
    "optim.weight_decay=0.01",
    "optim.clip_norm=0.5",
    "optim.lr_scaling=linear",
    "optim.reference_batch=40",
    "schedule.name=cosine",
    "schedule.warmup_steps=4",
    "parallel.timeout_s=60",
    "device=cpu",
)

# By name: the task's class and what its config has besides COMMON. Each is right.
BASES: dict[str, tuple[str, ...]] = {
    "classes": ("Classes",),
    "micro-batches": ("Classes", "batch.micro=3"),
    "dropout": ("Classes", "task.dropout=0.3"),
    "norm": ("Classes", "task.norm=true", "task.length=204"),
    "masked": ("Masked",),
    "masked-micro-batches": ("Masked", "batch.micro=3"),
    "heads": ("TwoHeads",),
    "few": ("Classes", "batch.global=4", "optim.reference_batch=8"),
    "few-masked": ("Masked", "batch.global=4", "optim.reference_batch=8"),
    "ema": ("Classes", "train.ema_decay=0.9"),
    "fp16": ("Classes", "precision=fp16"),
    "overflow": ("Classes", "precision=fp16", "task.factor=300.0"),
    "fsdp": ("Classes", "parallel.strategy=fsdp"),
    "fsdp-ema": ("Classes", "parallel.strategy=fsdp", "train.ema_decay=0.9"),
    "fsdp-norm": ("Classes", "parallel.strategy=fsdp", "task.norm=true", "task.length=204"),
    "workers": ("Classes", "data.workers=1"),
    "dropout-workers": ("Classes", "data.workers=1", "task.dropout=0.3"),
    "groups": ("Classes", "optim.groups=[{name: biases, match: ['*bias'], weight_decay: 0.0, lr: 0.1}]"),
    "momentum": ("Classes", "optim.name=SGD", "optim.lr=0.2", "optim.args={momentum: 0.9}"),
    "unfreeze": ("Classes", "train.unfreeze=[{match: ['body.*'], step: 3}]"),
    "drop-last": ("Classes", "data.drop_last=true"),
    "unused": ("Classes", "parallel.find_unused_parameters=true"),
    "sync": ("Classes", "checkpoint.mode=sync"),
    "tensors": ("Tensors",),
    "on-the-object": ("OnTheObject",),
    "many": ("Many",),
    "rarely": ("Rarely",),
    "forked": ("Forked",),
    "mixed-in-loss": ("MixedInLoss",),
    "mixed-in-loss-by-python": ("MixedInLoss", "task.generator=random"),
    "mixed-in-collate": ("MixedInCollate",),
    "heads-by-rank": ("HeadsByRank",),
    "frozen-norm": ("FrozenNorm", "task.length=204"),
    "wide": ("Classes", "batch.global=128", "optim.reference_batch=128"),
    "tokens": ("Tokens",),
    "grouped": ("Grouped", "data.group_by_length=2"),
    "weighted": ("Weighted",),
    "balanced": ("Classes", "data.balance=label"),
    "own-order": ("OwnOrder",),
    "following": ("Following",),
}


@dataclass(frozen=True)
class Mutant:
    """A training with one fault: edits of the engine, a broken task, or a wrong config."""

    name: str
    check: str
    """The check that must find the fault."""
    base: str = "classes"
    """The training without the fault; a key of BASES."""
    edits: tuple[Edit, ...] = ()
    task: str | None = None
    """A broken class that replaces the base's class."""
    overrides: tuple[str, ...] = ()
    """Options that make the config wrong."""
    says: str = ""
    """A text that names the cause, which the reason of the check must hold."""
    note: bool = False
    """Whether what is wrong may be meant so. Then `says` must be in a note of the check, and nothing is a fault."""

    def is_found(self, outcome: Outcome) -> bool:
        """Whether the check found the fault, and named its cause."""
        result = outcome.checks.get(self.check)
        if result is None:
            return False
        if self.note:
            return any(self.says in note for note in result.notes)
        return result.status == "fault" and self.says in result.reason

    @property
    def words(self) -> str:
        """What is broken."""
        if self.task:
            from packages.lab.tests.verify import broken_tasks

            text = (getattr(broken_tasks, self.task).__doc__ or "").split("\n\n")[0]
            return f"task: {' '.join(text.split())}"
        if self.overrides:
            return f"core.config.sections: {', '.join(self.overrides)}"
        return "; ".join(f"{target}: `{node}` became `{' '.join(new.split())}`" for target, node, new in self.edits)


MUTANTS: dict[str, Mutant] = {}


def _read_engine_faults() -> None:
    """A line with the check, the name and options; below it, indented, a line for each edit."""
    for block in re.split(r"\n+(?! )", ENGINE_FAULTS.read_text().strip()):
        head, *lines = block.splitlines()
        check, name, *options = head.split(" | ")
        edits = [line.strip().split(" | ", 2) for line in lines]
        more: dict[str, Any] = dict(option.split("=", 1) for option in options)
        MUTANTS[name] = Mutant(name, check, edits=tuple((at, node, new) for at, node, new in edits), **more)


def _task(name: str, check: str, task: str, base: str = "classes", *, says: str = "", note: bool = False) -> None:
    MUTANTS[name] = Mutant(name, check, base, task=task, says=says, note=note)


def _config(name: str, check: str, *overrides: str, base: str = "classes") -> None:
    MUTANTS[name] = Mutant(name, check, base, overrides=overrides)


_read_engine_faults()

# ---- loss: the training goes nowhere

_config(
    "learning rate far too high",
    "loss",
    "optim.name=SGD",
    "optim.weight_decay=0",
    "optim.lr=4000.0",
    "optim.clip_norm=null",
)

# ---- metric: something is learned, but not what is evaluated

_task("labels rolled against inputs", "metric", "LabelsRolled")
_task("channels in another order in evaluation", "metric", "ChannelsSwapped")
_task("other class numbers in evaluation", "metric", "OtherClassNumbers")
_task("metric of the wrong target", "evaluation", "WrongTarget")
_task("mean over the metrics of batches", "evaluation", "MeanOfBatches")
_task("predictions from negated logits", "metric", "NegatedLogits")
_task("loss with the wrong sign", "metric", "Uphill")

# ---- overfit: not even eight samples

_task("labels drawn anew in each epoch", "metric", "LabelsDrawn")
_task("logits behind a closed gate", "overfit", "LogitsOff")
_task("inputs averaged over the batch", "overfit", "InputsAveraged")
_task("softmax over samples", "ranks", "SoftmaxOverSamples")
_config("learning rate a million times too small", "overfit", "optim.lr=2.0e-8")

# ---- gradients: what the optimizer gets

_config("warm-up that never ends", "gradients", "schedule.warmup_steps=40")
_task("torch seeded with the same number for every sample", "samples", "SeedsTorch")
_task("NumPy seeded with the same number for every sample", "samples", "SeedsNumpy")
_task("dead branch", "gradients", "DeadBranch")
_task("detached body", "gradients", "DetachedBody", base="unused")
_task("dead units before a ReLU", "gradients", "DeadUnits")
_task("model put into evaluation mode by the loss", "gradients", "EvaluationMode")

# ---- predictions: all alike, or somebody else's

_task("prediction of one class", "predictions", "OneClass")
_task("first output for the whole batch", "predictions", "FirstOfBatch")
_task("predictions from another model", "predictions", "FreshModel")
_task("every input blank", "predictions", "InputsBlank")
_task("probability shown as the class", "predictions", "ProbabilityAsClass")

# ---- ranks: another model on two than on one

_task("class numbers in the order of hashes", "ranks", "ClassesInHashOrder", says="order of a set")
_task("loss depends on the rank", "ranks", "PerRankLoss", says="Task.loss depends on the rank")
_task("samples influence each other", "ranks", "CoupledLoss")
_task(
    "outputs compared with the labels of all samples", "ranks", "OutputsAgainstAllLabels", says="influence each other"
)

# ---- accumulation: another model with several micro-batches

_task("mean where a sum is asked for", "accumulation", "MeanLoss", says="must return a SUM")
_task("mean over valid targets of the micro-batch", "accumulation", "MaskedMean")
_task("mean over samples with their negatives", "accumulation", "MeanContrast", says="must return a SUM")
_task("mean over samples with their class", "accumulation", "MeanClassContrast", says="must return a SUM")
_task("mean over pairs of samples", "accumulation", "MeanOfPairs", says="must return a SUM")
_task("mean in one of two heads", "accumulation", "MeanOfOneHead", base="heads")
_task("weight that does not add up", "accumulation", "WeightIsShare", says="Task.weight must add up")
_task("weight of small batches rounded up", "accumulation", "WeightAtLeastFour", says="Task.weight")
_task("penalty once per micro-batch", "accumulation", "RegularisedPerBatch")

# ---- samples: lost, repeated, shared

_task("data set drawn by each rank", "samples", "DataOfEachRank", says="the ranks have different training data")

# ---- determinism: another result the second time

_task("noise from the operating system in the loss", "determinism", "NoisyLoss", says="the loss of the same batch is")
_task("loss depends on the clock", "determinism", "ReadsLoss")
_task("augmentation from default_rng()", "determinism", "FreshGenerator")
_task("augmentation seeded with the clock", "determinism", "TimedNoise")
_task("augmentation that counts reads", "resume", "CountsReads")

# ---- what the checks did not look at before

_task(
    "noise from the operating system in evaluation",
    "predictions",
    "NoisyInEvaluation",
    says="returns different outputs for the same batch and seed",
)
_task("dropout in evaluation by mistake", "predictions", "DropoutInEvaluation", says="drops features at random")
_task("model seeded with the clock", "determinism", "ClockSeededModel", says="initial weights")
_task("model whose mode depends on the clock", "determinism", "ModeByClock", says="body.scale")
_task("a branch of the model on rank 0 alone", "ranks", "BranchOnFirstRank", base="unused", says="depends on the rank")
_task(
    "a branch of the model on rank 0 of the group alone",
    "ranks",
    "BranchOnFirstRankOfGroup",
    base="unused",
    says="depends on the rank",
)
_task("padding counted by the weight", "gradients", "PaddingCounted", base="tokens", says="Task.weight", note=True)
_task("evaluation data among the training data", "metric", "EvaluatesTraining", says="training data", note=True)
_task("label among the inputs", "metric", "LabelAmongInputs", says="label", note=True)
_task("backward pass of a function of one's own is wrong", "gradients", "WrongBackward", says="derivative", note=True)


# ---- running them


def mutated(name: str, function: Any, *arguments: Any) -> Any:
    """For `command.verify(wrap=...)`: call the function on this rank with the edits of a mutant."""
    from lockstep_lab.verify import worker_functions

    with broken(MUTANTS[name]):
        return worker_functions.answering(function, *arguments)


@contextlib.contextmanager
def broken(mutant: Mutant) -> Iterator[None]:
    """Inside, the engine of this process has the edits of the mutant."""
    before: dict[FunctionType, CodeType] = {}
    try:
        for target in dict.fromkeys(target for target, _, _ in mutant.edits):
            function = function_of(target)
            before[function] = function.__code__
            function.__code__ = edited_code(function, [(node, new) for at, node, new in mutant.edits if at == target])
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def config_of(base: str, task: str | None = None, overrides: Sequence[str] = (), nproc: int = 2) -> dict[str, Any]:
    """The config of a base, as `command.verify` takes it."""
    from lockstep.configs import config_file

    file, *keys = arguments(Mutant(base, "", base, task=task, overrides=tuple(overrides)))
    settings = config_file.load(file, keys)
    return settings.model_copy(update={"batch": settings.batch.resolve(nproc)}).model_dump(by_alias=True)


def arguments(mutant: Mutant) -> list[str]:
    """The task and the keys of the config, as the command line takes them."""
    kind, *own = BASES[mutant.base]
    return [
        f"{TASKS}:{mutant.task or kind}",
        *_last_of([*COMMON, *own, *mutant.overrides]),
        f"name={mutant.base}",
    ]


def _last_of(overrides: Sequence[str]) -> list[str]:
    return list({one.partition("=")[0]: one for one in overrides}.values())


@dataclass
class Outcome:
    """What verify said of a training."""

    checks: dict[str, Any]
    """The results, by check."""
    seconds: float
    error: str = ""

    @property
    def faults(self) -> list[str]:
        return [name for name, check in self.checks.items() if check.status == "fault"]


def verify_base(
    base: str, ranks: Any, folder: Path, checks: Sequence[str] = (), nproc: int = 2, steps: int = 8
) -> Outcome:
    """What verify says of a base as it is."""
    from lockstep_lab.verify import worker_functions

    return _verify(config_of(base, nproc=nproc), worker_functions.answering, ranks, folder, checks, nproc, steps)


def verify_mutant(
    name: str, ranks: Any, folder: Path, checks: Sequence[str] = (), nproc: int = 2, steps: int = 8
) -> Outcome:
    """What verify says of a mutant. checks: names of checks; empty: all."""
    mutant = MUTANTS[name]
    config = config_of(mutant.base, mutant.task, mutant.overrides, nproc)
    return _verify(config, functools.partial(mutated, name), ranks, folder, checks, nproc, steps)


def _verify(
    config: dict[str, Any], wrap: Any, ranks: Any, folder: Path, checks: Sequence[str], nproc: int, steps: int
) -> Outcome:
    from lockstep.core.errors import LockstepError
    from lockstep_lab.verify import command

    begun = time.perf_counter()
    try:
        result = command.verify(
            config,
            nproc,
            folder,
            checks=checks,
            quick=True,
            steps=steps,
            tell=lambda line: None,
            wrap=wrap,
            workers=ranks,
        )
        return Outcome({check.name: check for check in result.checks}, time.perf_counter() - begun)
    except LockstepError as error:
        return Outcome({}, time.perf_counter() - begun, str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
