"""Observes what a script does to gradients by hand, between a backward pass and the step that uses them."""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import torch
import torch.distributed as dist

from lockstep_audit.observe import digests, models, places, torch_state
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import recorder

_LOOKS = 8
_STAMPED, _NUMBERS, _SOME = 8, 65_536, 256
"""The number of parameters, and of values of each, that are examined to see whether parameters changed."""
_SAME = 1e-3


class Gradients:
    """The gradients that optimizers will use next, and what a script does to sum them by hand."""

    def __init__(self) -> None:
        self.parameters: Registry[None] = Registry()
        """Of optimizers that have stepped or were made, and in no wrapped model."""
        self.all: Registry[None] = Registry()
        """Of any optimizer."""
        self.after_backward: dict[int, float] = {}
        self.reduced: dict[int, dict[str, Any]] = {}
        self.waited: set[int] = set()
        """Ids of the work handles of asynchronous all-reduces that the script waited for."""
        self.shards: dict[int, float] = {}
        """Norms of the shards of gradients after the last backward pass, by the id of the parameter."""
        self.norm_at: list[str | int] | None = None
        """Where the script computed the norm of a shard of a gradient."""
        self.scaled_at: list[str | int] | None = None
        """Where the script last multiplied a shard of a gradient."""
        self.given: dict[int, float] = {}
        """Sums of the gradients that communication hooks received in this backward pass, by the id of the parameter."""
        self.copies: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str | int] | None]] = []
        """Copies of gradients that the script sums over ranks: parameter, numbers of its gradient, copy, and where."""
        self._places: dict[int, torch.Tensor] = {}
        self.cleared_at: list[str | int] | None = None
        """Where zero_grad() last cleared gradients since the last backward pass."""
        self.rescaled: float | None = None
        """The factor by which the script multiplied all gradients between the last backward pass and a clip or step."""
        self._stamp: list[float] = []
        self._accumulates = False
        self._is_fresh = False
        self._looks = 0
        self._bare: tuple[int, list[weakref.ref[torch.Tensor]]] = (0, [])

    def at_backward(self, is_sampled: bool) -> None:
        """Remember norms of the gradients."""
        self._is_fresh = False
        self.after_backward, self.shards, self.norm_at, self.scaled_at = {}, {}, None, None
        self.cleared_at, self.rescaled, self.copies = None, None, []
        has_others = torch_state.has_other_ranks()
        if has_others:
            self._tell_given()
        bare = self._without_owner() if has_others and self._looks < _LOOKS else []
        if not is_sampled and not bare:
            return
        self._looks += bool(bare)
        looked = [parameter for parameter, _ in self.parameters.items()] if is_sampled else bare
        with torch.no_grad():
            self.after_backward = _norms(looked)
            if is_sampled:
                self.shards = _norms([parameter for parameter, _ in self.all.items() if models.is_sharded(parameter)])
        is_needed = is_sampled and self._accumulates
        self._stamp = (recorder.guard("stamps of parameters", self._stamped) if is_needed else None) or []

    def _stamped(self) -> list[float]:
        """Numbers that change when parameters do."""
        held = [parameter for parameter, _ in self.all.items()]
        first = [digests.local(each).detach().flatten()[:_NUMBERS].float() for each in held[:_STAMPED]]
        return [*norms_of(first), *(each._version for each in held)]

    def note_cleared(self, *_: Any, **__: Any) -> None:
        """Optimizer.zero_grad and Module.zero_grad."""
        if self._stamp:
            self.cleared_at = places.here()

    def gone(self) -> tuple[bool | None, bool | None]:
        """Before a backward pass: whether all gradients of the previous pass are gone, and the same with None if
        parameters have changed since. None: there were none, or the training did not accumulate before."""
        self._accumulates = True
        if not self._stamp or not (any(self.after_backward.values()) or any(self.shards.values())):
            return None, None
        gone = not any(_norms([parameter for parameter, _ in self.all.items()]).values())
        return gone, gone if self._stamp == self._stamped() else None

    def note_rescaled(self) -> None:
        """Before a clip or a step: the one factor of all gradients since the backward pass, if there is one."""
        held = {key: norm for key, norm in (self.after_backward | self.shards).items() if norm}
        now = _norms([parameter for parameter, _ in self.all.items() if id(parameter) in held]) if held else {}
        factors = [norm / held[key] for key, norm in now.items()]
        if self.rescaled is None and factors and max(factors) - min(factors) <= _SAME * max(factors):
            self.rescaled = factors[0]

    def is_rewritten(self, parameters: list[torch.Tensor]) -> bool:
        """True if gradients are not those of the last backward pass, scaled or summed over ranks."""
        now = _norms(parameters)
        factors = [now[key] / norm for key, norm in self.after_backward.items() if norm and key in now]
        return not self.reduced and bool(factors) and max(factors) - min(factors) > _SAME * max(factors)

    def _without_owner(self) -> list[torch.Tensor]:
        """Parameters of no wrapped model. Those of a model stay there, so only new ones are looked up."""
        if self._bare[0] != self.parameters.puts:
            found = [parameter for parameter, _ in self.parameters.items() if models.owner(parameter) is None]
            self._bare = self.parameters.puts, [weakref.ref(parameter) for parameter in found]
        living = (reference() for reference in self._bare[1])
        return [parameter for parameter in living if parameter is not None and models.owner(parameter) is None]

    def _tell_given(self) -> None:
        """Sums of gradients before and after communication hooks."""
        for model in models.told() if self.given else ():
            held = {n: p for n, p in models.parameters_of(model) if id(p) in self.given and p.grad is not None}
            sums = {name: [self.given[id(p)], float(p.grad.double().sum())] for name, p in held.items()}
            if sums:
                recorder.emit("hook_sums", limit=8, model=model.number, sums=sums)
        self.given.clear()

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter whose gradient a tensor is."""
        if not self._is_fresh:
            self._is_fresh = True
            living = [parameter for parameter, _ in self.parameters.items()]
            self._places = {p.grad.data_ptr(): p for p in living if p.grad is not None and not _is_sharded(p.grad)}
        found = self._places.get(tensor.data_ptr()) if not _is_sharded(tensor) else None
        grad = found.grad if found is not None else None  # the memory of a freed gradient may be reused
        if grad is not None and grad.shape == tensor.shape and grad.data_ptr() == tensor.data_ptr():
            return found
        with_gradients = [parameter for parameter in self._places.values() if parameter.grad is not None]
        total = sum(parameter.grad.numel() for parameter in with_gradients if parameter.grad is not None)
        if tensor.ndim == 1 and with_gradients and tensor.numel() == total:  # a flat copy of all
            first = with_gradients[0].grad
            if first is not None and torch.equal(tensor[: first.numel()].detach(), first.detach().flatten()):
                return with_gradients[0]
        return None

    def note_copy(self, tensor: torch.Tensor, at: list[str | int] | None) -> None:
        """A sum over ranks of what is not a gradient. It may be a copy of one, or of all, in another type or scale."""
        if not self.after_backward or len(self.copies) >= _LOOKS or not tensor.is_floating_point() or tensor.ndim == 0:
            return
        held = [p for p, _ in self.parameters.items() if p.grad is not None and not _is_sharded(p.grad)]
        is_flat = tensor.ndim == 1 and len(held) > 1 and tensor.numel() == sum(p.numel() for p in held)
        for parameter in held[:1] if is_flat else (p for p in held if p.shape == tensor.shape):
            own = _some(parameter.grad)
            if _is_parallel(own, _some(tensor[: parameter.numel()] if is_flat else tensor)):
                part = tensor[: parameter.numel()] if is_flat else tensor
                self.copies.append((parameter, own, part, at))
                return

    def take_copies(self, parameters: list[torch.Tensor]) -> list[str | int] | None:
        """Where copies were summed since the last backward pass, if no sum came back to its gradient."""
        mine, (copies, self.copies) = {id(parameter) for parameter in parameters}, (self.copies, [])
        lines = []
        for parameter, own, copy, at in (each for each in copies if id(each[0]) in mine):
            now, result = None if parameter.grad is None else _some(parameter.grad), _some(copy)
            if now is not None and not _is_parallel(own, result):  # else ranks have equal gradients
                lines.append(at if _is_parallel(now, own) and not _is_parallel(now, result) else None)
        return lines[0] if lines and None not in lines else None

    def number_of(self, parameter: torch.Tensor) -> int:
        """The position of a parameter among those of optimizers, in the order in which they were made."""
        return next(number for number, (other, _) in enumerate(self.parameters.items()) if other is parameter)

    def norm(self) -> float:
        """The norm of all gradients."""
        return math.hypot(*(_norm(p.grad) for p, _ in self.parameters.items() if p.grad is not None))

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter that a tensor is, or the first of all that the tensor is a flat copy of."""
        living = [parameter for parameter, _ in self.all.items() if not _is_sharded(parameter)]
        if tensor.ndim == 1 and living and tensor.numel() == sum(parameter.numel() for parameter in living):
            first = living[0].detach().flatten()
            return living[0] if torch.equal(tensor[: first.numel()].detach(), first) else None
        places_of = {parameter.data_ptr(): parameter for parameter in living}
        return None if _is_sharded(tensor) else places_of.get(tensor.data_ptr())

    def take(self, parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
        """What the script summed of these parameters since the last call: a dictionary for each line."""
        lines: dict[str, dict[str, Any]] = {}
        for parameter in parameters if self.reduced else ():
            told = self.reduced.pop(id(parameter), None)
            if told is None:
                continue
            line = lines.setdefault(str(told["at"]), {"at": told["at"], "op": told["op"], "parameters": 0})
            line["parameters"] += 1
            if told["work"] is not None and id(told["work"]) not in self.waited:
                line["unwaited"] = True
            if told["after"] and parameter.grad is not None and told["op"] in ("SUM", "AVG"):
                left = (self.norm() if told["is_flat"] else _norm(parameter.grad)) / told["after"]
                came = told["before"] / told["first"] if told.get("first") else 1.0
                world = dist.get_world_size()
                own = left * came / (world if told["op"] == "AVG" else 1)
                line.setdefault("factor", own)
                line.setdefault("divided", told["op"] == "AVG" or abs(own * world - 1) < 0.01)
            elif told["op"] == "AVG":
                line["divided"] = True
        self.waited.clear()
        return list(lines.values())

    def note_norm(self, tensor: Any, *_: Any, **__: Any) -> None:
        """vector_norm and the like."""
        if self.norm_at is None and not _is_sharded(tensor) and self._is_shard(tensor):
            self.norm_at = places.here()

    def note_scaled(self, tensor: Any, *_: Any, **__: Any) -> None:
        """mul_ and the like."""
        if self._is_shard(tensor):
            self.scaled_at = places.here()

    def _is_shard(self, tensor: Any) -> bool:
        """True for this rank's shard of a gradient, since the last backward pass."""
        if not self.shards or not isinstance(tensor, torch.Tensor):
            return False
        grads = [parameter.grad for parameter, _ in self.all.items() if parameter.grad is not None]
        shards = {digests.local(grad).data_ptr() for grad in grads if _is_sharded(grad)}
        return digests.local(tensor).data_ptr() in shards

    def scaling(self, parameters: list[torch.Tensor]) -> float | None:
        """The one factor of this rank's shards of all gradients since the backward pass. None: there is none."""
        now = _norms(parameters) if self.shards else {}
        factors = [norm / self.shards[key] for key, norm in now.items() if self.shards.get(key)]
        if not factors or max(factors) - min(factors) > _SAME * max(factors):
            return None
        return sum(factors) / len(factors)


def _some(tensor: torch.Tensor | None) -> torch.Tensor:
    """Some numbers of a tensor, from all of its parts."""
    flat = torch.zeros(1) if tensor is None else tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SOME)].double()


def _is_parallel(one: torch.Tensor, other: torch.Tensor) -> bool:
    norms = float(one.norm() * other.norm())
    return norms > 0 and one.numel() > 1 and float(one @ other) > (1 - _SAME) * norms


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def _norms(parameters: list[torch.Tensor]) -> dict[int, float]:
    held = {id(p): digests.local(p.grad) for p in parameters if p.grad is not None}
    held = {key: grad.detach().float() for key, grad in held.items() if grad.layout == torch.strided and grad.numel()}
    return dict(zip(held, norms_of(list(held.values())), strict=True))


def norms_of(tensors: list[torch.Tensor]) -> list[float]:
    """The norm of each tensor. Waits for the device once, if all are on one device."""
    norms = list(torch._foreach_norm(tensors)) if tensors else []
    return torch.stack(norms).tolist() if len({norm.device for norm in norms}) == 1 else list(map(float, norms))


def gradient_norm(parameters: list[torch.Tensor]) -> float:
    """The norm of this rank's shard of the gradients, also of sparse ones. 0.0 without gradients."""
    found = [digests.local(p.grad.detach()) for p in parameters if p.grad is not None]
    found = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in found]
    found = [tensor.float() for tensor in found if tensor.layout == torch.strided and tensor.numel()]
    return math.sqrt(sum(norm * norm for norm in norms_of(found)))


def _norm(tensor: torch.Tensor) -> float:
    return norms_of([digests.local(tensor).detach().double()])[0]


gradients = Gradients()


def watch_hooks(distributed: Any) -> None:
    """Compare what communication hooks of DDP return with what they received."""
    distributed._register_comm_hook = functools.partial(_registered, distributed._register_comm_hook)


def _registered(register: Any, reducer: Any, state: Any, hook: Any) -> None:
    register(reducer, state, functools.partial(_hooked, hook))


def _hooked(hook: Any, state: Any, bucket: Any) -> Any:
    if recorder.is_sampled(recorder.counts.optimizer_steps):
        recorder.guard("gradients of a hook", _note_given, bucket)
    return hook(state, bucket)


def _note_given(bucket: Any) -> None:
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    gradients.given |= {id(parameter): float(gradient.double().sum()) for parameter, gradient in pairs}


class Reduction:
    """An all-reduce, perhaps of a gradient."""

    def __init__(self, tensor: torch.Tensor, at: list[str | int] | None, op: str) -> None:
        self.parameter = None if models.hooks else gradients.find(tensor)
        self.tensor, self.at, self.op = tensor, at, op
        self.is_sampled = bool(gradients.after_backward)
        if self.parameter is None and not models.hooks and op in ("SUM", "AVG"):
            recorder.guard("copies of gradients", gradients.note_copy, tensor, at)
        self.before = _norm(tensor) if self.parameter is not None and self.is_sampled else None

    def after(self, work: Any) -> None:
        """Record the sum. `work`: the handle of an asynchronous all-reduce."""
        if self.parameter is None:
            return
        grad = self.parameter.grad
        is_flat = grad is not None and grad.shape != self.tensor.shape
        told: dict[str, Any] = {"at": self.at, "op": self.op, "after": None, "is_flat": is_flat, "work": work}
        if self.is_sampled and work is None:
            told |= {"before": self.before, "after": _norm(self.tensor)}
            sums = gradients.after_backward
            told["first"] = math.hypot(*sums.values()) if is_flat else sums.get(id(self.parameter))
        gradients.reduced[id(self.parameter)] = told
