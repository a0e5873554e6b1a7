"""The configuration of a run: one pydantic model per YAML section. It imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from lockstep.core.config.config_section import DETERMINES_TRAINING, DOES_NOT_DETERMINE, Section, determines
from lockstep.core.errors import UsageError

_GLOBAL_BATCH = 32
_LONGEST_NAME = 200  # characters; file systems allow 255 bytes


def _folder_name(text: str) -> str:
    """A run writes into `runs/<name>`, and `--fresh` deletes this folder: the name must not lead anywhere else."""
    if text.strip() in ("", ".", "..") or len(text) > _LONGEST_NAME or re.search(r"[/\\\x00-\x1f]", text):
        allowed = f"up to {_LONGEST_NAME} letters, digits, - and _, or choose another place with --run-dir"
        raise ValueError(f"{text!r} cannot be the name of a folder in runs/; use {allowed}")
    return text


def _best(text: str) -> str:
    if not re.fullmatch(r"(min|max) eval/\S+", text):
        remedy = "write `max eval/NAME` or `min eval/NAME`, such as `min eval/loss`"
        raise ValueError(f"{text!r} does not say which result is best; {remedy}")
    return text


def _result(name: str) -> str:
    if not re.fullmatch(r"eval/\S+", name):
        raise ValueError(f"{name!r} is no result of an evaluation; write `eval/NAME`, such as `eval/loss`")
    return name


def _checkpoint(wanted: Any) -> Any:
    text = str(wanted)
    if text not in ("newest", "best") and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is no checkpoint; write newest, best or a step")
    return text


def _seconds(time: Any) -> Any:
    if not isinstance(time, str):
        return time
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", time.strip())
    if match is None:
        raise ValueError(f"{time!r} is no time; write seconds, or text such as 90s, 45m, 4h or 2d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _from_epoch_0(by_epoch: dict[int, int]) -> dict[int, int]:
    if 0 not in by_epoch or min(by_epoch) < 0:
        raise ValueError("gives no value for epoch 0; write {0: 256, 20: 128}, with epochs that are counted from 0")
    return dict(sorted(by_epoch.items()))


def _named_sets(sources: dict[str, str]) -> dict[str, str]:
    if not sources:
        raise ValueError("names no evaluation data; write {NAME: SOURCE}, or null")
    for name in sources:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise ValueError(f"{name!r} cannot name evaluation data; use letters, digits, '_', '.' and '-'")
    return sources


class DataConfig(Section):
    """The training and evaluation data."""

    train: str | None = None
    """Source of the training data, for the constructor of the task."""
    eval: str | Annotated[dict[str, str], AfterValidator(_named_sets)] | None = None
    """Source of the evaluation data; or several sources by name, such as `{clean: a.csv, noisy: b.csv}`. With names,
    the results are `eval/clean/accuracy` and so on."""
    eval_limit: Annotated[PositiveInt | None, DOES_NOT_DETERMINE] = None
    """Evaluate at most so many samples of each set, spread evenly over it: the same samples each time. The results then
    also have `eval/of_samples`, the size of the set. None: all samples."""
    fold: Annotated[str, Field(pattern=r"^[1-9]\d*/[1-9]\d*$")] | None = None
    """`2/5`: evaluate on the second of five folds of the training data, and train on the others. For tasks that make
    folds."""
    workers: Annotated[int, Field(ge=0), DOES_NOT_DETERMINE] = 0
    """Loader processes of each rank. 0: the rank loads its data itself."""
    on_error: Literal["raise", "skip"] = "raise"
    """What happens if a sample cannot be read: `raise` the error, or `skip` the sample."""
    drop_last: bool = False
    """Whether the last, partial batch of an epoch is left out."""
    group_by_length: PositiveInt | None = None
    """Batches of samples of similar length, which need less padding: number of global batches in a window of the epoch,
    whose samples are sorted by length and cut into these batches, which are then shuffled. For data with the attribute
    `lengths`. None: lengths do not choose the samples of a batch."""
    cache: Annotated[Literal["decoded"] | None, DOES_NOT_DETERMINE] = None
    """Pictures: `decoded` keeps their pixels on disk, so that only the first epoch decodes. The samples are the same.
    None: no cache."""
    cache_gb: Annotated[PositiveFloat, DOES_NOT_DETERMINE] = 100.0
    """Largest size of the cache in 10^9 bytes, for the training data and for the evaluation data."""
    cache_size: PositiveInt | None = None
    """Shorter side in pixels to which larger pictures are reduced before they are kept. It makes the cache smaller,
    and other samples. None: pictures are kept as they are."""

    @property
    def eval_sources(self) -> dict[str, str | None]:
        """The sources of evaluation data by name. A single source, or None, has the empty name."""
        return dict(self.eval) if isinstance(self.eval, dict) else {"": self.eval}

    @model_validator(mode="after")
    def _size_of_a_cache(self) -> DataConfig:
        # Otherwise another value of `cache`, which is free to change, would change the samples.
        if self.cache_size is not None and self.cache is None:
            raise ValueError("cache_size needs cache: decoded")
        return self


class BatchConfig(Section):
    """Samples of an update, over all ranks.

    Instead of `global` and `micro`, `per_rank` and `accumulate` may be given. The global batch is then
    per_rank x accumulate x ranks of the first launch, and stays the same in later launches.
    """

    global_: PositiveInt | None = Field(None, alias="global")
    """Samples of an update. None: 32."""
    micro: Annotated[
        PositiveInt | Annotated[dict[int, PositiveInt], AfterValidator(_from_epoch_0)] | None, DOES_NOT_DETERMINE
    ] = None
    """Largest number of samples of a forward pass. None: as few forward passes as possible.

    `{0: 256, 20: 128}`: 256 samples from epoch 0 on, and 128 samples from epoch 20 on. Epochs are counted from 0.
    Evaluations use the smallest of these numbers.
    """
    per_rank: PositiveInt | None = None
    """Samples of a forward pass on each rank."""
    accumulate: PositiveInt | None = None
    """Forward passes of each rank before an update."""

    @model_validator(mode="after")
    def _consistent(self) -> BatchConfig:
        if self.global_ is not None and (self.per_rank or self.accumulate):
            raise ValueError("give either global (and micro) or per_rank and accumulate, not both")
        if self.accumulate and not self.per_rank:
            raise ValueError("accumulate needs per_rank")
        if self.micro and self.per_rank:
            raise ValueError("per_rank is the micro-batch; leave micro out")
        largest = max(self.micro.values()) if isinstance(self.micro, dict) else self.micro
        if largest and largest > (self.global_ or _GLOBAL_BATCH):
            raise ValueError(
                f"micro ({largest}) is above global ({self.global_ or _GLOBAL_BATCH}); use micro <= global"
            )
        return self

    @property
    def smallest_micro(self) -> int | None:
        """The smallest number that `micro` has for any epoch."""
        return min(self.micro.values()) if isinstance(self.micro, dict) else self.micro

    def resolve(self, world: int) -> BatchConfig:
        """This section with `global` and `micro` as numbers, for a first launch on `world` ranks."""
        if self.per_rank:
            return BatchConfig.model_validate(
                {"global": self.per_rank * (self.accumulate or 1) * world, "micro": self.per_rank}
            )
        return self.model_copy(update={"global_": self.global_ or _GLOBAL_BATCH})


class UnfreezeConfig(Section):
    """Parameters that are frozen until the beginning of an epoch, or until a step."""

    match: Annotated[list[str], Field(min_length=1)]
    """Patterns of parameter names, with `*` and `?`."""
    epoch: Annotated[float, Field(gt=0)] | None = None
    """Epochs, counted from 0, before the parameters train."""
    step: PositiveInt | None = None
    """Steps before the parameters train."""

    @model_validator(mode="after")
    def _epoch_or_step(self) -> UnfreezeConfig:
        if (self.epoch is None) == (self.step is None):
            raise ValueError("give either epoch or step")
        return self


def _from_anywhere(name: str) -> str:
    """The name of a class. A class in a file is found from every working directory."""
    return os.path.abspath(name) if ".py:" in name else name


def _part(part: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(part, str):
        return _from_anywhere(part)
    if not isinstance(part.get("kind"), str):
        raise ValueError(f"{part} has no kind: give FILE.py:Class or the name of an installed Part as kind")
    return part | {"kind": _from_anywhere(part["kind"])}


class TrainConfig(Section):
    """Length of the training, evaluations, and the weights to begin with.

    The length does not determine the training, but the length of the schedule's curve does. Checkpoints record the
    curve's length, and a resumed run is compared with it.
    """

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (
        ("epochs", "steps"),
        ("min_steps", "steps"),
        ("eval_every_epochs", "eval_every_steps"),
    )

    epochs: Annotated[PositiveInt | None, DOES_NOT_DETERMINE] = None
    """Length in epochs. None, without `steps`: 1."""
    min_steps: Annotated[PositiveInt | None, DOES_NOT_DETERMINE] = None
    """Least length in steps, together with `epochs`."""
    steps: Annotated[PositiveInt | None, DOES_NOT_DETERMINE] = None
    """Length in steps."""
    eval_every_epochs: Annotated[int | None, Field(ge=0), DOES_NOT_DETERMINE] = None
    """Epochs between evaluations. 0 or None: no evaluation."""
    eval_every_steps: Annotated[int | None, Field(ge=0), DOES_NOT_DETERMINE] = None
    """Steps between evaluations. 0: no evaluation."""
    allow_mean_loss: Annotated[bool, DOES_NOT_DETERMINE] = False
    """Train although `Task.loss` returns a mean over a micro-batch, and not the sum over its units. The gradient is
    then smaller, and depends on the size of the micro-batch."""
    probe_every: Annotated[int, Field(ge=0), DOES_NOT_DETERMINE] = 0
    """Steps between two comparisons of the ranks, which are also compared before each save: their states, and their
    losses of one batch. 0: never."""
    stop_when: Annotated[StopConfig | None, DOES_NOT_DETERMINE] = None
    """Ends the training before its last step, by the results of its evaluations."""
    max_time: Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_seconds), DOES_NOT_DETERMINE] = None
    """Ends the training after this time, over all its starts: seconds, or text such as `90s`, `45m`, `4h` and `2d`."""
    parts: Annotated[list[Annotated[str | dict[str, Any], AfterValidator(_part)]], DOES_NOT_DETERMINE] = Field(
        default_factory=list
    )
    """Parts that join the training: FILE.py:Class, names of installed Parts, or mappings with `kind` and the arguments
    of the class, such as `{kind: my.py:EndsWhen, value: 0.1}`."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest decay of an exponential moving average of the weights, which is evaluated and exported instead of the
    weights. Update n, counted from 1, has the decay min(ema_decay, (1 + n) / (10 + n))."""
    init_from: str | None = None
    """Weights to begin with: a safetensors file, a folder with such a file, a file of torch.save, or the directory of a
    run. A file of torch.save may have a state of the optimizer, which is taken too."""
    init_checkpoint: Annotated[str, BeforeValidator(_checkpoint)] | None = None
    """Which checkpoint of the run that `init_from` names: newest, best or a step. None: the best where that run keeps
    its best checkpoint, else the newest."""
    init_skip: list[str] = Field(default_factory=list)
    """Patterns of names of tensors that `init_from` may lack."""
    unfreeze: list[UnfreezeConfig] = Field(default_factory=list)

    @model_validator(mode="after")
    def _checkpoint_of_a_run(self) -> Self:
        if self.init_checkpoint is not None and self.init_from is None:
            raise ValueError("init_checkpoint needs the directory of a run in init_from")
        return self

    @property
    def known_epochs(self) -> int | None:
        """Length in epochs, where it does not depend on the data."""
        return None if self.steps or self.min_steps else self.epochs or 1


class StopConfig(Section):
    """A training ends before its last step when the results of its evaluations say so."""

    metric: Annotated[str, AfterValidator(_result)]
    """Name of the result in the log, such as `eval/loss`."""
    mode: Literal["min", "max"]
    """Whether lower or higher results are better."""
    patience: PositiveInt | None = None
    """Number of evaluations without an improvement after which the training ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """An evaluation is an improvement only if it is better than the best so far by more than this number."""
    target: float | None = None
    """The training ends at a result as good as this, or better."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.patience is None and self.target is None:
            raise ValueError("never ends a training; give patience, target, or both")
        return self


class GroupConfig(Section):
    """A group of parameters with a learning rate and a weight decay of its own."""

    name: str
    """Name of the group in the log."""
    match: Annotated[list[str], Field(min_length=1)]
    """Patterns of parameter names, with `*` and `?`. A parameter belongs to the first group that matches it."""
    lr: PositiveFloat | None = None
    """None: `optim.lr`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """None: `optim.weight_decay`."""


class OptimConfig(Section):
    """The optimizer."""

    name: str = "AdamW"
    """A class of torch.optim."""
    lr: PositiveFloat = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """None: the default of the optimizer."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the gradient. None: no clipping."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with batch.global / reference_batch."""
    reference_batch: PositiveInt = 32
    """Global batch for which `lr` is meant, in samples."""
    fused: Annotated[bool | None, DOES_NOT_DETERMINE] = None
    """Whether a single kernel does the whole update. None: Adam and AdamW use it on CUDA."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Learning rate of each of the model's repeated blocks, relative to the block above it."""
    groups: list[GroupConfig] = Field(default_factory=list)
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer (momentum, betas, ...)."""

    @model_validator(mode="after")
    def _names_differ(self) -> OptimConfig:
        names = [group.name for group in self.groups]
        if len({*names, "default"}) <= len(names):
            raise ValueError("group names must differ from each other and from 'default'")
        return self


class ScheduleConfig(Section):
    """The learning rate as a function of the updates; see `lockstep.core.schedule.Schedule`."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("warmup_steps", "warmup_share"),)

    name: Literal["constant", "linear", "cosine", "step", "one_cycle", "polynomial"] = "constant"
    """Shape of the curve after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Length of the warm-up in updates."""
    warmup_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Length of the warm-up as a share of the curve's length."""
    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """For linear, cosine and polynomial: the factor on the learning rate at the end of the curve."""
    step_epochs: PositiveFloat = 1
    """For step: epochs between two decreases of the learning rate."""
    gamma: PositiveFloat = 0.1
    """For step: the factor of each decrease."""
    power: PositiveFloat = 1.0
    """For polynomial: the exponent."""
    total_steps: Annotated[PositiveInt | None, DOES_NOT_DETERMINE] = None
    """Length of the curve in updates. None: the length of the run."""


class ParallelConfig(Section):
    """How the model is distributed over the ranks. docs/parallel.md explains the choices."""

    strategy: Literal["single", "ddp", "fsdp"] = "ddp"
    timeout_s: PositiveFloat = 600.0
    """Seconds without progress of any rank after which the run ends with a report."""
    find_unused_parameters: bool = False
    """DDP: some trainable parameters get no gradient in some batches."""
    static_graph: bool = False
    """DDP: every step uses the same parameters."""
    bucket_mb: PositiveFloat | None = None
    """DDP: size in MiB of the buckets in which gradients are reduced. None: DDP's default."""
    gradient_as_bucket_view: bool = True
    """DDP: gradients are views of the buckets, which saves memory."""
    shard_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """FSDP: patterns of the modules that are sharded separately. None: the model's repeated blocks."""
    shard_ranks: PositiveInt | None = None
    """FSDP: shard over groups of this many neighbouring ranks, and replicate across groups. None: shard over all
    ranks."""
    reshard_after_forward: bool = True
    """FSDP: free the gathered parameters of a block after its forward pass."""
    forward_prefetch: Annotated[int, Field(ge=0)] = 0
    """FSDP: number of blocks that are gathered ahead in the forward pass. 0: FSDP's default."""
    backward_prefetch: Annotated[int, Field(ge=0)] = 0
    """FSDP: number of blocks that are gathered ahead in the backward pass. 0: FSDP's default."""
    cpu_offload: bool = False
    """FSDP: keep parameters, gradients and optimizer state in host memory."""
    param_dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, DETERMINES_TRAINING] = None
    """FSDP: number format in which parameters are gathered. None: the format in which they are stored."""
    reduce_dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, DETERMINES_TRAINING] = None
    """FSDP: number format in which gradients are reduced. None: the format in which they are stored."""


class ComputeConfig(Section):
    """How the forward pass is computed. The training is the same to rounding."""

    compile: Literal["blocks", "model"] | None = None
    """Apply `torch.compile` to each repeated block, or to the model."""
    compile_backend: str = "inductor"
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """How long inductor searches for fast code. `reduce-overhead` and `max-autotune` use CUDA graphs."""
    compile_dynamic: bool | None = None
    """Whether compiled code takes tensors of any size. None: torch decides when it meets a second size."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass."""
    channels_last: bool = False
    """Memory format of images and convolutions."""
    deterministic: bool = False
    """Use kernels that give the same bits each time, so that a GPU repeats and resumes a training exactly. Some are
    slower. An operation without such a kernel is an error."""
    halve_on_oom: bool = True
    """If the memory of a GPU is not sufficient, continue with micro-batches of half the size."""
    matmul_precision: Annotated[Literal["highest", "high", "medium"] | None, DETERMINES_TRAINING] = None
    """How products of fp32 tensors are computed: `highest` in fp32, `high` in TF32, `medium` in TF32 or bf16. It also
    sets TF32 for convolutions. None: torch's default, which is TF32 for convolutions only."""
    cudnn_benchmark: bool = False
    """cuDNN measures its algorithms for each new size of tensors, and uses the fastest. Two runs may then use different
    algorithms, which round differently."""
    sdpa_backends: Annotated[list[Literal["flash", "efficient", "math", "cudnn"]], Field(min_length=1)] | None = None
    """The implementations of attention (`scaled_dot_product_attention`) that torch may choose from. None: all."""
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    """On CUDA, each rank and its loader workers run only on the CPUs near its GPU: those of the GPU's NUMA node, of its
    socket, or a share of the node's that no other GPU has. None: on all CPUs."""
    memory_snapshot: bool = False
    """On CUDA, record all allocations, and write them to `memory/rank<r>.pickle` if the memory is not sufficient."""

    @model_validator(mode="after")
    def _graphs_of_the_model(self) -> ComputeConfig:
        if self.compile_mode != "default" and self.compile_backend != "inductor":
            raise ValueError(f"compile_mode {self.compile_mode} belongs to the backend inductor")
        if self.uses_cuda_graphs and self.compile != "model":
            raise ValueError(f"compile_mode {self.compile_mode} uses CUDA graphs, which need compile: model")
        return self

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether compiled code runs as CUDA graphs, where there is CUDA."""
        return self.compile_mode in ("reduce-overhead", "max-autotune")


class CheckpointConfig(Section):
    """When checkpoints are saved, and which are kept.

    A checkpoint is due after `every_minutes` or `every_steps`, whichever comes first, and at the end. The `keep_last`
    newest checkpoints are kept, and those that `keep_best` and `keep_every_steps` ask for.
    """

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints. 0: only minutes count."""
    every_minutes: PositiveFloat | None = 10.0
    """Minutes between checkpoints. None: only steps count."""
    mode: Literal["async", "sync"] = "async"
    """async: the training continues while a checkpoint is written."""
    keep_last: PositiveInt = 3
    """Number of the newest checkpoints that are kept."""
    keep_best: Annotated[str, AfterValidator(_best)] | None = None
    """The result whose best checkpoint is kept, such as `max eval/accuracy`. A checkpoint is then saved before each
    evaluation."""
    keep_every_steps: PositiveInt | None = None
    """Checkpoints of steps that are multiples of this number are kept."""


class LogConfig(Section):
    """What is logged, how often, and by which writers."""

    every_steps: PositiveInt = 50
    """Steps between two entries."""
    writers: list[Annotated[str, AfterValidator(_from_anywhere)]] = Field(
        default_factory=lambda: ["text_log", "json_lines", "tensorboard"]
    )
    """Built-in writers, names of installed writers, or FILE.py:MyWriter. `wandb`, `mlflow` and `trackio` are built in,
    and need the library of this name."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run in trackers."""
    artifacts: bool = False
    """Whether trackers get files at the end of the training: the config, the logs, and the checkpoint that `evaluate`
    would use."""
    model_summary: bool = True
    """Whether a new run describes its model in `model.txt`, and gives its graph to the writers."""
    flops: bool = True
    """Whether entries say how many floating-point operations are computed in a second."""
    train_metrics: bool = True
    """Whether entries and the lines of epochs have the task's metrics of the training itself, such as `train/accuracy`,
    where `Task.loss` returns outputs with its losses. They are of the batches as they are trained: augmented."""
    memory: Literal["line", "table"] = "line"
    """How people are told of the memory of the ranks: in a `line` at the end, or also in a `table` by rank and purpose,
    after the first entry and at the end. `metrics.jsonl` has all figures."""
    pictures: Annotated[int, Field(ge=0)] = 8
    """Number of evaluation samples that are drawn at every evaluation, and of training samples that are drawn before
    the first step, if the task draws pictures. 0: no pictures, also none of confusion matrices."""


class RunConfig(Section):
    """A whole run. Every key but the task and its data has a default. In Python, the task may be an object instead."""

    if TYPE_CHECKING:  # a section may also be given as a mapping, such as optim={"lr": 0.1}

        def __init__(self, **keys: Any) -> None: ...

    def __new__(cls, *mappings: Any, **values: Any) -> Self:
        given: dict[Any, Any] = {}
        for mapping in (*mappings, values):
            given |= mapping if isinstance(mapping, Mapping) else {}
        dotted = next((key for key in given if "." in str(key)), None)
        if dotted is not None:
            section, _, key = str(dotted).partition(".")
            what, example = f"{dotted!r} names a section and a key in it", {section: {key: given[dotted]}}
            raise UsageError(what, where="RunConfig(...)", remedy=f"nest them: RunConfig(**{example!r})")
        if mappings:
            what, remedy = "takes keywords, and no mapping", "write RunConfig(**mapping), or Trainer(mapping)"
            raise UsageError(what, where="RunConfig(...)", remedy=remedy)
        return super().__new__(cls)

    name: Annotated[str, AfterValidator(_folder_name), DOES_NOT_DETERMINE] = "run"
    """Name of the run directory in `runs/`."""
    seed: Annotated[int, Field(ge=0)] = 0
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], DOES_NOT_DETERMINE] = "auto"
    """auto: a GPU of CUDA for each rank where there is one, otherwise the CPU. mps: the GPU of a Mac, for one rank."""
    task: dict[str, Any] = Field(default_factory=dict)
    """`kind`, and the options of this kind of task or the constructor's arguments of a user's class."""
    data: DataConfig = DataConfig()
    batch: BatchConfig = Field(default_factory=lambda: BatchConfig.model_validate({}))
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    parallel: Annotated[ParallelConfig, DOES_NOT_DETERMINE] = ParallelConfig()
    compute: Annotated[ComputeConfig, DOES_NOT_DETERMINE] = ComputeConfig()
    checkpoint: Annotated[CheckpointConfig, DOES_NOT_DETERMINE] = CheckpointConfig()
    log: Annotated[LogConfig, DOES_NOT_DETERMINE] = LogConfig()


def training_keys(config: RunConfig) -> dict[str, Any]:
    """The keys that determine the training, by dotted path, with their values.

    Another value of such a key trains other weights. World size, strategy, micro-batch and log are not among them.
    """
    return _training_keys(config, prefix="", otherwise=True)


def all_values(config: RunConfig) -> dict[str, Any]:
    """The value of every key, by dotted path."""
    return _flatten(config.model_dump(by_alias=True), "")


def config_digest(config: RunConfig) -> str:
    """SHA-256 of the keys that determine the training, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(training_keys(config), sort_keys=True).encode()).hexdigest()


def all_keys(
    section: type[BaseModel] = RunConfig, prefix: str = "", otherwise: bool = True
) -> Iterator[tuple[str, bool]]:
    """The dotted path of each key that the config may have, and whether the key determines the training.

    Args:
        prefix: the path of `section`, with a dot at its end.
        otherwise: whether keys of `section` without a marker determine the training.
    """
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        counts = determines(field.metadata, otherwise)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from all_keys(field.annotation, f"{path}.", counts)
        else:
            yield path, counts


def _training_keys(section: BaseModel, prefix: str, otherwise: bool) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    values = section.model_dump(by_alias=True)
    for name, field in type(section).model_fields.items():
        key = field.alias or name
        counts = determines(field.metadata, otherwise)
        value = getattr(section, name)
        if isinstance(value, Section):
            keys |= _training_keys(value, f"{prefix}{key}.", counts)
        elif counts:
            keys |= _flatten({key: values[key]}, prefix)
    return keys


def _flatten(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        path = f"{prefix}{key}"
        flat |= _flatten(item, f"{path}.") if isinstance(item, Mapping) else {path: item}
    return flat
