"""A training of any shape as one value, a `Case`, and the config that it stands for.

What a `Case` prints is Python: `check_alone(Case(...))` of `tests.fuzz_runs` runs it again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


class Shown:
    """Prints only what is not the default."""

    def __repr__(self) -> str:
        given = [
            (f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True, repr=False)
class Head(Shown):
    """One loss.

    units: samples, labels (those that are valid) or fractions (the sum of weights). density: share of valid labels.
    constant: a loss without units is a tensor 0 that depends on nothing. watched: the loss is only logged; it is
    detached from the model.
    """

    name: str = "a"
    units: str = "samples"
    density: float = 1.0
    coefficient: float | None = None
    constant: bool = False
    watched: bool = False


@dataclass(frozen=True, repr=False)
class Draws(Shown):
    """Random numbers that a sample takes. where: data, prepare or both. when: always, or rarely (some samples).

    how: plainly, or with a generator that is made from the state (forked) or the seed (derived) of torch's.
    reseeds: the data set seeds all generators with the sample's index before it draws.
    """

    when: str = "always"
    source: str = "torch"
    gauss: bool = False
    where: str = "prepare"
    how: str = "plainly"
    reseeds: bool = False


@dataclass(frozen=True, repr=False)
class Noise(Shown):
    """Random numbers that a batch takes, in: loss, collate or model."""

    place: str = "loss"
    source: str = "torch"
    gauss: bool = False


@dataclass(frozen=True, repr=False)
class Case(Shown):
    """A task and a run. The defaults are the simplest of all; docs/config.md explains most of the names.

    heads: none for a loss that is one tensor. weighs: what `Task.weight` gives: None, a tensor or a float (by head).
    order: in which order loss and weight name the heads: same, rank (odd ranks reverse it), call (every second call
    does) or opposite (weight reverses it). own_heads: each head has parameters of its own.
    shape: of a batch. data: the kind of data set. prepare, collate: default, class, instance (set on the object),
    wrapped (on the object, by functools.wraps of what was there). broken: samples that cannot be read.
    in_place: `prepare` writes into the sample that it is given.
    norm: none, frozen (a BatchNorm that stays in evaluation mode) or live. modal: the model computes otherwise in
    evaluation. returned: the mode in which `Task.model` returns the model.
    tied: the first block has the weight of the first layer.
    resume_at: the run is stopped after so many steps, and goes on: on resume_world ranks (0: as many as before), with
    resume_strategy and resume_micro (None: as before). afterwards: evaluate or predict, with what was saved last.
    """

    world: int = 1
    strategy: str = "ddp"
    seed: int = 0
    # the task
    heads: tuple[Head, ...] = ()
    label: Head = Head()  # of the loss that is one tensor
    weighs: str | None = None
    order: str = "same"
    own_heads: bool = False
    calls: str = "forward"
    blocks: int = 0
    norm: str = "none"
    modal: bool = False
    returned: str = "train"
    frozen: bool = False
    tied: bool = False
    noise: tuple[Noise, ...] = ()
    # its data
    data: str = "tensors"
    length: int = 1
    shape: str = "tuple"
    leaf: str = "tensor"
    lengths: str | None = None
    where: bool = False
    prepare: str = "default"
    collate: str = "default"
    draws: Draws | None = None
    in_place: bool = False
    broken: tuple[int, ...] = ()
    broken_in: str = "data"
    on_error: str = "raise"
    eval_length: int = 1
    # the run
    global_batch: int = 1
    micro: int | None = None
    accumulate: int = 0  # with it, `micro` is batch.per_rank
    drop_last: bool = False
    workers: int = 0
    steps: int = 1
    epochs: int = 0
    log_every: int = 1
    eval_every: int = 0
    optimizer: str = "SGD"
    lr: float = 0.01
    lr_scaling: str = "none"
    weight_decay: float | None = None
    group_lr: float | None = None
    clip_norm: float | None = None
    schedule: str = "constant"
    warmup: int = 0
    end_factor: float = 0.0
    ema: float | None = None
    unfreeze: str = "inner.*"
    unfreeze_step: int = 0
    unfreeze_epoch: float = 0
    bucket_mb: float | None = None
    gradient_views: bool = True
    recompute: bool = False
    resume_at: int = 0
    resume_world: int = 0
    resume_strategy: str | None = None
    resume_micro: int | None = None
    afterwards: str | None = None

    @property
    def all_heads(self) -> tuple[Head, ...]:
        """Also the one without a name."""
        return self.heads or (dataclasses.replace(self.label, name="loss"),)

    @property
    def samples_per_step(self) -> int:
        """The global batch."""
        return self.micro * self.accumulate * self.world if self.accumulate else self.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Updates, with skipped ones."""
        return self.length // self.samples_per_step if self.drop_last else -(-self.length // self.samples_per_step)

    @property
    def stop(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch if self.epochs else self.steps


def allowed(case: Case) -> Case:
    """The same case, or its nearest that the documents allow."""
    if case.norm == "live" and not whole_batches(case):  # what BatchNorm does depends on the cut
        case = dataclasses.replace(case, norm="none")
    there = (
        {"inner.*"}
        | ({"blocks.*"} if case.blocks else set())
        | ({"out.1.*"} if case.own_heads and len(case.heads) > 1 else set())
    )
    if case.unfreeze not in there:  # patterns must match
        case = dataclasses.replace(case, unfreeze="inner.*")
    # FSDP needs the parameters that a constant does not reach. A loss that depends on nothing has no gradient.
    if "fsdp" in (case.strategy, case.resume_strategy) or case.unfreeze == "out.1.*":
        heads, label = (
            tuple(dataclasses.replace(head, constant=False) for head in some) for some in (case.heads, (case.label,))
        )
        case = dataclasses.replace(case, heads=heads, label=label[0])
    return case


def whole_batches(case: Case) -> bool:
    """Whether each global batch is one micro-batch of at least two samples."""
    whole = all(micro in (None, case.samples_per_step) for micro in (case.micro, case.resume_micro))
    return case.world == 1 and whole and not case.accumulate and not case.broken and min(sizes(case)) > 1


def smallest_micro_batch(case: Case) -> int:
    """Samples in the smallest micro-batch, where all ranks have equally many of at most `micro` samples."""
    at_most = min(case.micro or case.samples_per_step, -(-case.samples_per_step // case.world))
    return min(size // (case.world * -(-size // (case.world * at_most))) for size in sizes(case))


def sizes(case: Case) -> set[int]:
    """Samples of an epoch's global batches."""
    last = case.length % case.samples_per_step
    return {min(case.samples_per_step, case.length)} | ({last} if last and not case.drop_last else set())


def settings_of(case: Case) -> dict[str, Any]:
    """The config of a run."""
    if case.accumulate:
        batch: dict[str, Any] = {"per_rank": case.micro, "accumulate": case.accumulate}
    else:
        batch = {"global": case.global_batch, "micro": case.micro}
    train: dict[str, Any] = {"epochs": case.epochs} if case.epochs else {"steps": case.steps}
    unfreeze = {"epoch": case.unfreeze_epoch} if case.unfreeze_epoch else {"step": case.unfreeze_step}
    if case.unfreeze_step or case.unfreeze_epoch:
        train["unfreeze"] = [{"match": [case.unfreeze], **unfreeze}]
    momentum = {"args": {"momentum": 0.9}} if case.optimizer == "momentum" else {}
    groups = (
        [] if case.group_lr is None else [{"name": "top", "match": ["out*"], "lr": case.group_lr, "weight_decay": 0.0}]
    )
    rate = {"lr": case.lr, "lr_scaling": case.lr_scaling, "reference_batch": 8, "weight_decay": case.weight_decay}
    schedule = {"name": case.schedule, "warmup_steps": case.warmup, "end_factor": case.end_factor}
    buckets = {"bucket_mb": case.bucket_mb, "gradient_as_bucket_view": case.gradient_views}
    return {
        "seed": case.seed,
        "device": "cpu",
        "batch": batch,
        "data": {"on_error": case.on_error, "drop_last": case.drop_last, "workers": case.workers},
        "train": train | {"eval_every_steps": case.eval_every, "ema_decay": case.ema},
        "optim": {
            "name": "AdamW" if case.optimizer == "AdamW" else "SGD",
            "clip_norm": case.clip_norm,
            "groups": groups,
        }
        | rate
        | momentum,
        "schedule": schedule | {"step_epochs": 1, "gamma": 0.5},
        "compute": {"activation_checkpointing": case.recompute},
        "parallel": {"strategy": case.strategy, "timeout_s": 30.0} | buckets,
        "checkpoint": {"every_steps": case.resume_at, "keep_last": 100, "mode": "sync"},
        "log": {"every_steps": case.log_every, "writers": ["text_log", "json_lines"]},
    }
