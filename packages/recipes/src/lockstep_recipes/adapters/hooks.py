"""Find hooks that a LightningModule or a DataModule overrides but Lockstep would not call. Errors name the line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lockstep.core.errors import UsageError
from lockstep.core.foreign_task import DOCS, line_of, line_with, refused

_PART = "write a lockstep.Part with {}: lockstep --explain adapters"
_REMEDIES = {
    "on_fit_start": _PART.format("`start`"),
    "on_train_start": _PART.format("`start`"),
    "on_train_epoch_start": _PART.format("`after_step`, if training.step % training.steps_per_epoch == 0"),
    "on_train_epoch_end": _PART.format("`after_step`, if training.step % training.steps_per_epoch == 0"),
    "on_train_batch_start": _PART.format("`after_step`; code that changes the loss belongs in training_step"),
    "on_train_batch_end": _PART.format("`after_step`"),
    "on_train_end": _PART.format("`end`"),
    "on_fit_end": _PART.format("`end`"),
    "on_validation_epoch_end": (
        "log the metric object in validation_step, self.log('acc', self.acc): it is computed once, over the "
        "samples of all ranks. For anything else, write a Part with `after_evaluation`"
    ),
    "on_after_backward": _PART.format("`before_update`, which has the gradients of the global batch"),
    "on_before_optimizer_step": _PART.format("`before_update`, which has the gradients of the global batch"),
    "on_before_zero_grad": _PART.format("`after_step`"),
    "on_save_checkpoint": "keep state in buffers, or in the module's get_extra_state",
    "on_load_checkpoint": "keep state in buffers, or in the module's set_extra_state",
    "configure_gradient_clipping": "optim.clip_norm=1.0 clips the gradient of the global batch",
    "optimizer_step": "write an optimizer class with this step, and return it from configure_optimizers",
    "lr_scheduler_step": "return a torch scheduler, or a LambdaLR",
    "configure_callbacks": "lockstep --explain adapters",
    "transfer_batch_to_device": "give the batch a method `to`; Lockstep moves batches ahead of time",
    "on_after_batch_transfer": "change the batch at the start of training_step",
    "on_before_batch_transfer": "change the batch in collate_fn",
    "backward": "return the loss; there is one backward pass for each micro-batch",
}
_OTHERS = ("optimizer_zero_grad", "configure_sharded_model", "manual_backward", "clip_gradients")
_NOT_CALLED = ("on_test_", "on_predict_")  # they belong to other Lightning commands


def base_of(kind: type, name: str) -> type | None:
    """The Lightning class, `LightningModule` or `LightningDataModule`, that `kind` derives from. Imports nothing."""
    libraries = ("pytorch_lightning", "lightning")
    found = (one for one in kind.__mro__ if one.__name__ == name and one.__module__.split(".")[0] in libraries)
    return next(found, None)


def overridden(value: Any, base: type) -> Iterable[str]:
    """The names of hooks of `base` that `value` or its class overrides and that are not called here."""
    names = [name for name in dir(base) if name.startswith("on_") and not name.startswith(_NOT_CALLED)]
    names = [name for name in names if callable(getattr(base, name))]
    for name in [*names, *(name for name in _REMEDIES if not name.startswith("on_")), *_OTHERS]:
        if is_own(value, base, name):
            yield name


def is_own(value: Any, base: type, name: str) -> bool:
    """True if a method is not the one of `base`: the class of `value` overrides it, or it was set on `value`."""
    return name in vars(value) or getattr(type(value), name, None) is not getattr(base, name, None)


def check(values: Sequence[tuple[Any, type]], ignore: Sequence[str]) -> list[str]:
    """Check that no hook would be skipped silently.

    Args:
        values: objects, each with its Lightning class.
        ignore: names of hooks to leave out.

    Returns:
        a line for the log, if hooks are left out.

    Raises:
        UsageError: a hook would be skipped (the error names all of them with their lines), or the gradient of a
            parameter has a hook.
    """
    faults, left_out = [], []
    for value, base in values:
        check_parameters(value)
        for name in overridden(value, base):
            if name in ignore:
                left_out.append(name)
                continue
            line = line_of(getattr(value, name))
            remedy = _REMEDIES.get(name, "write a lockstep.Part (lockstep --explain parts)")
            faults.append(f"{line}: {type(value).__name__}.{name} would not be called: {remedy}")
    if faults:
        names = sorted({fault.split(" would")[0].rpartition(".")[2] for fault in faults})
        raise UsageError(
            "\n  ".join(["Lightning hooks that Lockstep does not call:", *faults]),
            remedy=f"or leave them out: ignore={names!r}, on the command line task.ignore='[{', '.join(names)}]' "
            f"({DOCS})",
        )
    return [f"hooks left out because of `ignore`: {', '.join(left_out)}"] if left_out else []


def check_automatic(module: Any) -> None:
    """Raises UsageError if the module does its own optimizer steps."""
    if getattr(module, "automatic_optimization", True):
        return
    raise UsageError(
        f"{type(module).__name__} does its own optimizer steps: automatic_optimization is False",
        where=line_with(type(module).__init__, "automatic_optimization"),
        remedy="return the loss from training_step; for alternating optimizers see lockstep --explain players",
    )


def check_parameters(value: Any) -> None:
    """Raises UsageError if gradients of parameters have hooks: a copy of the module loses them, and they would see sums
    over micro-batches."""
    for name, one in value.named_parameters() if isinstance(value, nn.Module) else ():
        for hook in (one._backward_hooks or one._post_accumulate_grad_hooks or {}).values():
            remedy = (
                "for a mask, multiply the weight by it in forward; for anything else, write a lockstep.Part with "
                "`before_update`"
            )
            raise refused(f"the gradient of {name} has a hook, which would not be called", line_of(hook), remedy)
