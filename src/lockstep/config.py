"""The configuration of a run: one pydantic model per YAML section."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

_GLOBAL_BATCH = 32
_LONGEST_NAME = 200  # characters; file systems take 255 bytes


def _folder_name(text: str) -> str:
    """`runs/<name>` is where a run writes, and `--fresh` deletes: it must be a folder right there."""
    if text.strip() in ("", ".", "..") or len(text) > _LONGEST_NAME or re.search(r"[/\\\x00-\x1f]", text):
        allowed = f"up to {_LONGEST_NAME} letters, digits, - and _, or choose another place with --run-dir"
        raise ValueError(f"{text!r} cannot be the name of one folder in runs/; use {allowed}")
    return text


def _best(text: str) -> str:
    if not re.fullmatch(r"(min|max) eval/\S+", text):
        remedy = "write `max eval/NAME` or `min eval/NAME`, such as `min eval/loss`"
        raise ValueError(f"{text!r} does not say what is best; {remedy}")
    return text


class Section(BaseModel):
    """A YAML section. Unknown keys are errors, and so is a value of another type: `yes` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TaskSection(Section):
    """The task section of one kind."""

    def suggestions(self) -> dict[str, dict[str, Any]]:
        """What suits this task in other sections, where neither a file nor the command line says it."""
        return {}


class ToyTask(TaskSection):
    """Synthetic regression; see `lockstep.tasks.toy.task.Toy`."""

    kind: Literal["toy"]
    samples: Annotated[int, Field(ge=0)] = 1000
    eval_samples: Annotated[int, Field(ge=0)] = 200
    hidden: PositiveInt = 10
    layers: PositiveInt = 1
    double: bool = False


class ClassificationTask(TaskSection):
    """Image classification; see `lockstep.tasks.classification.task.Classification`."""

    kind: Literal["classification"]
    image_size: Annotated[int, Field(ge=4)] = 32
    channels: Literal[1, 3] = 3
    width: Annotated[int, Field(ge=4, multiple_of=4)] = 32
    shift: Annotated[int, Field(ge=0)] = 0


class ColumnsConfig(Section):
    """Columns of a table by name or place; None: those with a usual name. text: several are joined with a space."""

    text: str | int | list[str | int] | None = None
    pair: str | int | None = None
    label: str | int | None = None


class ScratchConfig(Section):
    """A new model, and the tokenizer that is trained for it. sizes: keys of the architecture's config."""

    architecture: str = "embedding_bag"
    sizes: dict[str, Any] = {}
    vocab_size: Annotated[int, Field(ge=100)] = 20000
    lowercase: bool = True


class TextTask(TaskSection):
    """Text classification; see `lockstep.tasks.text.task.Text`."""

    kind: Literal["text"]
    model: str | None = None
    scratch: ScratchConfig = ScratchConfig()
    max_length: Annotated[int, Field(ge=4)] = 128
    columns: ColumnsConfig = ColumnsConfig()
    multi_label: bool = False
    label_separator: Annotated[str, Field(min_length=1)] = ","
    class_weights: Literal["balanced"] | dict[str, PositiveFloat] | None = None
    new_head: bool = False
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    split_seed: Annotated[int, Field(ge=0)] = 0
    empty: Literal["raise", "drop"] = "raise"
    subset: str | None = None
    header: bool = True
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    quoting: Literal["minimal", "none"] | None = None

    def suggestions(self) -> dict[str, dict[str, Any]]:
        """Measured on four data sets of 160 to 4,000 texts: docs/text.md."""
        optim: dict[str, Any] = {"name": "AdamW", "weight_decay": 0.01, "clip_norm": 1.0}
        if self.model:
            optim |= {"lr": 2e-4, "layer_decay": 0.9}
            train = {"epochs": 3, "min_steps": 300}
        elif self.scratch.architecture == "embedding_bag":
            optim["lr"] = 0.01
            train = {"epochs": 10, "min_steps": 400}
        else:
            optim["lr"] = 5e-4
            train = {"epochs": 10, "min_steps": 1000}
        return {"train": train, "optim": optim, "schedule": {"name": "linear", "warmup_share": 0.1}}


class UserTask(TaskSection):
    """A class in a user's file; further keys go to its constructor."""

    model_config = ConfigDict(extra="allow")
    kind: str


BUILT_IN: dict[str, type[TaskSection]] = {"toy": ToyTask, "classification": ClassificationTask, "text": TextTask}


class DataConfig(Section):
    """Where samples come from. workers: loader processes per rank. on_error: what an unreadable sample does."""

    train: str | None = None
    eval: str | None = None
    workers: Annotated[int, Field(ge=0)] = 0
    on_error: Literal["raise", "skip"] = "raise"
    drop_last: bool = False


class BatchConfig(Section):
    """Samples per update (`global`) and per forward pass (`micro`, None: as few passes as possible).

    `per_rank` x `accumulate` x ranks may be given instead: the global batch this makes at the first launch is kept.
    """

    global_: PositiveInt | None = Field(None, alias="global")
    micro: PositiveInt | None = None
    per_rank: PositiveInt | None = None
    accumulate: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_way(self) -> BatchConfig:
        if self.global_ is not None and (self.per_rank or self.accumulate):
            raise ValueError("give either global (and micro) or per_rank and accumulate, not both")
        if self.accumulate and not self.per_rank:
            raise ValueError("accumulate needs per_rank")
        if self.micro and self.per_rank:
            raise ValueError("per_rank is the micro-batch; leave micro out")
        if self.micro and self.micro > (self.global_ or _GLOBAL_BATCH):
            raise ValueError(
                f"micro ({self.micro}) is above global ({self.global_ or _GLOBAL_BATCH}); use micro <= global"
            )
        return self

    def resolve(self, world: int) -> BatchConfig:
        """With `global` and `micro` as numbers, for a first launch on `world` ranks."""
        if self.per_rank:
            return BatchConfig.model_validate(
                {"global": self.per_rank * (self.accumulate or 1) * world, "micro": self.per_rank}
            )
        return self.model_copy(update={"global_": self.global_ or _GLOBAL_BATCH})


class UnfreezeConfig(Section):
    """Parameters by name pattern (`*` and `?`) that train only from the beginning of an epoch (counted from 0), or a step, on."""

    match: Annotated[list[str], Field(min_length=1)]
    epoch: Annotated[float, Field(gt=0)] | None = None
    step: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_of(self) -> UnfreezeConfig:
        if (self.epoch is None) == (self.step is None):
            raise ValueError("give either epoch or step")
        return self


class TrainConfig(Section):
    """How long: `epochs`, but at least `min_steps`, or `steps`; and how often to evaluate (0: never).

    ema_decay: evaluate and export an exponential moving average of the weights. init_from: safetensors file or folder
    to start from; init_skip: patterns of tensor names that need not be in it. unfreeze: what is frozen at first, until when.
    """

    epochs: PositiveInt | None = None
    min_steps: PositiveInt | None = None
    steps: PositiveInt | None = None
    eval_every_epochs: Annotated[int, Field(ge=0)] | None = None
    eval_every_steps: Annotated[int, Field(ge=0)] | None = None
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    init_from: str | None = None
    init_skip: list[str] = []
    unfreeze: list[UnfreezeConfig] = []

    @model_validator(mode="after")
    def _one_of(self) -> TrainConfig:
        if self.epochs and self.steps:
            raise ValueError("give either epochs or steps, not both")
        if self.min_steps and self.steps:
            raise ValueError("give either min_steps (with epochs) or steps, not both")
        if self.eval_every_epochs is not None and self.eval_every_steps is not None:
            raise ValueError("give either eval_every_epochs or eval_every_steps, not both")
        return self


class GroupConfig(Section):
    """Parameters by name pattern (`*` and `?`), with their own learning rate and weight decay."""

    name: str
    match: Annotated[list[str], Field(min_length=1)]
    lr: PositiveFloat | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class OptimConfig(Section):
    """Any class of torch.optim; `args` are its further arguments (momentum, betas, ...). fused: one kernel for the whole update.

    layer_decay: each of the model's repeated blocks learns at so many times the rate of the one above it.
    """

    name: str = "AdamW"
    lr: PositiveFloat = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    clip_norm: PositiveFloat | None = None
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: PositiveInt = 32
    fused: bool = False
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    groups: list[GroupConfig] = []
    args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _names(self) -> OptimConfig:
        names = [group.name for group in self.groups]
        if len({*names, "default"}) <= len(names):
            raise ValueError("group names must differ from each other and from 'default'")
        return self


class ScheduleConfig(Section):
    """Learning rate over updates; see `lockstep.engine.schedule.Schedule`.

    total_steps: the curve's length in updates, where it is not the run's.
    """

    name: Literal["constant", "linear", "cosine", "step", "one_cycle", "polynomial"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    warmup_share: Annotated[float, Field(ge=0, le=1)] | None = None
    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    step_epochs: PositiveFloat = 1
    gamma: PositiveFloat = 0.1
    power: PositiveFloat = 1.0
    total_steps: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_warmup(self) -> ScheduleConfig:
        if self.warmup_share is not None and self.warmup_steps:
            raise ValueError("give either warmup_steps or warmup_share, not both")
        return self


class ParallelConfig(Section):
    """How the model is spread over ranks. timeout_s: where no rank gets on for longer, the run ends with a report.

    For ddp: see `lockstep.distributed.strategy.Buckets`. For fsdp: see `lockstep.distributed.sharding.Sharding`; `shard_modules` are patterns
    of the modules that are sharded one by one (None: the model's repeated blocks).
    """

    strategy: Literal["single", "ddp", "fsdp"] = "ddp"
    timeout_s: PositiveFloat = 600.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_mb: PositiveFloat | None = None
    gradient_as_bucket_view: bool = True
    shard_modules: Annotated[list[str], Field(min_length=1)] | None = None
    shard_ranks: PositiveInt | None = None
    reshard_after_forward: bool = True
    forward_prefetch: Annotated[int, Field(ge=0)] = 0
    backward_prefetch: Annotated[int, Field(ge=0)] = 0
    cpu_offload: bool = False
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None


class ComputeConfig(Section):
    """How the forward pass is computed; the same training to rounding.

    compile: `torch.compile` each repeated block, or the model. activation_checkpointing: recompute each block's activations in
    the backward pass. channels_last: memory format of images and convolutions. halve_on_oom: where the memory of a GPU does
    not suffice, go on with half the micro-batch.
    """

    compile: Literal["blocks", "model"] | None = None
    compile_backend: str = "inductor"
    activation_checkpointing: bool = False
    channels_last: bool = False
    halve_on_oom: bool = True


class CheckpointConfig(Section):
    """A checkpoint is due every so many minutes or steps, whichever comes first, and at the end.

    every_steps: 0 leaves it to the minutes. every_minutes: null leaves it to the steps. mode: async trains on
    while it writes.

    Kept are the `keep_last` newest, those of every `keep_every_steps`-th step, and the best: `keep_best: max eval/accuracy`
    also saves before each evaluation.
    """

    every_steps: Annotated[int, Field(ge=0)] = 0
    every_minutes: PositiveFloat | None = 10.0
    mode: Literal["async", "sync"] = "async"
    keep_last: PositiveInt = 3
    keep_best: Annotated[str, AfterValidator(_best)] | None = None
    keep_every_steps: PositiveInt | None = None


def _writer(name: str) -> str:
    """A writer in a file is found from every working directory."""
    return os.path.abspath(name) if ".py:" in name else name


class LogConfig(Section):
    """What is logged, how often, and by which writers: built-in ones, names of installed ones, or FILE.py:MyWriter."""

    every_steps: PositiveInt = 50
    writers: list[Annotated[str, AfterValidator(_writer)]] = ["text_log", "json_lines", "tensorboard"]


class RunConfig(Section):
    """A whole run. Everything but the task and its data has a default; in Python, the task may be given as an object instead."""

    name: Annotated[str, AfterValidator(_folder_name)] = "run"
    seed: Annotated[int, Field(ge=0)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    task: dict[str, Any] = {}
    data: DataConfig = DataConfig()
    batch: BatchConfig = Field(default_factory=lambda: BatchConfig.model_validate({}))
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


# ---- what determines the training

# How long the schedule's curve is matters all the same: checkpoints record it, and resuming compares.
_LENGTH = (
    "train.epochs",
    "train.min_steps",
    "train.steps",
    "train.eval_every_epochs",
    "train.eval_every_steps",
    "schedule.total_steps",
)
_FREE = (
    "name",
    "device",
    "data.workers",
    "batch.micro",
    *_LENGTH,
    "optim.fused",
    "parallel",
    "compute",
    "checkpoint",
    "log",
)
_NOT_FREE = ("parallel.param_dtype", "parallel.reduce_dtype")


def training_keys(config: RunConfig) -> dict[str, Any]:
    """The keys, by dotted path, whose change would change the weights; world size, strategy, micro-batch and logs do not."""
    flat = _flatten(config.model_dump(by_alias=True))
    free = {key for key in flat if any(f"{key}.".startswith(f"{one}.") for one in _FREE)} - {*_NOT_FREE}
    return {key: value for key, value in flat.items() if key not in free}


def config_digest(config: RunConfig) -> str:
    """SHA-256 of what determines the training."""
    return hashlib.sha256(json.dumps(training_keys(config), sort_keys=True).encode()).hexdigest()


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        path = f"{prefix}{key}"
        flat |= _flatten(item, f"{path}.") if isinstance(item, Mapping) else {path: item}
    return flat
