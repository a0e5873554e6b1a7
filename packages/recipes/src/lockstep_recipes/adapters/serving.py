"""What a LightningModule finds in `self.trainer`, `self.log` and similar attributes while one of its steps runs."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn

from lockstep.core import this_process
from lockstep.core.foreign_task import TrainingClock, refused, users_line
from lockstep_recipes.adapters.logged import StepLog, metrics_in

_OWN_RANK = (
    "all ranks have the same data, and Lockstep gives each rank its samples; to print once, use trainer.is_global_zero"
)
_REMEDIES = {
    "world_size": "the result would depend on the number of ranks: use the global batch, batch.global",
    **dict.fromkeys(("global_rank", "local_rank", "node_rank"), _OWN_RANK),
    "strategy": "the task must not communicate: for what needs all samples of the global batch write Task.embed, "
    "lockstep --explain global_loss",
    "logger": "log numbers with self.log; a lockstep.Writer receives the log entries, and a Presenter draws figures",
    "optimizers": "only training_step and validation_step of a training run have one",
    "lr_scheduler_configs": "the learning rate is self.optimizers().param_groups[0]['lr']",
    "callback_metrics": "read results in a Part: training.results, lockstep --explain parts",
}


class NoNumber:
    """Placeholder for the number of a batch within its epoch, which depends on how the global batch is split."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise refused(
            "batch_idx is used, but a step consumes a global batch that is split into micro-batches",
            users_line(),
            "use self.global_step, the number of updates so far",
        )

    for _name in """
    eq ne lt le gt ge bool int index float add radd sub rsub mul rmul mod rmod floordiv str format
    """.split():  # noqa: SIM905 - a table of words
        locals()[f"__{_name}__"] = _refuse
    del _name
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "batch_idx"


def arguments_after_batch(step: Callable[..., Any]) -> list[Any]:
    """The positional arguments of a step after the batch, as in Lightning: the number of the batch and, if the step
    requires it, that of the loader."""
    parameters = inspect.signature(step).parameters.values()
    placed = [one for one in parameters if one.kind <= one.VAR_POSITIONAL]
    takes = len(placed) > 1 or any(one.kind is one.VAR_POSITIONAL for one in placed)
    needed = sum(one.default is one.empty and one.kind < one.VAR_POSITIONAL for one in placed)
    return [NoNumber(), 0][: max(takes, needed - 1)]


class ServedTrainer:
    """The attributes of Lightning's Trainer that do not depend on ranks. All others are errors that name the user's
    line."""

    def __init__(self, clock: TrainingClock, plan: dict[str, Any], stage: str = "", optimizer: Any = None) -> None:
        """
        Args:
            plan: `max_epochs`, `max_steps`, `batches`, `steps`, `datamodule`.
            stage: `train`, `validate`, `predict`, or nothing.
            optimizer: the optimizer of the run.
        """
        if optimizer is not None:
            self.optimizers = [ReadOptimizer(optimizer)]
        self.global_step = clock.step
        self.current_epoch = clock.step // max(1, clock.steps_per_epoch)
        self.max_epochs, self.max_steps = plan.get("max_epochs"), plan.get("max_steps") or -1
        self.num_training_batches = plan.get("batches")
        self.estimated_stepping_batches = plan.get("steps")
        self.datamodule = plan.get("datamodule")
        self.training, self.validating = stage == "train", stage == "validate"
        self.predicting, self.testing = stage == "predict", False
        self.sanity_checking = self.evaluating = self.barebones = self.fast_dev_run = False
        self.accumulate_grad_batches = 1
        self.global_rank, self.local_rank = this_process.rank(), this_process.local_rank()
        self.is_global_zero = self.global_rank == 0

    def of_data(self, devices: int, nodes: int) -> ServedTrainer:
        """The trainer that data code sees. It has the devices of the Trainer's arguments, which multiply
        `batch.global`, and does not have a rank."""
        del self.global_rank, self.local_rank
        self.num_devices, self.num_nodes, self.world_size = devices, nodes, devices * nodes
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        remedy = _REMEDIES.get(name.removesuffix("s") if name == "loggers" else name, "compute it without the trainer")
        raise refused(f"trainer.{name} has no counterpart", users_line(), remedy)


class ReadOptimizer:
    """A read-only optimizer of the run: `param_groups` with the learning rates of this update."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [types.MappingProxyType(group) for group in optimizer.param_groups]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        remedy = "return the loss, and Lockstep does the update; for several optimizers see lockstep --explain players"
        raise refused(f"self.optimizers().{name} is used: only param_groups can be read", users_line(), remedy)


def _no_gather(*_: Any, **__: Any) -> NoReturn:
    raise refused("self.all_gather communicates inside a step", users_line(), _REMEDIES["strategy"])


def _print(*values: Any, **options: Any) -> None:
    if this_process.is_first():
        print(*values, **options)


class Parts:
    """The LightningModules and the metrics inside a module, found once."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [part for part in module.modules() if "_automatic_optimization" in vars(part)]
        self.metrics, self.collections = metrics_in(module)
        self.first = next(module.parameters(), None)


@contextlib.contextmanager
def served(parts: Parts, trainer: ServedTrainer, record: StepLog | None = None, data: Any = None) -> Iterator[None]:
    """Within this context, the modules log into `record`, and they and the DataModule `data` see `trainer`. Everything
    is restored afterwards."""
    record = StepLog() if record is None else record
    own = {"log": record.log, "log_dict": record.log_dict, "all_gather": _no_gather, "print": _print}
    own["optimizers"] = lambda use_pl_optimizer=True: trainer.optimizers[0]
    if hasattr(data, "trainer"):
        data.trainer = trainer
    for module in parts.modules:
        vars(module).update(own, _trainer=trainer)
        if parts.first is not None:
            vars(module)["_device"] = parts.first.device
    try:
        with record.watching(parts.metrics):
            yield
    finally:
        for collection in parts.collections:
            collection._state_is_copy = False  # a step that lists its metrics sets it
        for module in parts.modules:
            for name in own:
                vars(module).pop(name, None)
            vars(module)["_trainer"] = None
        if hasattr(data, "trainer"):
            data.trainer = None
