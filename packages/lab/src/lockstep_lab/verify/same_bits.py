"""Trainings with virtual ranks on different numbers of ranks: their runs, the first difference and its cause."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import listed, number_of
from lockstep_lab.verify.comparable_task import TaskChanges
from lockstep_lab.verify.experiments import ExperimentRunner, once
from lockstep_lab.verify.next_step import target
from lockstep_lab.verify.recorder import RecorderOptions, Recording
from lockstep_lab.verify.reference.checkpoint import newest

if TYPE_CHECKING:
    from lockstep.parts.replicas import StateDigests

_VIRTUAL_RANKS, _MOST_STEPS, _EVAL_SAMPLES = 4, 8, 23
_NOT_COMPARED = ("time", "wait_share", "_per_s", "mfu", "memory/", "health/")  # in names of figures of the log
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Way:
    """How a training is run."""

    parts: tuple[tuple[int, int | None], ...]
    """(number of ranks, step after which it is stopped) of each start."""

    def __str__(self) -> str:
        counts = [ranks for ranks, _ in self.parts]
        return number_of(counts[0], "rank") if len(counts) == 1 else f"{', then '.join(map(str, counts))} ranks"


@dataclass
class BitsOutcome:
    """What a training did, by number of steps done."""

    entries: dict[int, dict[str, float]] = field(default_factory=dict)
    """The logged figures, without times."""
    batches: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Digests of the micro-batches of all virtual ranks, in their order."""
    digests: dict[int, list[StateDigests]] = field(default_factory=dict)
    """Digests of the state on each rank."""
    checkpoint: str = ""
    """SHA-256 of the files of the last checkpoint, without its manifest, which has the time."""

    def add(self, recordings: list[Recording]) -> None:
        """Add a start of the training: what each rank recorded."""
        for entry in recordings[0].entries:
            figures = {name: value for name, value in entry.items() if not any(word in name for word in _NOT_COMPARED)}
            self.entries.setdefault(int(entry["step"]), {}).update(figures)
        for step in recordings[0].batches:
            self.batches[step + 1] = [batch for one in recordings for batch in one.batches.get(step, [])]
        for step in recordings[0].digests:
            self.digests[step] = [recording.digests.get(step, {}) for recording in recordings]


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of two trainings."""

    step: int
    words: str
    tensors: int
    """Number of tensors that differ."""
    in_batch: bool
    """True if a virtual rank got a different batch."""


def virtual_ranks(experiments: ExperimentRunner) -> int:
    """The config's number of virtual ranks, or at least 4."""
    return experiments.config["parallel"]["virtual_ranks"] or max(_VIRTUAL_RANKS, experiments.nproc)


def steps(experiments: ExperimentRunner) -> int:
    """Of each training: past the end of an epoch."""
    return min(experiments.steps, _MOST_STEPS)


def ways(experiments: ExperimentRunner, most: int) -> list[Way]:
    """On 1 to 4 ranks, and one that changes its number of ranks twice.

    Args:
        most: number of ranks.
    """
    most, length = min(4, virtual_ranks(experiments), most), steps(experiments)
    changing = (most, length // 3), (1, 2 * length // 3), (max(2, most - 1), None)
    return [*(Way(((ranks, None),)) for ranks in range(1, most + 1)), Way(changing)]


@once
def train(experiments: ExperimentRunner, way: Way, again: bool = False) -> BitsOutcome:
    """Run a training with virtual ranks in this way.

    Args:
        again: for a second run.
    """
    outcome, name = BitsOutcome(), f"bits-{'-'.join(str(ranks) for ranks, _ in way.parts)}{'-again' * again}"
    for ranks, stop_at in way.parts:
        recordings = experiments.train(
            name,
            ranks,
            _config(experiments),
            changes=_changes(experiments),
            record=RecorderOptions(digest_every=1, digest_batches=True),
            stop_at=stop_at,
        )
        outcome.add(recordings)
    if saved := newest(experiments.folder / name):
        outcome.checkpoint = _sha256(saved.path)
    shutil.rmtree(experiments.folder / name, ignore_errors=True)
    return outcome


def _config(experiments: ExperimentRunner, **more: Any) -> dict[str, Any]:
    has_eval = experiments.data_sizes()[1] > 0
    return experiments.short_config(
        train__steps=steps(experiments),
        train__eval_every_steps=steps(experiments) // 2 if has_eval else 0,
        log__train_metrics=True,
        batch__global=_global_batch(experiments),
        parallel__strategy="ddp",
        parallel__tensor=1,
        parallel__static_graph=False,
        parallel__virtual_ranks=virtual_ranks(experiments),
        watch__every=0,
        compute__compile=None,  # refused with virtual ranks, as are those below
        compute__compile_mode="default",
        compute__cudnn_benchmark=False,
        **more,
    )


def _changes(experiments: ExperimentRunner) -> TaskChanges:
    batch = _global_batch(experiments)
    last = min(batch, max(batch // 3, _least_batch(experiments)))
    return TaskChanges(train_samples=4 * batch + last, eval_samples=_EVAL_SAMPLES)


def _global_batch(experiments: ExperimentRunner) -> int:
    return max(experiments.global_batch, _least_batch(experiments))


def _least_batch(experiments: ExperimentRunner) -> int:
    """Two samples for each virtual rank: BatchNorm needs two."""
    return 2 * virtual_ranks(experiments)


def _sha256(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json":
            found.update(path.name.encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    found.update(chunk)
    return found.hexdigest()


# ---- differences


def first_difference(first: BitsOutcome, other: BitsOutcome, count: int) -> FirstDifference | None:
    """The first difference of two trainings; None if they have the same bits.

    Args:
        count: number of virtual ranks.
    """
    for step in sorted(first.digests.keys() | other.digests.keys() | first.entries.keys() | other.entries.keys()):
        texts = [text for text in (_batch(first, other, step, count), _figure(first, other, step)) if text]
        names = _tensors(first.digests.get(step, []), other.digests.get(step, []))
        if names:
            texts.append(f"{names[0]} and {number_of(len(names) - 1, 'other tensor', 'differs', 'differ')}")
        if texts:
            in_batch = first.batches.get(step) != other.batches.get(step)
            words = f"after step {step} " if step else "before the first step "
            return FirstDifference(step, words + "; ".join(texts), len(names), in_batch)
    if first.checkpoint != other.checkpoint:
        return FirstDifference(max(first.digests, default=0), "the files of the last checkpoint differ", 0, False)
    return None


def _batch(first: BitsOutcome, other: BitsOutcome, step: int, count: int) -> str:
    batches, others = first.batches.get(step, []), other.batches.get(step, [])
    if len(batches) != len(others):
        return f"there are {len(batches)} and {len(others)} micro-batches"
    differing = [place for place, pair in enumerate(zip(batches, others, strict=True)) if pair[0] != pair[1]]
    return f"virtual rank {differing[0] * count // len(batches)} had a different batch" if differing else ""


def _figure(first: BitsOutcome, other: BitsOutcome, step: int) -> str:
    figures, others = first.entries.get(step, {}), other.entries.get(step, {})
    for name in [*figures, *(others.keys() - figures.keys())]:
        if repr(figures.get(name)) != repr(others.get(name)):
            return f"{name} is {figures.get(name)!r} and {others.get(name)!r}"
    return ""


def _tensors(digests: list[StateDigests], others: list[StateDigests]) -> list[str]:
    """Names of the tensors that some rank has with other bits."""
    reference = digests[0] if digests else {}
    names = dict.fromkeys(name for held in [*digests, *others] for name in held)
    return [name for name in names if any(held.get(name) != reference.get(name) for held in [*digests, *others])]


# ---- causes


def cause(experiments: ExperimentRunner, way: Way, outcome: BitsOutcome, found: FirstDifference) -> str:
    """The likely cause why a training in this way differs from that on one rank, and what to do next."""
    examined = _examined(experiments)
    changed = sorted({name for recording in examined for name in recording.changed_outside})
    reads = sorted({read for recording in examined for read in recording.reads_of_rank})
    repeated = train(experiments, way, True)
    if first_difference(outcome, repeated, virtual_ranks(experiments)) is not None:
        reason = experiments.probe().cause_of_indeterminism() or (
            "the batches themselves: reading or preparing a sample draws numbers that the seed does not determine"
            if found.in_batch
            else "a kernel that is not deterministic, or a draw that the seed does not determine"
        )
        state = f", or {_state(changed)}" if changed else ""
        text = f"{way} differ when they are repeated, too. Likely cause: {reason}{state}"
        return f"{text}. Next: {_command(experiments, 'determinism')}"
    again = f"then {_command(experiments, 'bits')}"
    if reads:
        text = f"the rank is read: {listed(reads, 3)}"
        return f"Likely cause: {text}. Next: derive what it decides from the samples, {again}"
    if changed:
        keep = "draw from torch's global generator, which is seeded" if "generator" in changed[0] else _KEEP
        return f"Likely cause: {_state(changed)}. Next: {keep}, {again}"
    if found.in_batch:
        text = "reading or preparing a sample depends on what the process has read before"
        return f"Likely cause: {text}. Next: let it depend on (epoch, sample) alone, {again}"
    return (
        "No code that reads the rank was found, and no state that changes outside of buffers. Next: look for state in "
        f"closures and in objects of other libraries, {again}"
    )


_KEEP = "register it as a buffer, or compute it from the step"


def _state(changed: list[str]) -> str:
    return f"state outside of the model's buffers, which each forward pass or sample changes: {listed(changed, 3)}"


def _examined(experiments: ExperimentRunner) -> list[Recording]:
    """Two steps on two ranks, which look for state outside of buffers and for reads of the rank."""
    return experiments.train(
        "bits-examined",
        2,
        _config(experiments, data__workers=0),
        changes=_changes(experiments),
        record=RecorderOptions(dependence=True),
        stop_at=2,
        keep=False,
    )


def _command(experiments: ExperimentRunner, check: str) -> str:
    return f"lockstep verify {target(experiments.config)} --checks {check}"
