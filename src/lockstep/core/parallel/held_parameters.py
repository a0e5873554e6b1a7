"""Checks for what strategies break: hooks on gradients, references to parameters, shared memory, and `max_norm`."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.core.errors import UsageError, listed
from lockstep.core.parallel import torch_internals

_ITEMS, _VALUES = 10_000, 200_000  # looked at in a collection; looked at in total
_FEW_ITEMS, _FEW_VALUES = 100, 5_000  # the same, for a look that every run takes
_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OF_MODULES = frozenset(vars(nn.Module()))


def check_hooks(model: nn.Module, *, ranks: int, sharded: bool) -> list[str]:
    """Check that the hooks on gradients of parameters (`register_hook`) see gradients that they can change.

    A hook runs on the gradient of one micro-batch of one rank. A hook that is linear in it, such as a mask, changes the
    sum of all gradients alike.

    Returns:
        notes for the log.

    Raises:
        UsageError: a hook would be lost, or would run before gradients are added over ranks; names the parameters.
    """
    before: list[str] = []
    after: list[str] = []
    for name, parameter in model.named_parameters():
        before += [name] if torch_internals.has_gradient_hooks(parameter) else []
        after += [name] if torch_internals.has_hooks_after_accumulation(parameter) else []
    if sharded and (before or after):
        raise UsageError(
            f"the gradients of these parameters have hooks, which sharding loses: {listed(before + after)}",
            where="parallel.strategy=fsdp",
            remedy="compute what the hooks do in the model or the loss (for a mask: weight * mask), or use ddp",
        )
    if after and ranks > 1:
        raise UsageError(
            "register_post_accumulate_grad_hook runs before gradients are added over ranks, so each rank would do "
            f"something different. These parameters have such hooks: {listed(after)}",
            where="Task.model",
            remedy="use register_hook for what is linear in the gradient, such as a mask; or train on one rank",
        )
    if not before and not after:
        return []
    return [
        f"note: the gradients of these parameters have hooks: {listed(before + after)}. A hook runs for each "
        "micro-batch of each rank. A mask or another factor is right. What is not linear in the gradient, such as a "
        "clamp, makes the trained model depend on batch.micro and the number of ranks"
    ]


def check_elements(model: nn.Module) -> None:
    """Raises UsageError if a trainable parameter has no elements: FSDP cannot reduce its gradient."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.numel():
            what = f"parameter {name} has no elements to shard: shape {tuple(parameter.shape)}"
            raise UsageError(what, where="parallel.strategy=fsdp", remedy="remove or freeze it, or use ddp")


def check_renormalised(model: nn.Module, *, ranks: int) -> None:
    """Check that no forward pass shortens rows of an embedding (`max_norm`), if each rank has different samples.

    Each rank would shorten the rows that its own samples look up: replicas differ, and shards lose the change.

    Raises:
        UsageError: names the modules.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [name for name, one in model.named_modules() if isinstance(one, kinds) and one.max_norm is not None]
    if found and ranks > 1:
        raise UsageError(
            f"with max_norm, each rank shortens the rows that its own samples look up, so {ranks} ranks would hold "
            f"different weights: {listed(found)}",
            where="Task.model",
            remedy="leave max_norm out and shorten what is looked up, in the model: "
            "vectors * (max_norm / vectors.norm(dim=-1, keepdim=True)).clamp(max=1); or train on one rank",
        )


def check_references(model: nn.Module, task: object) -> None:
    """Check that nothing holds a parameter of `model` but the modules that register it.

    Sharding replaces the parameters that `model` has now with new ones. A list of parameters, say, would keep the
    values of the beginning, and its gradients would be lost. Attributes of the task and of modules are followed through
    collections, objects, partial functions and closures.

    Raises:
        UsageError: names the parameters and who holds them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {id(module) for module in model.modules()}
    pending: deque[tuple[str, Any]] = deque([("the task", vars(task) if hasattr(task, "__dict__") else {})])
    for name, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if key not in _REGISTERED}
        if isinstance(module, nn.RNNBase):
            kept.pop("_flat_weights", None)  # follows each new parameter by itself
        pending.append((name or "the model", kept))
    seen = {id(task)}
    found: list[str] = []
    visits = 0
    while pending and visits < _VALUES:
        path, holder = pending.popleft()
        for key, value in _inside(holder):
            visits += 1
            if isinstance(value, Tensor):
                if id(value) in names:
                    found.append(f"{path}{key} is {names[id(value)]}")
            elif not isinstance(value, _LEAVES) and id(value) not in own and id(value) not in seen:
                seen.add(id(value))
                pending.append((f"{path}{key}", value))
    if found:
        raise UsageError(
            f"parameters are held outside the modules that register them: {listed(found, 5)}",
            where="parallel.strategy=fsdp",
            remedy="sharding replaces them with new parameters, so these would keep their first values: hold the "
            "module, and take its parameters where they are used (module.weight); or use ddp",
        )


def check_shared_memory(model: nn.Module) -> None:
    """Check that no parameter of `model` shares memory with another parameter, a buffer, or a tensor in an attribute.

    Sharding copies each parameter to its own memory: what the optimizer then writes into one is not in the other.
    One parameter with two names is different: it stays one.

    Raises:
        UsageError: names the tensors.
    """
    tensors: dict[int, tuple[str, Tensor]] = {}  # by identity: a tensor may have several names
    for name, module in model.named_modules():
        for kept in (module._parameters, module._buffers, vars(module)):
            for key, value in kept.items():
                if isinstance(value, Tensor) and value.layout == torch.strided:
                    tensors.setdefault(id(value), (f"{name}.{key}".lstrip("."), value))
    by_memory: dict[StorageWeakRef, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.values():
        memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        by_memory.setdefault(memory, []).append((name, tensor))
    found = [
        f"{name} and {other}"
        for some in by_memory.values()
        for place, (name, tensor) in enumerate(some)
        for other, its_tensor in some[:place]
        if any(isinstance(one, nn.Parameter) for one in (tensor, its_tensor)) and _overlap(tensor, its_tensor)
    ]
    if found:
        raise UsageError(
            f"these tensors share memory with a parameter, and sharding would separate them: {listed(found, 5)}",
            where="parallel.strategy=fsdp",
            remedy="register one parameter under both names (b.weight = a.weight), compute in `forward` what views a "
            "parameter, or make a copy (clone) if they are to differ; or use ddp",
        )


def trainable_leaves(holders: Mapping[str, Any], own: set[int]) -> dict[int, tuple[str, Tensor]]:
    """The leaf tensors that require a gradient and that `holders` lead to, near ones first.

    Args:
        holders: objects by name.
        own: `id` of tensors that are left out.

    Returns:
        by `id`: a path such as `Task.criterion.weight`, and the tensor.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    pending, seen, visits = deque(holders.items()), set[int](), 0
    while pending and visits < _FEW_VALUES:
        path, value = pending.popleft()
        visits += 1
        if isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf and id(value) not in own:
                found.setdefault(id(value), (path, value))
        elif not isinstance(value, _LEAVES) and id(value) not in seen:
            seen.add(id(value))
            pending.extend((f"{path}{key}", inner) for key, inner in _inside(value, _FEW_ITEMS))
    return found


def _overlap(one: Tensor, other: Tensor) -> bool:
    """True if the ranges of bytes of two tensors with the same storage overlap."""
    (begin, end), (its_begin, its_end) = _bytes(one), _bytes(other)
    return max(begin, its_begin) < min(end, its_end)


def _bytes(tensor: Tensor) -> tuple[int, int]:
    begin, size = int(tensor.storage_offset()) * tensor.element_size(), tensor.element_size()
    if not tensor.numel():
        return begin, begin
    steps = sum(int((length - 1) * stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * size


def _inside(holder: Any, most: int = _ITEMS) -> Iterator[tuple[str, Any]]:
    """The first values that `holder` holds, each with its place: `.name` or `[key]`."""
    items: Iterator[tuple[str, Any]]
    if isinstance(holder, nn.Module):
        kept = (holder._parameters, holder._buffers, holder._modules, vars(holder))
        items = ((f".{key}", value) for of in kept for key, value in of.items() if key not in _OF_MODULES)
    elif isinstance(holder, Mapping):
        is_attributes = all(isinstance(key, str) for key in holder)
        items = ((f".{key}" if is_attributes else f"[{key!r}]", value) for key, value in holder.items())
    elif isinstance(holder, list | tuple | set | frozenset | deque):
        items = ((f"[{number}]", value) for number, value in enumerate(holder))
    elif isinstance(holder, functools.partial):
        items = iter([(".func", holder.func), (".args", holder.args), (".keywords", holder.keywords)])
    elif isinstance(holder, types.MethodType):
        items = iter([(".__self__", holder.__self__)])
    elif isinstance(holder, types.FunctionType):
        variables = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
        items = ((f".{name}", cell.cell_contents) for name, cell in variables if _is_filled(cell))
    else:
        items = ((f".{name}", value) for name, value in getattr(holder, "__dict__", {}).items())
    for _, item in zip(range(most), items, strict=False):
        yield item


def _is_filled(cell: types.CellType) -> bool:
    try:
        return bool([cell.cell_contents])
    except ValueError:
        return False
