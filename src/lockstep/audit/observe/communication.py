"""Observes torch.distributed: process groups, collectives that Python calls, and gradients summed by a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.audit.observe import digests, models, places, torch_state
from lockstep.audit.observe.data import After
from lockstep.audit.observe.objects import Registry
from lockstep.audit.observe.recorder import recorder
from lockstep.core.parallel import torch_internals

_EACH_LINE = 2000
_LOOKS = 8
_depth = 0
_sequences: Counter[str] = Counter()
_groups: set[str] = set()

COLLECTIVES = (
    *(
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
        "barrier",
    ),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("all_reduce_coalesced", "all_gather_coalesced", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
)


def initialized(*_: Any, **__: Any) -> After:
    """init_process_group: the rank is known."""

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and dist.is_initialized():
            if recorder.rank is None:
                recorder.adopt(dist.get_rank())
            note_groups()

    return after


def group_made(*_: Any, **__: Any) -> After:
    """new_group and the like."""
    return lambda result, error: note_groups() if error is None else None


def note_groups() -> None:
    """Write an event of each process group that has none."""
    at = places.here()
    for told in torch_state.groups():
        if told["name"] not in _groups:
            _groups.add(told["name"])
            recorder.emit("group", limit=200, at=at, **told)


def collective(name: str, *arguments: Any, **named: Any) -> After:
    """A function of torch.distributed."""
    global _depth
    _depth += 1
    if _depth > 1:
        return _leave
    values = [*arguments, *named.values()]
    group = next((value for value in values if isinstance(value, dist.ProcessGroup)), None)
    reduce_op = next((str(value).rpartition(".")[2] for value in values if isinstance(value, _OPS)), None)
    tensor = _tensor(values)
    group_name = torch_state.name_of(group)
    at = places.here()
    _sequences[group_name] += 1
    recorder.counts.collectives_python += 1
    recorder.emit(
        "collective",
        limit=_EACH_LINE,
        at=at,
        op=name,
        group=group_name,
        shape=None if tensor is None else list(tensor.shape),
        elements=None if tensor is None else tensor.numel(),
        dtype=None if tensor is None else str(tensor.dtype).removeprefix("torch."),
        reduce_op=reduce_op or ("SUM" if name in ("all_reduce", "reduce", "reduce_scatter") else None),
        sequence=_sequences[group_name] - 1,
        divided_integer=True if reduce_op == "AVG" and tensor is not None and _is_integer(tensor) else None,
    )
    if name in ("all_reduce", "broadcast") and tensor is not None:
        recorder.guard("parameters averaged by hand", _note_average, name, tensor, at, reduce_op)
    if name == "all_reduce" and tensor is not None:
        return _Reduction(tensor, at, reduce_op or "SUM").after
    return _leave


_averages: set[str] = set()
_looked: Counter[str] = Counter()
"""How often each line was looked at: all parameters are compared."""


def _note_average(name: str, tensor: torch.Tensor, at: list[str | int] | None, op: str | None) -> None:
    """Note a line that exchanges parameters after the first step: averages of replicas, by hand."""
    if str(at) in _averages or not recorder.counts.optimizer_steps or _looked[str(at)] >= _LOOKS:
        return
    _looked[str(at)] += 1
    found = gradients.parameter_of(tensor)
    if found is not None:
        _averages.add(str(at))
        owner = models.owner(found)
        model = owner[0].number if owner else None
        recorder.emit("hand_average", at=at, model=model, collective=name, op=op, elements=tensor.numel())


_OPS: tuple[Any, ...] = (dist.ReduceOp, dist.ReduceOp.RedOpType)


def _leave(result: Any, error: BaseException | None) -> None:
    global _depth
    _depth -= 1
    recorder.progress()


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _tensor(values: Sequence[Any]) -> torch.Tensor | None:
    return next((tensor for value in values for tensor in digests.tensors_in(value, 2)), None)


class Gradients:
    """The gradients that optimizers will use next, and what a script that sums them by hand does to them."""

    def __init__(self) -> None:
        self.parameters: Registry[None] = Registry()
        """Of optimizers that have stepped or were made, and of no wrapped model."""
        self.all: Registry[None] = Registry()
        """Of any optimizer."""
        self.after_backward: dict[int, float] = {}
        self.reduced: dict[int, dict[str, Any]] = {}
        self._places: dict[int, torch.Tensor] = {}
        self._is_fresh = False
        self._looks = 0

    def at_backward(self, is_sampled: bool) -> None:
        """Remember sums of the gradients."""
        self._is_fresh = False
        self.after_backward = {}
        if not (is_sampled or self._looks < _LOOKS) or not torch_state.has_other_ranks():
            return
        with torch.no_grad():
            for parameter, _ in self.parameters.items():
                if parameter.grad is not None:
                    self.after_backward[id(parameter)] = _size(parameter.grad)
        self._looks += bool(self.after_backward)

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter whose gradient a tensor is."""
        if not self._is_fresh:
            self._is_fresh = True
            living = [parameter for parameter, _ in self.parameters.items()]
            self._places = {p.grad.data_ptr(): p for p in living if p.grad is not None and not _is_sharded(p.grad)}
        found = self._places.get(tensor.data_ptr()) if not _is_sharded(tensor) else None
        if found is not None and found.grad is not None and found.grad.shape == tensor.shape:
            return found
        with_gradients = [parameter for parameter in self._places.values() if parameter.grad is not None]
        total = sum(parameter.grad.numel() for parameter in with_gradients if parameter.grad is not None)
        if tensor.ndim == 1 and with_gradients and tensor.numel() == total:  # a flat copy of all
            first = with_gradients[0].grad
            if first is not None and torch.equal(tensor[: first.numel()].detach(), first.detach().flatten()):
                return with_gradients[0]
        return None

    def sum(self) -> float:
        """The sum of the absolute values of all gradients."""
        return sum(_size(parameter.grad) for parameter, _ in self.parameters.items() if parameter.grad is not None)

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter that a tensor is, or the first of all that the tensor is a flat copy of."""
        living = [parameter for parameter, _ in self.all.items() if not _is_sharded(parameter)]
        if tensor.ndim == 1 and living and tensor.numel() == sum(parameter.numel() for parameter in living):
            first = living[0].detach().flatten()
            return living[0] if torch.equal(tensor[: first.numel()].detach(), first) else None
        places_of = {parameter.data_ptr(): parameter for parameter in living}
        return None if _is_sharded(tensor) else places_of.get(tensor.data_ptr())

    def take(self, parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
        """What the script summed of these parameters since the last call, a dictionary for each line."""
        lines: dict[str, dict[str, Any]] = {}
        for parameter in parameters if self.reduced else ():
            told = self.reduced.pop(id(parameter), None)
            if told is None:
                continue
            line = lines.setdefault(str(told["at"]), {"at": told["at"], "op": told["op"], "parameters": 0})
            line["parameters"] += 1
            if told["after"] and parameter.grad is not None and told["op"] == "SUM":
                left = (self.sum() if told["is_flat"] else _size(parameter.grad)) / told["after"]
                came = told["before"] / told["first"] if told.get("first") else 1.0
                world = dist.get_world_size()
                line.setdefault("factor", left * came)
                line.setdefault("divided", abs(left * came * world - 1) < 0.01)
            elif told["op"] == "AVG":
                line["divided"] = True
        return list(lines.values())


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def _size(tensor: torch.Tensor) -> float:
    return float(digests.local(tensor).detach().double().abs().sum())


gradients = Gradients()


class _Reduction:
    """An all-reduce, perhaps of a gradient."""

    def __init__(self, tensor: torch.Tensor, at: list[str | int] | None, op: str) -> None:
        self.parameter = gradients.find(tensor)
        self.tensor, self.at, self.op = tensor, at, op
        self.is_sampled = bool(gradients.after_backward)
        self.before = _size(tensor) if self.parameter is not None and self.is_sampled else None

    def after(self, result: Any, error: BaseException | None) -> None:
        _leave(result, error)
        if error is None and self.parameter is not None:
            grad = self.parameter.grad
            is_flat = grad is not None and grad.shape != self.tensor.shape
            told: dict[str, Any] = {"at": self.at, "op": self.op, "after": None, "is_flat": is_flat}
            if self.is_sampled and result is None:  # not asynchronous
                told |= {"before": self.before, "after": _size(self.tensor)}
                sums = gradients.after_backward
                told["first"] = sum(sums.values()) if told["is_flat"] else sums.get(id(self.parameter))
            gradients.reduced[id(self.parameter)] = told


def at_exit() -> dict[str, Any]:
    """How many collectives each group made."""
    note_groups()
    counted: dict[str, int] = dict(_sequences)
    for entry in torch_internals.recorded_collectives():
        name = str(entry["process_group"][0])
        counted[name] = max(counted.get(name, 0), entry["collective_seq_id"])
    return {"collectives": counted or None}
