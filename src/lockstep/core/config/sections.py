"""The configuration of a run: one pydantic model per YAML section. It imports no torch.

Most sections are next to the code that uses them. This module has the sections with several users.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PositiveInt, model_validator

from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.config.config_section import DETERMINES_TRAINING, DOES_NOT_DETERMINE, Section, determines
from lockstep.core.data.options import BatchConfig, DataConfig
from lockstep.core.errors import UsageError, did_you_mean
from lockstep.core.optim import OptimConfig
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.schedule import ScheduleConfig
from lockstep.core.stopping import StopRule
from lockstep.core.unfreeze import Stage, stages_of

_LONGEST_NAME = 200  # characters; file systems allow 255 bytes


def _folder_name(text: str) -> str:
    """A run writes into `runs/<name>`, and `--fresh` deletes this folder: the name must not lead anywhere else."""
    if text.strip() in ("", ".", "..") or len(text) > _LONGEST_NAME or re.search(r"[/\\\x00-\x1f]", text):
        allowed = f"up to {_LONGEST_NAME} letters, digits, - and _, or choose another place with --run-dir"
        raise ValueError(f"{text!r} cannot be the name of a folder in runs/; use {allowed}")
    return text


def _checkpoint(wanted: Any) -> Any:
    text = str(wanted)
    if text not in ("newest", "best") and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a checkpoint; write newest, best or a step")
    return text


def _seconds(time: Any) -> Any:
    if not isinstance(time, str):
        return time
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", time.strip())
    if match is None:
        raise ValueError(f"{time!r} is not a time; write seconds, or text such as 90s, 45m, 4h or 2d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


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
    stop_when: Annotated[StopRule | None, DOES_NOT_DETERMINE] = None
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
    """The checkpoint of the run that `init_from` names: newest, best or a step. None: the best if that run keeps
    its best checkpoint, else the newest."""
    init_skip: list[str] = Field(default_factory=list)
    """Patterns of names of tensors that `init_from` may lack."""
    unfreeze: Annotated[list[Stage], BeforeValidator(stages_of)] = Field(default_factory=list)
    """When frozen parameters begin to train: each stage has an epoch or a step, and patterns of names. In short:
    `{0: head, 1: last 2, 3: all}`, by epoch."""

    @model_validator(mode="after")
    def _checkpoint_of_a_run(self) -> Self:
        if self.init_checkpoint is not None and self.init_from is None:
            raise ValueError("init_checkpoint needs the directory of a run in init_from")
        return self

    @property
    def known_epochs(self) -> int | None:
        """Length in epochs, if it does not depend on the data."""
        return None if self.steps or self.min_steps else self.epochs or 1


class WatchConfig(Section):
    """Proof while a training runs that all ranks compute the same; see lockstep --explain watch."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two checks. Replicas are also compared before each save. 0: nothing is checked."""
    recompute: bool = True
    """In a check, each rank computes a micro-batch of another rank again. False: only replicas are compared."""


def _of_torchtitan(mode: Any) -> Any:
    return {"none": False, "full": True}.get(mode, mode) if isinstance(mode, str) else mode


class ComputeConfig(Section):
    """The ways to compute the forward pass. The training is the same to rounding."""

    compile: Literal["auto", "blocks", "model"] | None = None
    """Apply `torch.compile` to each repeated block, or to the model. `auto`: to the blocks, if there are any. A
    transformers model that is compiled as a whole loses flash attention: a mask appears while torch traces it."""
    compile_backend: str = "inductor"
    """Backend of `torch.compile`."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """The effort with which inductor searches for fast code. `reduce-overhead` and `max-autotune` use CUDA graphs."""
    compile_dynamic: bool | None = None
    """True if compiled code takes tensors of any size. None: torch decides when it meets a second size."""
    activation_checkpointing: Annotated[bool | Literal["selective"], BeforeValidator(_of_torchtitan)] = False
    """Recompute the activations of blocks in the backward pass, also called `none` (false) and `full` (true).
    `selective`: results of matrix products, convolutions and attention are kept, and the rest is computed again."""
    recompute_every_blocks: PositiveInt = 1
    """With `activation_checkpointing`: recompute only blocks whose number, counted from 1, is a multiple of this."""
    channels_last: bool = False
    """Memory format of images and convolutions."""
    deterministic: bool = False
    """Use kernels that give the same bits each time, so that a GPU repeats and resumes a training exactly. Some are
    slower. An operation without such a kernel is an error."""
    halve_on_oom: bool = True
    """If the memory of a GPU is not sufficient, continue with micro-batches of half the size."""
    matmul_precision: Annotated[Literal["highest", "high", "medium"] | None, DETERMINES_TRAINING] = None
    """The precision of products of fp32 tensors: `highest` in fp32, `high` in TF32, `medium` in TF32 or bf16. It also
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
        """True if compiled code runs as CUDA graphs, if there is CUDA."""
        return self.compile_mode in ("reduce-overhead", "max-autotune")


class LogConfig(Section):
    """The contents of the log, its interval, and its writers."""

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
    """True if trackers get files at the end of the training: the config, the logs, and the checkpoint that `evaluate`
    would use."""
    model_summary: bool = True
    """True if a new run describes its model in `model.txt`, and gives its graph to the writers."""
    flops: bool = True
    """True if entries say how many floating-point operations are computed in a second."""
    train_metrics: bool = True
    """True if entries and the lines of epochs have the task's metrics of the training itself, such as `train/accuracy`,
    if `Task.loss` returns outputs with its losses. They are those of the trained batches, with augmentation."""
    memory: Literal["line", "table"] = "line"
    """How the log shows the memory of the ranks: as a `line` at the end, or also as a `table` by rank and purpose,
    after the first entry and at the end. `metrics.jsonl` has all figures."""
    probe_every_epochs: Annotated[int, Field(ge=0)] = 0
    """Epochs between two tables of weights, gradients and digests by rank, for people who want to see that replicas
    agree. 0: no table. `watch.every` checks this, and ends a training whose ranks differ."""
    pictures: Annotated[int, Field(ge=0)] = 8
    """Number of evaluation samples that are drawn at every evaluation, and of training samples that are drawn before
    the first step, if the task draws images. 0: no images, also none of confusion matrices."""


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
            what, remedy = "takes keyword arguments, not a mapping", "write RunConfig(**mapping), or Trainer(mapping)"
            raise UsageError(what, where="RunConfig(...)", remedy=remedy)
        word = next((key for key in values if key not in cls.model_fields), None)
        if word is not None:
            home = next((path for path, _ in all_keys() if path.endswith(f".{word}")), "")
            remedy = f"it is in a section: {home}" if home else f"{did_you_mean(word, cls.model_fields)}There are: "
            remedy += "" if home else ", ".join(cls.model_fields)
            raise UsageError(f"there is no section {word!r}", where=f"RunConfig({word}=...)", remedy=remedy)
        return super().__new__(cls)

    name: Annotated[str, AfterValidator(_folder_name), DOES_NOT_DETERMINE] = "run"
    """Name of the run directory in `runs/`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of initial weights, of the order of samples, and of all random numbers of samples and forward passes."""
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], DOES_NOT_DETERMINE] = "auto"
    """auto: a GPU of CUDA for each rank if there is one, otherwise the CPU. mps: the GPU of a Mac, for one rank."""
    task: dict[str, Any] = Field(default_factory=dict)
    """`kind`, and the options of this kind of task or the constructor's arguments of a user's class."""
    data: DataConfig = DataConfig()
    batch: BatchConfig = Field(default_factory=lambda: BatchConfig.model_validate({}))
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of forward and backward passes. Weights stay in fp32. fp16 scales the loss."""
    parallel: Annotated[ParallelConfig, DOES_NOT_DETERMINE] = ParallelConfig()
    compute: Annotated[ComputeConfig, DOES_NOT_DETERMINE] = ComputeConfig()
    checkpoint: Annotated[CheckpointConfig, DOES_NOT_DETERMINE] = CheckpointConfig()
    log: Annotated[LogConfig, DOES_NOT_DETERMINE] = LogConfig()
    watch: Annotated[WatchConfig, DOES_NOT_DETERMINE] = WatchConfig()


def training_keys(config: RunConfig) -> dict[str, Any]:
    """The keys that determine the training, by dotted path, with their values.

    A different value of such a key trains other weights. World size, strategy, micro-batch and log are not among them.
    """
    keys = {f"{key}." for key, counts in all_keys() if counts}
    return {
        path: value for path, value in all_values(config).items() if any(f"{path}.".startswith(key) for key in keys)
    }


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
        prefix: the path of `section`, followed by a dot.
        otherwise: whether keys of `section` without a marker determine the training.
    """
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        counts = determines(field.metadata, otherwise)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from all_keys(field.annotation, f"{path}.", counts)
        else:
            yield path, counts


def _flatten(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        path = f"{prefix}{key}"
        flat |= _flatten(item, f"{path}.") if isinstance(item, Mapping) else {path: item}
    return flat
