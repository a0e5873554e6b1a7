"""The form of a model's state: its names, shapes and dtypes. A checkpoint can be loaded if its form fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.checkpoint.nested import structure
from lockstep.core.errors import LockstepError, TrainingError, listed
from lockstep.core.parallel.sharded_tensor import is_sharded, local

Kind = tuple[int | str, ...] | None
"""The shape and dtype of a tensor, or the structure of nested values. None: any other value."""
_SHOWN = 5
_EXTRA = "_extra_state"  # the last part of the name that torch gives to what `get_extra_state` returns


def kind(value: Any) -> Kind:
    """The kind of a value in a model's state."""
    if isinstance(value, dict | list | tuple):
        return structure(value), "nested values"
    return (*value.shape, str(value.dtype).removeprefix("torch.")) if isinstance(value, Tensor) else None


def kinds(state: Mapping[str, Any]) -> dict[str, Kind]:
    """The kinds of a state by name."""
    return {name: kind(value) for name, value in state.items()}


def buffer_places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """For each saved buffer, by name: the module that has it, and its name there. Buffers may be None."""
    return {
        f"{prefix}.{key}" if prefix else key: (module, key)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key in module._buffers
        if key not in module._non_persistent_buffers_set
    }


@dataclass(frozen=True)
class Form:
    """The form of a newly built model's state, and what may have a different form in a checkpoint."""

    kinds: dict[str, Kind]
    buffers: frozenset[str]
    """Names of buffers that take the shape that they have in a checkpoint. None of a sharded model."""

    @classmethod
    def of(cls, model: nn.Module) -> Form:
        """The form of `model`, which is as it was built."""
        sharded = any(is_sharded(parameter) for parameter in model.parameters())
        return cls(kinds(model.state_dict()), frozenset() if sharded else frozenset(buffer_places(model)))

    def misfits(self, saved: Mapping[str, Kind]) -> list[str]:
        """The names of what cannot be loaded, sorted. `saved` need not have values other than tensors."""
        names = self.kinds.keys() | saved.keys()
        return sorted(name for name in names if not self._fits(name, saved))

    def _fits(self, name: str, saved: Mapping[str, Kind]) -> bool:
        own, other = self.kinds.get(name), saved.get(name)
        if own == other:
            return True
        if is_extra(name):  # `set_extra_state` gets it as it is
            return name in saved and name in self.kinds
        if name not in self.buffers or other is None:
            return False
        return name not in self.kinds or (own is not None and own[-1] == other[-1])


def described(new: Mapping[str, Kind], saved: Mapping[str, Kind], names: Iterable[str]) -> str:
    """The differences between tensors of a trained model and those of a newly built model, in words."""
    names = list(names)
    texts = []
    for name in names[:_SHOWN]:
        if name not in new:
            texts.append(f"{name} {_words(saved[name])} is not in a new model")
        elif name not in saved:
            texts.append(f"{name} {_words(new[name])} is only in a new model")
        else:
            texts.append(f"{name} is {_words(saved[name])}, and {_words(new[name])} in a new model")
    return "; ".join(texts) + (f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _words(of: Kind) -> str:
    return f"{of[-1]} {list(of[:-1])}" if of is not None else "no tensor"


def place_buffer(model: nn.Module, name: str, value: Tensor) -> Tensor | None:
    """Give the buffer `name` the shape and the values of `value`. The buffer stays the same object, if there is one.

    Returns:
        a tensor that shares the buffer's memory; None: the model has no such buffer.
    """
    module, key = buffer_places(model).get(name, (model, ""))
    if not key:
        return None
    buffer = module._buffers[key]
    if buffer is None:
        device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), value.device)
        buffer = module._buffers[key] = value.to(device, copy=True)
    else:
        buffer.data = value.to(buffer.device, copy=True)
    return buffer.detach()


def is_extra(name: str) -> bool:
    """True if a name in a state is of what `get_extra_state` returned."""
    return name.rpartition(".")[2] == _EXTRA


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Call `load_state_dict` of `model` with a state in its own form.

    Raises:
        TrainingError: the model does not take it.
    """
    try:
        model.load_state_dict(state)
    except LockstepError:  # of a module that finds that a checkpoint is of a different model
        raise
    except Exception as error:
        raise TrainingError(
            f"load_state_dict does not take what state_dict returned: {type(error).__name__}: {error}",
            where="Task.model",
            remedy="make the two match: leave both as torch has them, or override both (and get_extra_state "
            "together with set_extra_state); no run of this model can be resumed otherwise",
        ) from error


def check_complete(model: nn.Module, *, also_frozen: bool) -> None:
    """Check that a checkpoint of a newly built model will hold its parameters, and that the model can load it.

    Args:
        also_frozen: whether frozen parameters must be in it too, because the task alone cannot make them again.

    Raises:
        TrainingError: names the parameters.
    """
    state = model.state_dict()
    memory = {local(value).untyped_storage().data_ptr() for value in state.values() if isinstance(value, Tensor)}
    lost = [
        name
        for name, parameter in model.named_parameters()
        if name not in state and local(parameter).untyped_storage().data_ptr() not in memory
        if parameter.requires_grad or also_frozen
    ]
    if lost:
        raise TrainingError(
            f"state_dict leaves out {listed(lost, _SHOWN)}: a checkpoint would not hold all that a resumed run needs",
            where="Task.model",
            remedy="leave state_dict as torch has it; what is frozen may be left out if neither train.init_from nor "
            "train.unfreeze is set. `lockstep export` writes what you need of the weights",
        )
    with torch.no_grad():
        load(model, state)
