"""Observes torch.distributed: process groups, collectives that Python calls, and gradients summed by a script."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep_audit.observe import digests, gathered_evaluation, gathers, means, models, passes, places, torch_state
from lockstep_audit.observe.gradients import Reduction, gradients
from lockstep_audit.observe.recorder import LAUNCHER, After, recorder
from lockstep_audit.observe.torch_internals import recorded_collectives

_EACH_LINE = 2000
_LOOKS = 8
_NAMED = 200
"""For the first calls of a line, this many, events contain the script's names for what it exchanges."""
_LONGEST = 60
_OWN_NAMESPACE = 1  # of a function: CO_OPTIMIZED
_depth = 0
_sequences: Counter[str] = Counter()
_groups: set[str] = set()

_CALLS = (
    "all_reduce broadcast reduce all_gather gather scatter reduce_scatter all_to_all barrier all_gather_into_tensor "
    "reduce_scatter_tensor all_to_all_single monitored_barrier all_gather_object gather_object broadcast_object_list "
    "scatter_object_list all_reduce_coalesced all_gather_coalesced send recv isend irecv batch_isend_irecv"
)
COLLECTIVES = tuple(_CALLS.split())
_GATHERS = ("all_gather", "all_gather_into_tensor", "gather", "all_gather_object", "gather_object")
_USE_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def initialized(*_: Any, **__: Any) -> After:
    """init_process_group: the rank is known."""

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and dist.is_initialized():
            if recorder.rank is None:
                recorder.adopt(dist.get_rank())
            note_groups()

    return after


def store_made(hostname: str, port: int, *_: Any, **__: Any) -> After:
    """A store that the script makes for processes that it starts itself (`mp.spawn`, `init_method="tcp://..."`).

    Under the launcher all ranks are clients of the launcher's store. Nobody would serve this one, so a script that
    works without the audit would wait forever.
    """
    run_id, launcher = os.environ.get(LAUNCHER, " ").rsplit(" ", 1)
    if not launcher or str(port) == launcher or os.environ.get("TORCHELASTIC_RUN_ID") != run_id:
        return None
    used = os.environ.pop(_USE_STORE, None)

    def after(result: Any, error: BaseException | None) -> None:
        if used is not None:
            os.environ[_USE_STORE] = used

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


def collective(name: str, /, *arguments: Any, **named: Any) -> After:
    """A function of torch.distributed."""
    global _depth
    _depth += 1
    if _depth > 1:
        return _leave
    lists = [named["tensor_list"]] if "tensor_list" in named else []  # uneven: the first is the same on all ranks
    values = [*arguments, *lists, *named.values()]
    group = next((value for value in values if isinstance(value, dist.ProcessGroup)), None)
    reduce_op = next((str(value).rpartition(".")[2] for value in values if isinstance(value, _OPS)), None)
    tensor = _tensor(values)
    group_name = torch_state.name_of(group)
    frame = places.user_frame()
    at = places.here(frame)
    reduction = Reduction(tensor, at, reduce_op or "SUM") if name == "all_reduce" and tensor is not None else None
    seen: dict[str, Any] = {}
    if tensor is not None and name in ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"):
        seen = recorder.guard("what is exchanged", _seen, name, values, tensor, frame, reduction) or {}
    _sequences[group_name] += 1
    recorder.counts.collectives_python += 1
    event: dict[str, Any] = {"at": at, "op": name, "group": group_name}
    event |= {"shape": None if tensor is None else list(tensor.shape)}
    event |= {"elements": None if tensor is None else tensor.numel()}
    event |= {"dtype": None if tensor is None else str(tensor.dtype).removeprefix("torch.")}
    event |= {"reduce_op": reduce_op or ("SUM" if name in ("all_reduce", "reduce", "reduce_scatter") else None)}
    event |= {"sequence": _sequences[group_name] - 1, "root": _root(name, arguments, named)}
    event |= {"divided_integer": True if reduce_op == "AVG" and tensor is not None and _is_integer(tensor) else None}
    if name in _GATHERS:
        event |= recorder.guard("gathered rows", gathered_evaluation.note, name, values, at) or {}
    is_sum = reduction is not None and reduction.parameter is None and event["reduce_op"] == "SUM"
    before = recorder.guard("running counts", gathered_evaluation.before_sum, tensor) if is_sum else None
    if event["reduce_op"] == "MAX" and name == "all_reduce" and tensor is not None and tensor.numel() == 1:
        recorder.guard("sizes", gathered_evaluation.sizes_exchanged, tensor.clone(), tensor)
    event |= {**seen}
    recorder.emit("collective", limit=_EACH_LINE, **event)
    if name in ("all_gather", "all_gather_into_tensor", "all_gather_object"):
        recorder.guard("gathered features", gathers.note, values, at)
        recorder.guard("gathered counts", _note_counts, values, at, group)
    if name in ("all_reduce", "broadcast") and tensor is not None:
        recorder.guard("parameters averaged by hand", _note_average, name, tensor, at, reduce_op)
    if reduction is None:
        return _leave
    is_in_graph = tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
    is_in_graph = is_in_graph and reduction.op == "SUM" and recorder.is_sampled(recorder.counts.optimizer_steps)

    def after(result: Any, error: BaseException | None) -> None:
        _leave(result, error)
        if error is None:
            reduction.after(result)
            if is_in_graph and reduction.tensor.grad_fn is not None and len(passes.reduced) < _LOOKS:
                told = {"at": at, "elements": reduction.tensor.numel(), "ranks": torch_state.ranks_of(group)}
                passes.reduced.append((reduction.tensor.grad_fn, told))
            if reduction.op == "SUM" and reduction.tensor.numel() <= _SMALL:
                means.summed.put(reduction.tensor, at)
            if before is not None:
                means.summed_counts(reduction.tensor, before, at=at, ranks=torch_state.ranks_of(group))
            if before is not None and result is None:
                recorder.guard("running counts", gathered_evaluation.summed, reduction.tensor, before, at)

    return after


def _note_counts(values: Sequence[Any], at: list[str | int] | None, group: dist.ProcessGroup | None) -> None:
    """A gather of one number from each rank, or of a few."""
    results, *rest = values
    own: Any = rest[0] if rest else None
    if isinstance(own, torch.Tensor) and own.numel() <= _FEW and gathered_evaluation.before_sum(own) is not None:
        results = list(results.view(-1, *own.shape)) if isinstance(results, torch.Tensor) else results
    elif type(own) not in (int, float):
        return
    means.gathered_counts(results, own, at=at, ranks=torch_state.ranks_of(group))


def _root(name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> int | None:
    """The rank that a collective begins or ends at."""
    if name not in ("broadcast", "reduce", "broadcast_object_list"):
        return None
    found = [named[key] for key in ("src", "dst", "group_src", "group_dst") if key in named]
    return next((int(each) for each in (*found, *arguments[1:2]) if isinstance(each, int)), None)


def _seen(
    name: str, values: Sequence[Any], tensor: torch.Tensor, frame: Any, reduction: Reduction | None
) -> dict[str, Any]:
    """The calling line's names for a tensor, which gradient it is, and which means it averages."""
    _named[name] += 1
    told: dict[str, Any] = {}
    if frame is not None and tensor.numel() == 1 and any(_is_given(each, tensor) for each in places.arguments(frame)):
        told["given_at"] = places.here(places.user_frame(frame.f_back) if frame.f_back else None)
    if _named[name] <= _NAMED:
        if frame is not None and tensor.numel() <= _SMALL:
            told["names"] = _names(frame)
        if reduction is not None and reduction.parameter is not None:
            told["parameter"] = gradients.number_of(reduction.parameter)
    given = tensor if name in ("all_reduce", "reduce") else next(digests.tensors_in(values[1:], 1), None)
    return told | (means.about(given) if given is not None and name != "broadcast" else {})


def _is_given(argument: Any, tensor: torch.Tensor) -> bool:
    """True if an argument of the calling function is this tensor, or the number that it holds."""
    if argument is tensor or isinstance(argument, bool) or tensor.device.type != "cpu":
        return argument is tensor
    if isinstance(argument, torch.Tensor):
        return argument.numel() == 1 and argument.device.type == "cpu" and bool(argument.detach() == tensor.detach())
    return isinstance(argument, (int, float)) and abs(float(tensor) - argument) <= _CLOSE * abs(argument)


_CLOSE = 1e-6
_named: Counter[str] = Counter()
_SMALL, _FEW, _MOST = 1024, 8, 256


def _names(frame: Any) -> dict[str, str] | None:
    """The short texts among the variables of a function."""
    if not frame.f_code.co_flags & _OWN_NAMESPACE:
        return None
    space = places.variables(frame)
    found = {name: space[name] for name in frame.f_code.co_varnames if isinstance(space.get(name), str)}
    return {name: text for name, text in found.items() if len(text) <= _LONGEST} or None


_averages: set[str] = set()
_looked: Counter[str] = Counter()
"""How often each line was examined, in all and in each step: all parameters are compared. A line that first exchanges
gradients may exchange parameters later."""


def _note_average(name: str, tensor: torch.Tensor, at: list[str | int] | None, op: str | None) -> None:
    """Record a line that exchanges parameters after the first step: averages of replicas, by hand."""
    steps = recorder.counts.optimizer_steps
    if str(at) in _averages or not steps or _looked[f"{at}"] >= _MOST or _looked[f"{at} {steps}"] >= _LOOKS:
        return
    _looked.update([f"{at}", f"{at} {steps}"])
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


def waited(work: Any, *_: Any, **__: Any) -> After:
    """Work.wait."""
    gradients.waited.add(id(work))
    return None


def at_exit() -> dict[str, Any]:
    """How many collectives each group made."""
    note_groups()
    counted: dict[str, int] = dict(_sequences)
    for entry in recorded_collectives():
        name = str(entry["process_group"][0])
        counted[name] = max(counted.get(name, 0), entry["collective_seq_id"])
    return {"collectives": counted or None}
