"""What a block changes in its forward pass, so that its recomputation begins as the pass began, and leaves no trace."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lockstep.core.errors import TrainingError, listed
from lockstep.core.parallel.sharded_tensor import local

_ABSENT = object()
_OF_TORCH = frozenset(vars(nn.Module()))
_BY_KERNELS = ("running_mean", "running_var")  # kernels of BatchNorm and InstanceNorm write them, uncounted by torch


@dataclass
class StateChanges:
    """What a pass has changed, with what was there before."""

    places: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    """Dicts in which an object was replaced, its name there, and the object before."""
    values: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tensors that were written in place, and copies of their values before."""
    memory: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tensors that got other memory (`parameter.data = ...`), and tensors with the memory before."""
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    """Lists, sets, dicts and deques with other items, and copies of them."""

    @contextlib.contextmanager
    def undone(self) -> Generator[None, None, None]:
        """Inside, everything is as before the pass. Afterwards it is as it was when this was entered."""
        now = StateChanges(
            [(owner, name, owner.get(name, _ABSENT)) for owner, name, _ in self.places],
            [(tensor, tensor.detach().clone()) for tensor, _ in self.values],
            [(tensor, tensor.data) for tensor, _ in self.memory],
            [(container, copy.copy(container)) for container, _ in self.containers],
        )
        self._put()
        try:
            yield
        finally:  # torch ends the recomputation by an exception as soon as it has all activations
            now._put()

    def _put(self) -> None:
        for owner, name, value in self.places:
            if value is _ABSENT:
                owner.pop(name, None)
            else:
                owner[name] = value
        for tensor, value in self.memory:
            tensor.data = value
        for tensor, value in self.values:
            tensor.data.copy_(value)  # `data`: torch does not count it as a change
        for container, value in self.containers:
            container.clear()
            container.extend(value) if isinstance(container, list | deque) else container.update(value)


@final
class BlockState:
    """Notes what the forward passes of a block change: buffers, parameters, and attributes of its modules.

    Buffers and tensors in attributes are copied before each pass; copies of what stays the same go right after it. Of
    parameters, only those are copied that passes before have written. The first pass is watched, operation by
    operation: a parameter is copied just before it is written, and writes through `parameter.data` are seen, which
    torch does not count. So are the passes 2, 4, 8, ... Compiled code is not watched: such a pass copies all
    parameters, and compares.

    Args:
        name: of the block, for errors.
        model: its tensors outside the block must not be written by the block.
    """

    def __init__(self, block: nn.Module, name: str = "", model: nn.Module | None = None) -> None:
        self.block, self.name = block, name or type(block).__name__
        self.modules = list(block.modules())
        self.own = [one for one in self.modules if not type(one).__module__.startswith("torch.nn.")]
        self.outside = _outside(block, model)
        self.is_compiled = False
        self.written = {key for key, _ in self._tensors() if key[1] in _BY_KERNELS}
        """Numbers of modules, and names there, of the tensors that a pass has written."""
        self.passes, self.next_watched = 0, 1

    @contextlib.contextmanager
    def noted(self, changes: StateChanges) -> Generator[None, None, None]:
        """Around a forward pass. Afterwards, `changes` contains what the pass has changed.

        Raises:
            TrainingError: the pass has changed what a recomputation could not bring back; names it.
        """
        self.passes += 1
        is_watched = self.passes == self.next_watched
        self.next_watched *= 2 if is_watched else 1
        tensors, dicts = dict(self._tensors()), [(owner, dict(owner)) for owner in self._dicts()]
        containers = [(one, copy.copy(one)) for one in self._containers()]
        before = {key: (tensor, tensor.data, tensor._version) for key, tensor in tensors.items()}
        copies = {
            key: tensor.detach().clone()
            for key, tensor in tensors.items()
            if key in self.written or not isinstance(tensor, nn.Parameter) or (is_watched and self.is_compiled)
        }
        seen: set[Any] = set()
        if is_watched and not self.is_compiled:
            outside = {("", name): tensor for name, tensor in self.outside.items()}
            with _Watch({**tensors, **outside}, copies, seen):
                yield
            self._raise([name for owner, name in seen if owner == ""], "writes outside of itself, into")
        else:
            yield
        if is_watched:
            seen |= {key for key, old in copies.items() if not torch.equal(before[key][1], old)}
        changes.places += [
            (owner, name, was.get(name, _ABSENT))
            for owner, was in dicts
            for name in owner.keys() | was.keys()
            if owner.get(name, _ABSENT) is not was.get(name, _ABSENT)
        ]
        changes.containers += [(one, was) for one, was in containers if _differ(one, was)]
        late: list[str] = []
        for key, (tensor, data, version) in before.items():
            if _memory(tensor) != _memory(data):
                changes.memory.append((tensor, data))
            is_counted = tensor._version != version
            if (is_counted and key not in copies) or (
                key in seen - self.written and not is_counted and self.passes > 1
            ):
                late.append(self._name(key))  # there is no copy; or passes before may have written it unseen
            if is_counted or key in seen:
                self.written.add(key)
            if key in self.written and key in copies:
                changes.values.append((data, copies[key]))
        self._raise(late, "writes in later passes, which it did not in the first, into")

    def _tensors(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        for number, module in enumerate(self.modules):
            for kept in (module._parameters, module._buffers):
                yield from (((number, name), one) for name, one in kept.items() if one is not None)
        for number, module in enumerate(self.own):
            for name, one in vars(module).items():
                if isinstance(one, Tensor) and one.layout == torch.strided and one.is_leaf and not one.is_inference():
                    yield (-1 - number, name), one

    def _dicts(self) -> Iterator[dict[str, Any]]:
        yield from (module._buffers for module in self.modules)
        yield from (module._parameters for module in self.modules)
        yield from (vars(module) for module in self.own)

    def _containers(self) -> Iterator[Any]:
        for module in self.own:
            for name, one in vars(module).items():
                if name not in _OF_TORCH and isinstance(one, list | set | dict | deque):
                    yield one

    def _name(self, key: tuple[Any, str]) -> str:
        module = self.modules[key[0]] if key[0] >= 0 else self.own[-1 - key[0]]
        inside = next(name for name, one in self.block.named_modules() if one is module)
        return ".".join(filter(None, (self.name, inside, key[1])))

    def _raise(self, names: list[str], what: str) -> None:
        if names:
            raise TrainingError(
                f"block {self.name} {what} {listed(sorted(names))}: its recomputation would write once more",
                where="compute.activation_checkpointing",
                remedy="use compute.activation_checkpointing=false, or write in the model, after its blocks",
            )


@final
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that writes into tensors, through whatever view, and copies these just before the write."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Mapping[Any, Tensor], copies: dict[Any, Tensor], written: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies, self._tensors, self._written = copies, tensors, written
        self._by_memory: dict[int, list[Any]] = {}
        for key, tensor in tensors.items():
            if memory := _memory(tensor):
                self._by_memory.setdefault(memory, []).append(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = dict(zip([one.name for one in schema.arguments], args, strict=False)) | (kwargs or {})
            writes = [given.get(one.name) for one in schema.arguments if one.alias_info and one.alias_info.is_write]
            for tensor in tree_iter(writes):
                if isinstance(tensor, Tensor):
                    self._note(_memory(tensor))
        return func(*args, **(kwargs or {}))

    def _note(self, memory: int) -> None:
        for key in self._by_memory.get(memory, ()):
            self._written.add(key)
            if key not in self._copies:
                self._copies[key] = self._tensors[key].detach().clone()


@contextlib.contextmanager
def written_by_pass(module: nn.Module, names: set[str], *, is_compiled: bool) -> Generator[None, None, None]:
    """Around a forward pass. Afterwards, `names` contains the parameters and buffers that the pass has written.

    Left out are the statistics of BatchNorm and its relatives.

    Args:
        is_compiled: only what torch counts is seen, because compiled code cannot be watched.
    """
    norms = {name for name, one in module.named_modules() if hasattr(one, _BY_KERNELS[0])}
    named = {
        name: one
        for name, one in (*module.named_parameters(), *module.named_buffers())
        if name.rpartition(".")[0] not in norms or isinstance(one, nn.Parameter)
    }
    before = {name: (one._version, _memory(one)) for name, one in named.items()}
    owners = {id(one): name for name, one in named.items()}
    seen: set[str] = set()
    watch = contextlib.nullcontext() if is_compiled else _Watch(named, dict(named), seen)
    with watch:
        yield
    now = {name: (one._version, _memory(one)) for name, one in named.items()}
    replaced = {name for name, one in module.named_buffers() if name in named and owners.get(id(one)) != name}
    names |= seen | replaced | {name for name in named if now[name] != before[name]}


def refusing_writes(call: Callable[..., Any], blocks: Mapping[str, nn.Module]) -> Callable[..., Any]:
    """`call`, which is compiled together with the recomputation of `blocks`: there, nothing can be brought back.

    The returned function raises TrainingError after a pass that wrote into parameters of the blocks. Writes that torch
    does not count are looked for in passes 1, 2, 4, 8, ...
    """
    passes, next_compared = 0, 1

    def checked(*args: Any, **options: Any) -> Any:
        nonlocal passes, next_compared
        if not torch.is_grad_enabled():  # nothing is recomputed
            return call(*args, **options)
        passes += 1
        compares = passes == next_compared
        next_compared *= 2 if compares else 1
        # FSDP has replaced the parameters of the blocks since they were compiled.
        named = {f"{name}.{key}": one for name, block in blocks.items() for key, one in block.named_parameters()}
        versions = [one._version for one in named.values()]
        copies = [local(one).detach().clone() for one in named.values()] if compares else []
        result = call(*args, **options)
        written = [
            name for (name, one), version in zip(named.items(), versions, strict=True) if one._version != version
        ]
        pairs = zip(named.items(), copies, strict=False)
        written += [name for (name, one), old in pairs if not torch.equal(local(one), old)]
        if written:
            raise TrainingError(
                f"compiled blocks write into {listed(sorted(set(written)))}: their recomputation would write once more",
                where="compute.activation_checkpointing, compute.compile",
                remedy="leave out one of the two",
            )
        return result

    return checked


def _outside(block: nn.Module, model: nn.Module | None) -> dict[str, Tensor]:
    """The parameters and buffers of a model that are not those of a block, by name."""
    own = {id(one) for one in (*block.parameters(), *block.buffers())}
    named = () if model is None else (*model.named_parameters(), *model.named_buffers())
    return {name: one for name, one in named if id(one) not in own}


def _memory(tensor: Tensor) -> int:
    own = local(tensor)
    return own.untyped_storage().data_ptr() if own.layout == torch.strided else 0


def _differ(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return True
    if isinstance(one, set):
        return bool(one != other)
    if isinstance(one, dict):
        return any(one[key] is not other.get(key, _ABSENT) for key in one)
    return any(a is not b for a, b in zip(one, other, strict=True))
