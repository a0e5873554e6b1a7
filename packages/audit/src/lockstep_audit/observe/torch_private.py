"""Patches that put observers around functions of torch and of frameworks. Each has a name, and can be tested.

A patch replaces a function. The replacement calls the observer with the arguments, then the function, and then what
the observer returned, with the result and the error. One of the two is None.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep_audit import this_process
from lockstep_audit.observe import (
    calls,
    communication,
    contents,
    data,
    files,
    final_states,
    frozen,
    models,
    module_creation,
    orders,
    quotients,
    samplers,
    schedules,
    splits,
    stuck,
    training,
    writes,
)
from lockstep_audit.observe.frameworks import asked, gathered, gathers, logged, noted, padded, ran, scaled, state_loaded
from lockstep_audit.observe.gathered_evaluation import compared
from lockstep_audit.observe.gathers import by_lightning
from lockstep_audit.observe.gradients import gradients, watch_hooks
from lockstep_audit.observe.means import (
    LOSSES,
    SCORES,
    arranged,
    curved,
    divided,
    floor_divided,
    loss,
    mean,
    mean_of_quotients,
    scored,
    spread,
)
from lockstep_audit.observe.passes import backward, clipped, drawn
from lockstep_audit.observe.recorder import After, is_child, recorder

Observer = Callable[..., After]
_LIGHTNING, _SCHEDULERS = ("lightning.pytorch", "pytorch_lightning"), ("LRScheduler", "LambdaLR")
_FABRIC = ("lightning.fabric", "lightning_fabric")
_FREED = (("torch.nn.modules.module", "Module.requires_grad_"), ("torch", "Tensor.requires_grad_"))
_TUNING = "callbacks.finetuning"
_SLOW = ("transformers", "datasets", "sklearn", "torchmetrics")
_METRICS = ("sklearn.metrics", "torchmetrics.functional", "torchmetrics.functional.classification")
_TASKS = ("", "binary_", "multiclass_", "multilabel_")
_FLOOR = ("__floordiv__", "__ifloordiv__", "floor_divide", "floor_divide_")


class Patch(NamedTuple):
    """A function that is observed."""

    module: str
    name: str
    """The name in the module: `Class.method` or `function`."""
    observer: Observer
    aliases: tuple[str, ...] = ()
    """Other modules that have the function under the same name."""
    is_optional: bool = False
    """Whether some versions lack the function."""
    is_frequent: bool = False
    """Whether optimizers call the function for each parameter: then it is not observed inside a step."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _patches() -> list[Patch]:
    loader, ddp = "torch.utils.data.dataloader", "torch.nn.parallel.distributed"
    c10d, fsdp = "torch.distributed.distributed_c10d", "torch.distributed.fsdp"
    wrapped = {how: functools.partial(models.wrapped, how) for how in ("ddp", "fsdp1", "fsdp2", "data_parallel")}
    clip = {how: functools.partial(clipped, how) for how in ("norm", "value")}
    found = [
        Patch(loader, "DataLoader.__init__", data.loader_made),
        Patch(loader, "DataLoader.__iter__", data.iteration_begins),
        *(Patch(loader, f"_BaseDataLoaderIter.{name}", data.iterator_made) for name in ("__init__", "_reset")),
        Patch(loader, "_BaseDataLoaderIter.__next__", data.batch_asked),
        Patch("torch.utils.data.dataset", "random_split", splits.splitted, ("torch.utils.data",)),
        Patch("torch.utils.data.dataset", "Subset.__init__", splits.subset_made),
        Patch("datasets.arrow_dataset", "Dataset.select", splits.selected),
        Patch("sklearn.model_selection._split", "train_test_split", splits.arrays_split, ("sklearn.model_selection",)),
        Patch("torch.utils.data.distributed", "DistributedSampler.set_epoch", samplers.epoch_set),
        Patch("torch.nn.modules.module", "Module.train", calls.mode_set),
        Patch("torch.nn.modules.module", "Module.__init__", module_creation.made),
        Patch("torch.nn.modules.module", "Module.__setstate__", module_creation.made),
        *(Patch(*owner, module_creation.freed) for owner in _FREED),
        Patch(ddp, "DistributedDataParallel.__init__", wrapped["ddp"]),
        Patch(ddp, "DistributedDataParallel.forward", calls.forward),
        Patch(ddp, "DistributedDataParallel.register_comm_hook", models.hooked),
        Patch(ddp, "DistributedDataParallel.no_sync", models.unsynced),
        Patch("torch.distributed.algorithms.join", "Join.__enter__", data.joining),
        Patch(c10d, "destroy_process_group", _ending, ("torch.distributed",)),
        Patch("torch._C._distributed_c10d", "Work.wait", communication.waited),
        Patch("torch.nn.parallel.data_parallel", "DataParallel.__init__", wrapped["data_parallel"]),
        Patch("torch.nn.parallel.data_parallel", "DataParallel.forward", calls.forward),
        Patch(fsdp, "FullyShardedDataParallel.__init__", wrapped["fsdp1"]),
        Patch(fsdp, "FullyShardedDataParallel.forward", calls.forward),
        Patch(fsdp, "FullyShardedDataParallel.clip_grad_norm_", _without_self(clip["norm"])),
        Patch(fsdp, "fully_shard", wrapped["fsdp2"], (f"{fsdp}._fully_shard", f"{fsdp}._fully_shard._fully_shard")),
        Patch(fsdp, "FSDPModule.set_gradient_divide_factor", _dividing, is_optional=True),
        Patch(f"{fsdp}._fully_shard._fsdp_state", "FSDPState._pre_forward", calls.forward_of_shards),
        Patch("torch", "compile", calls.compiled),
        Patch("torch.autograd", "backward", backward),
        Patch("torch.nn.utils.clip_grad", "clip_grad_norm_", clip["norm"], ("torch.nn.utils",)),
        Patch("torch.nn.utils.clip_grad", "clip_grad_value_", clip["value"], ("torch.nn.utils",)),
        Patch("torch.optim.optimizer", "Optimizer.__init__", training.optimizer_made),
        Patch("torch.amp.grad_scaler", "GradScaler.unscale_", training.scaler_unscales),
        Patch("torch.amp.grad_scaler", "GradScaler.step", training.scaler_steps),
        Patch("torch.optim.lr_scheduler", "LRScheduler._initial_step", schedules.begins),
        Patch("torch.distributed.rendezvous", "_create_c10d_store", communication.store_made),
        Patch(c10d, "init_process_group", communication.initialized, ("torch.distributed",)),
        Patch(c10d, "new_group", communication.group_made, ("torch.distributed",)),
        *_of_frameworks(),
        *_of_files(),
    ]
    found += [Patch("torch.nn.functional", name, loss) for name in LOSSES]
    found += [Patch("torch", f"Tensor.{name}", compared, is_frequent=True) for name in ("__eq__", "__sub__")]
    found += [Patch("torch", f"Tensor.{name}", floor_divided) for name in _FLOOR]
    found += [Patch("torch", "Tensor.mean", mean), Patch("torch", "arange", arranged)]
    found += [Patch("torch", name, mean_of_quotients) for name in ("mean", "nanmean", "Tensor.nanmean")]
    spreads = [(owner, name) for name in ("std", "var") for owner in (name, f"Tensor.{name}")]
    found += [Patch("torch", owner, functools.partial(spread, name)) for owner, name in spreads]
    found += [Patch("numpy.random", name, splits.ordered) for name in ("permutation", "shuffle")]
    found += [Patch("random", "shuffle", splits.ordered), Patch("torch", "randperm", splits.ordered)]
    found += [Patch("torch", name, divided, is_frequent=True) for name in ("Tensor.__truediv__", "Tensor.div", "div")]
    found += [Patch("torch", f"Tensor.{name}", quotients.read, is_frequent=True) for name in quotients.READS]
    for name in ("exp", "sqrt"):
        curve, owners = functools.partial(curved, name), (("torch", name), ("math", name), ("torch", f"Tensor.{name}"))
        found += [Patch(*owner, curve, is_frequent=True) for owner in owners]
    for module, task, name in itertools.product(_METRICS, _TASKS, SCORES):
        found += [Patch(module, f"{task}{name}", functools.partial(scored, name), is_optional=True)]
    clearing = (("torch.optim.optimizer", "Optimizer.zero_grad"), ("torch.nn.modules.module", "Module.zero_grad"))
    found += [Patch(*owner, gradients.note_cleared) for owner in clearing]
    norms = (("torch.linalg", "vector_norm"), ("torch.linalg", "norm"), ("torch", "norm"), ("torch", "Tensor.norm"))
    found += [Patch(module, name, gradients.note_norm) for module, name in norms]
    scaling = ("mul_", "div_", "__imul__", "__itruediv__")
    found += [Patch("torch", f"Tensor.{name}", gradients.note_scaled, is_frequent=True) for name in scaling]
    found += [Patch("torch", f"Tensor.{name}", writes.written, is_frequent=True) for name in writes.NAMES]
    found += [Patch("torch", name, drawn) for name in ("randn", "rand", "randn_like", "rand_like", "randint")]
    for name in communication.COLLECTIVES:
        observer = functools.partial(communication.collective, name)
        found.append(Patch(c10d, name, observer, ("torch.distributed",), is_optional="coalesced" in name))
    schedulers = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler", "CosineAnnealingWarmRestarts")
    return found + [Patch("torch.optim.lr_scheduler", f"{name}.step", schedules.steps) for name in schedulers]


def _of_lightning(module: str, name: str, observer: Observer) -> list[Patch]:
    return [Patch(f"{package}.{module}", name, observer) for package in _LIGHTNING]


def _of_frameworks() -> list[Patch]:
    return [
        Patch("accelerate.accelerator", "Accelerator.gather_for_metrics", gathered),
        Patch("accelerate.accelerator", "Accelerator.gather", gathers),
        Patch("accelerate.optimizer", "AcceleratedOptimizer.__init__", training.prepared),
        Patch("accelerate.data_loader", "IterableDatasetShard.__init__", contents.shard_made),
        Patch("accelerate.data_loader", "DataLoaderDispatcher.__init__", contents.dispatched),
        Patch("accelerate.data_loader", "skip_first_batches", data.first_skipped),
        Patch("accelerate.accelerator", "Accelerator.pad_across_processes", padded),
        Patch("accelerate.accelerator", "Accelerator.load_state", state_loaded),
        *_of_lightning("core.module", "LightningModule.log", logged),
        *_of_lightning("core.module", "LightningModule.all_gather", by_lightning),
        *(Patch(f"{name}.fabric", "Fabric.all_gather", by_lightning) for name in _FABRIC),
        *_of_lightning("trainer.trainer", "Trainer.fit", ran),
        *_of_lightning("trainer.trainer", "Trainer.__setattr__", asked),
        Patch("transformers.trainer_callback", "TrainerControl.__setattr__", asked),
        *_of_lightning("core.module", "LightningModule.unfreeze", module_creation.freed_by_framework),
        *_of_lightning(_TUNING, "BaseFinetuning.__init__", module_creation.callback_made),
        *_of_lightning(_TUNING, "BaseFinetuning.make_trainable", module_creation.freed_by_framework),
        Patch("transformers.trainer", "Trainer.log", noted),
        Patch("transformers.trainer", "Trainer.compute_loss", scaled),
        Patch("transformers.trainer", "Trainer.train", ran),
    ]


def _dividing(module: Any, factor: float) -> After:
    """FSDP2 sums gradients, or divides by a number of the script."""
    return models.hooked(module, None, _dividing)


def _ending(*arguments: Any, **named: Any) -> After:
    """The process group ends."""
    contents.probe()
    return final_states.note_parameters()


def _of_files() -> list[Patch]:
    dcp, safe = "torch.distributed.checkpoint", "safetensors.torch"
    saved = {how: functools.partial(files.saved, how) for how in ("torch.save", "safetensors", "dcp")}
    loaded = {how: functools.partial(files.loaded, how) for how in ("torch.load", "safetensors")}
    restored = {what: functools.partial(files.restored, what) for what in ("model", "optimizer", "scheduler", "scaler")}
    return [
        Patch("torch.serialization", "save", saved["torch.save"], ("torch",)),
        Patch("torch.serialization", "load", loaded["torch.load"], ("torch",)),
        Patch(safe, "save_file", saved["safetensors"]),
        Patch(safe, "load_file", loaded["safetensors"]),
        Patch(dcp, "save", saved["dcp"]),
        *(Patch("os", name, files.renamed) for name in ("rename", "replace")),
        *(Patch("shutil", name, files.renamed) for name in ("copyfile", "copytree")),
        Patch(dcp, "load", files.loaded_in_place),
        Patch("torch.nn.modules.module", "Module.load_state_dict", restored["model"]),
        Patch("torch.nn.modules.module", "Module.state_dict", files.taken),
        Patch("torch.optim.optimizer", "Optimizer.load_state_dict", restored["optimizer"]),
        *(Patch("torch.optim.lr_scheduler", f"{name}.load_state_dict", restored["scheduler"]) for name in _SCHEDULERS),
        Patch("torch.amp.grad_scaler", "GradScaler.load_state_dict", restored["scaler"]),
        Patch("torch.random", "set_rng_state", orders.restored, ("torch",)),
        Patch("random", "setstate", orders.restored),
        Patch("numpy.random", "set_state", orders.restored),
    ]


def _without_self(observer: Observer) -> Observer:
    return lambda module, /, *arguments, **named: observer(None, *arguments, **named)


def around(name: str, original: Callable[..., Any], observer: Observer, frequent: bool = False) -> Callable[..., Any]:
    """The function with its observer around it."""
    guard, thread, is_compiling = recorder.guard, recorder.thread, torch.compiler.is_compiling

    @functools.wraps(original)
    def observed(*arguments: Any, **named: Any) -> Any:
        if (frequent and recorder.is_stepping) or thread.is_observing or is_compiling():
            return original(*arguments, **named)
        after = guard(name, observer, *arguments, **named)
        if after is None:
            return original(*arguments, **named)
        try:
            result = original(*arguments, **named)
        except BaseException as error:
            guard(name, after, None, error)
            raise
        guard(name, after, result, None)
        return result

    return observed


def apply(patch: Patch) -> None:
    """Replace the function of a patch.

    Raises:
        AttributeError: the module has no such function.
    """
    owner: Any = sys.modules[patch.module]
    *outer, last = patch.name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, last)
    if not callable(original):
        raise AttributeError(f"{patch} is not a function")
    observed = around(str(patch), original, patch.observer, patch.is_frequent)
    is_static = isinstance(inspect.getattr_static(owner, last), staticmethod)
    setattr(owner, last, staticmethod(observed) if is_static else observed)
    for alias in patch.aliases:
        module = sys.modules.get(alias)
        if module is not None and getattr(module, last, None) is original:
            setattr(module, last, observed)


def _apply(patch: Patch, module: ModuleType) -> None:
    try:
        apply(patch)
    except AttributeError as error:
        if not patch.is_optional:
            recorder.emit("note", what=str(patch), reason=f"not installed: {error}")


def install(after_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Install all observers: immediately, or once the module of each is imported."""
    recorder.on_open.append(stuck.start)
    data.on_loader.append(contents.remember)
    calls.on_called.append(frozen.note)
    observers = (contents, data, training, schedules, final_states, files, communication, stuck)
    recorder.at_exit += [each.at_exit for each in observers]
    recorder.emit("start", **_start())
    recorder.find_rank()
    for patch in _patches():
        after_import(patch.module, functools.partial(_apply, patch))
    files.watch_open()
    after_import("torch.distributed", watch_hooks)
    for module, name in (("sampler", "Sampler"), ("dataset", "Dataset")):
        after_import(f"torch.utils.data.{module}", functools.partial(samplers.watch_made, name))
    register_optimizer_step_pre_hook(training.step_begins)
    register_optimizer_step_post_hook(training.step_ends)


def _start() -> dict[str, Any]:
    event: dict[str, Any] = {"world_size": this_process.ranks(), "local_rank": this_process.local_rank()}
    event |= {"pid": os.getpid(), "host": os.uname().nodename}
    event |= {"script": os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else None, "argv": sys.argv[1:]}
    event |= {"torch": torch.__version__, "python": sys.version.split()[0], "every": recorder.every}
    event |= {"is_child": is_child()}
    return event


def failing() -> dict[str, str]:
    """By name, why a patch does not work with what is installed. Frameworks that are not installed are left out."""
    failed = {}
    for patch in _patches():
        package = patch.module.partition(".")[0]
        is_slow = package in _SLOW and package not in sys.modules  # 4 s; `apply` notes what it misses
        if is_slow or importlib.util.find_spec(package) is None:
            continue
        try:
            owner: Any = importlib.import_module(patch.module)
            for part in patch.name.split("."):
                owner = getattr(owner, part)
            for alias in patch.aliases:
                if getattr(importlib.import_module(alias), patch.name) is not owner:
                    failed[str(patch)] = f"{alias} has a different one"
        except (ImportError, AttributeError) as error:
            if not patch.is_optional:
                failed[str(patch)] = str(error)
    return failed


def count() -> int:
    """The number of patches."""
    return len(_patches())
