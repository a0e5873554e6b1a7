"""Observes models that are wrapped for several ranks, and which model each parameter belongs to."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lockstep_audit.observe import digests, evaluations, module_creation, places, torch_state, writes
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import After, recorder

_NAMES = 50
_MODAL = ("Dropout", "BatchNorm", "InstanceNorm", "DropPath")
"""Names of modules that behave differently in evaluation mode."""


@dataclasses.dataclass
class Model:
    """A wrapped model."""

    number: int
    how: str
    at: list[str | int] | None
    wrapper: weakref.ref[Any]
    inner: weakref.ref[Any]
    trainable: dict[str, bool]
    """By name, of each parameter at the wrapping."""
    before: str | None = None
    """A digest of the parameters before DDP made them equal."""
    ranks: list[int] | None = None
    """Of the mesh that fully_shard was given."""
    is_told: bool = False
    active: int = 0
    """Forward passes through the wrapper that are running now."""
    pending: int = 0
    """Training forward passes through the wrapper since the last backward."""
    synced: bool | None = None
    """Whether gradients are exchanged in the backward of the last training forward pass. None: not DDP."""
    unsynced_at: tuple[list[str | int] | None, bool] | None = None
    """Where no_sync() was last called, and whether the script itself called it."""
    bypassed: int = 0
    past_at: list[str | int] | None = None
    """Where its parameters were first used outside the wrapper's forward pass, since the last backward."""
    evaluation_at: list[str | int] | None = None
    """Where eval() was last called."""
    evaluating: bool = False
    """Whether the last forward pass with gradients was in evaluation mode."""
    inputs: set[int] = dataclasses.field(default_factory=set)
    """Steps whose first inputs were recorded."""
    evaluation: evaluations.Evaluation = dataclasses.field(default_factory=evaluations.Evaluation)


_models: Registry[Model] = Registry()
_inner: Registry[Model] = Registry()
_owners: Registry[tuple[Model, str]] = Registry()
at_wrapping: set[int] = set()
"""Ids of the parameters of wrapped models at the wrapping. A weak reference would forbid swaps."""
_count = 0


def unsynced(wrapper: Any) -> None:
    """DDP.no_sync."""
    model = _models.get(wrapper)
    if model is not None:
        model.unsynced_at = (places.here(), places.is_by_user(sys._getframe(3)))


def wrapped(how: str, wrapper: Any, module: Any = None, *arguments: Any, **named: Any) -> After:
    """DDP(...), FSDP(...), DataParallel(...), fully_shard(...)."""
    at = places.here()
    before = recorder.guard("weights before a wrapping", weights_of, module) if how == "ddp" else None

    def after(result: Any, error: BaseException | None) -> None:
        if error is None:
            _watch(how, at, wrapper, before, named.get("mesh") if how == "fsdp2" else None)

    return after


def weights_of(module: Any) -> str:
    return digests.of_numbers(digests.of_tensors({n: p.detach() for n, p in module.named_parameters()}).values())


def _watch(how: str, at: list[str | int] | None, wrapper: Any, before: str | None, mesh: Any = None) -> None:
    global _count
    inner = wrapper if how == "fsdp2" else wrapper.module
    trainable = {name: parameter.requires_grad for name, parameter in inner.named_parameters()}
    model = Model(_count, how, at, weakref.ref(wrapper), weakref.ref(inner), trainable, before)
    model.ranks = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else None
    _count += 1
    module_creation.has_wrapped = True
    at_wrapping.update(map(id, inner.parameters()))
    _models.put(wrapper, model)
    if inner is not wrapper:
        _inner.put(inner, model)
    if how in ("ddp", "data_parallel"):  # FSDP's root is known at the first forward pass
        tell(model)
    if how == "ddp":
        recorder.guard("writes to parameters", writes.watch, inner, dict(inner.named_parameters()))
    for function in on_wrapped:
        function()


on_wrapped: list[Callable[[], None]] = []
"""Called after each wrapping."""


def tell(model: Model) -> None:
    """Write the event of a wrapping."""
    model.is_told = True
    wrapper: Any = model.wrapper()
    inner: Any = model.inner()
    refresh(model)
    group = getattr(wrapper, "process_group", None)
    event: dict[str, Any] = {"at": model.at, "model": model.number, "how": model.how, "class": type(inner).__name__}
    event |= {"group": getattr(group, "group_name", None), "ranks": model.ranks or torch_state.ranks_of(group)}
    event |= {"ignored": sorted(getattr(wrapper, "parameters_to_ignore", ()))[:_NAMES] or None}
    event |= {"parameters": len(model.trainable), "trainable": sum(model.trainable.values())}
    event |= {"frozen": [name for name, is_on in model.trainable.items() if not is_on][:_NAMES]}
    event |= {"names_digest": digests.of_numbers(model.trainable), "before": model.before}
    event |= {"synced": getattr(wrapper, "broadcast_buffers", None)}
    event |= {"find_unused": getattr(wrapper, "find_unused_parameters", None)}
    event |= {"static_graph": getattr(wrapper, "static_graph", None), "buffers": len(list(inner.buffers()))}
    event |= {"modal": sum(any(word in type(each).__name__ for word in _MODAL) for each in inner.modules())}
    recorder.emit("wrap", limit=100, **event)


def refresh(model: Model) -> None:
    """Remember which model the parameters belong to. FSDP replaces them."""
    for name, parameter in parameters_of(model):
        _owners.put(parameter, (model, name))


def parameters_of(model: Model) -> Iterator[tuple[str, Any]]:
    inner = model.inner()
    return iter(()) if inner is None else inner.named_parameters()


def told() -> list[Model]:
    """The live models that have an event."""
    return [model for _, model in _models.items() if model.is_told]


def inner_of_told() -> list[Any]:
    """The modules inside of their wrappers."""
    return [inner for inner in (model.inner() for model in told()) if inner is not None]


def are_all(how: str) -> bool:
    """True if models were wrapped, and all live ones in this way."""
    return bool(told()) and all(model.how == how for _, model in _models.items())


def of(module: Any) -> Model | None:
    """The model of a wrapper."""
    return _models.get(module)


def inside(module: Any) -> Model | None:
    """The model whose wrapper contains a module."""
    return _inner.get(module)


def owner(parameter: torch.Tensor) -> tuple[Model, str] | None:
    """The model of a parameter, and the parameter's name there."""
    return _owners.get(parameter)


def is_sharded(parameter: torch.Tensor) -> bool:
    """True for a parameter of FSDP."""
    found = _owners.get(parameter)
    return found is not None and found[0].how.startswith("fsdp")


def is_shard_of(name: str, tensor: torch.Tensor) -> bool:
    """True if a tensor has the shape of this rank's shard of a parameter of that name, and not of the whole."""
    for parameter, (_, own) in _owners.items():
        if name.removeprefix("module.") == own and hasattr(parameter, "_local_tensor"):
            whole, shard = tuple(parameter.shape), tuple(parameter._local_tensor.shape)
            return tuple(tensor.shape) == shard != whole
    return False


def missing(known: set[int]) -> dict[int, list[str]]:
    """By model, names of trainable parameters whose ids are unknown."""
    found = {m.number: [n for n, p in parameters_of(m) if p.requires_grad and id(p) not in known] for m in told()}
    return {number: names[:_NAMES] for number, names in found.items()}


def left_out(known: set[int]) -> dict[int, list[str]] | None:
    """By model, names of parameters that have a gradient and are in no optimizer."""
    found = {m.number: [n for n, p in parameters_of(m) if p.grad is not None and id(p) not in known] for m in told()}
    return {number: names[:_NAMES] for number, names in found.items() if names} or None


hooks: list[str] = []
"""Names of communication hooks, which reduce gradients in their own way."""


def hooked(wrapper: Any, state: Any, hook: Any, *_: Any, **__: Any) -> After:
    """DDP.register_comm_hook."""
    model = _models.get(wrapper)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    hooks.append(name)
    if model is not None:
        recorder.emit("hook", limit=20, at=places.here(), model=model.number, name=name)
    return None
