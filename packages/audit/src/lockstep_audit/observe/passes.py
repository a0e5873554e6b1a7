"""Observes backward passes, clipping, and random numbers that a script draws in training."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from lockstep_audit.observe import calls, digests, gathers, means, places, torch_state, vocabularies
from lockstep_audit.observe.gradients import gradients
from lockstep_audit.observe.mixed_passes import mixed_passes
from lockstep_audit.observe.recorder import After, recorder

_SCALING = ("MulBackward0", "DivBackward0")
_MOST = 256
_DRAWN = 8
"""Random numbers are compared in this many first steps, for tensors with at least this many elements."""

_NUMBERS = 512


@dataclasses.dataclass
class PassState:
    """The current ends of the lists of passes and clips."""

    first: int = 0
    """The number of the first backward pass in the list."""
    last_seen: int = 0
    """The number of backward passes when an optimizer last stepped."""
    clips_called: int = 0


state = PassState()
backwards: list[dict[str, Any]] = []
clips: list[tuple[int, dict[str, Any]]] = []
at_sampled: list[Callable[[], None]] = []
"""Called before a backward pass that is examined."""
at_first: list[Callable[[], None]] = []
"""Called before each backward pass."""
reduced: list[tuple[Any, dict[str, Any]]] = []
"""Autograd functions whose results the script summed over ranks in place since the last backward pass: torch passes
their gradients on as if nothing had happened."""
_NODES, _DEPTH, _ENDS, _SUM = 20_000, 4, 64, 2
_THROUGH = ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "SqueezeBackward0", "ViewBackward0")
_depth = 0


def _next_is_sampled() -> bool:
    return recorder.is_sampled(recorder.counts.optimizer_steps)


def backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> After:
    """torch.autograd.backward, which Tensor.backward calls. Nested backward passes belong to checkpointing."""
    global _depth
    recorder.is_stepping = False  # an earlier step may have raised an error
    _depth += 1
    if _depth > 1:
        return _leave
    frame = places.user_frame()
    told: dict[str, Any] = {"at": places.here(frame), "models": calls.backward_begins()}
    is_sampled = _next_is_sampled()
    if not places.is_direct(sys._getframe(3)):
        told["loss_at"] = means.last_loss()
    recorder.guard("gathered features in a loss", gathers.at_backward, next(digests.tensors_in(tensors), None))
    if not recorder.counts.backwards and frame is not None:
        recorder.guard("vocabularies of a script", vocabularies.note, frame)
        if not recorder.has_loader:
            recorder.guard("numbers of a script", _note_numbers, frame)
    if is_sampled:
        told |= means.last_labels() | _loss(tensors)
        told["factor"] = told.get("factor", 1.0) * _number(next(digests.tensors_in(grad_tensors), None))
        told["reduced"] = recorder.guard("sums over ranks in a loss", _reduced, tensors) if reduced else None
        told["divided_at"] = means.divided_at(told.get("divisor"))
        told["terms"] = recorder.guard("sums of counts", _terms, tensors) if means.has_summed() else None
        told["by_ranks"] = (frame is not None and _knows_ranks(frame.f_code)) or None
        if recorder.counts.backwards > state.last_seen:
            gone = recorder.guard("discarded gradients", gradients.gone) or (None, None)
            told["began_clear"], told["discarded"] = gone
            told["cleared_at"] = gradients.cleared_at if told["discarded"] else None
        for function in at_sampled:
            function()
    for function in at_first:
        recorder.guard("passes of several optimizers", function)
    means.forget()
    reduced.clear()

    def after(result: Any, error: BaseException | None) -> None:
        global _depth
        _depth -= 1
        calls.backward_ends()
        recorder.progress()
        if error is None:
            recorder.counts.backwards += 1
            backwards.append(told)
            recorder.guard("passes of several optimizers", mixed_passes.ends, told["at"])
            if len(backwards) > _MOST:
                backwards.pop(0)
                state.first += 1
                recorder.cut["backwards"] += 1
            recorder.guard("gradients after backward", gradients.at_backward, is_sampled)

    return after


def _leave(result: Any, error: BaseException | None) -> None:
    global _depth
    _depth -= 1


def _note_numbers(frame: Any) -> None:
    """Integers that a script without a DataLoader holds when training begins, if most of them repeat."""
    whole = {n: t for n, t in places.variables(frame).items() if isinstance(t, torch.Tensor) and t.dtype == torch.int64}
    held = {name: each.flatten()[:_NUMBERS].tolist() for name, each in list(whole.items())[:_DRAWN] if each.is_cpu}
    held = {name: each for name, each in held.items() if len(each) >= 2 * len(set(each))}
    recorder.emit("numbers", at=places.here(frame), held=held)


@functools.lru_cache(maxsize=16)
def _knows_ranks(code: Any) -> bool:
    """True if a function holds the number of ranks under some name."""
    names = (*code.co_names, *code.co_varnames, *code.co_freevars)
    return any(word in name.lower() for name in names for word in ("world", "num_processes", "nranks", "n_ranks"))


def _loss(tensors: Any) -> dict[str, Any]:
    """The value of a loss, the last operations that made it, the last first, and the number that they divide by."""
    root = next(digests.tensors_in(tensors), None)
    if root is None or root.numel() != 1:
        return {}
    names, told = list[str](), dict[str, Any]()
    divisor, factor, is_scaling = 1.0, 1.0, True
    function = torch_state.below(root.grad_fn, root.output_nr)
    while function is not None and len(names) < 4:
        names.append(type(function).__name__)
        inputs = [each for each, _ in function.next_functions]
        if names[-1] in ("StackBackward0", "CatBackward0") and "".join(names[-2:-1]).startswith(("Mean", "Div", "Sum")):
            told["one_of"] = len(inputs) if len(inputs) - inputs.count(None) == 1 else None
        sizes = getattr(function, "_saved_self_sym_sizes", None) if names[-1] == "SumBackward0" else None
        told |= {"sum_of": math.prod(sizes)} if sizes else {}
        divisor *= _divisor(function)
        is_scaling, made = is_scaling and names[-1] in _SCALING, function
        function = torch_state.below(function)
        is_scaling = is_scaling and not type(function).__name__.startswith("Sum")  # a sum over its count is a mean
        factor *= _factor(made) if is_scaling else 1.0
    value = float(digests.local(root.detach())) if _is_whole(root) else None
    return told | {"loss": value, "ops": names, "divisor": divisor, "factor": factor}


def _reduced(tensors: Any) -> dict[str, Any] | None:
    """The sum over ranks that a loss contains, and the numbers by which the loss divides and multiplies it."""
    root = next(digests.tensors_in(tensors), None)
    left, seen = [(root.grad_fn, 0, 1.0, 1.0)] if root is not None and root.grad_fn is not None else [], set[Any]()
    while left and len(seen) < _NODES:
        function, depth, divisor, times = left.pop()
        if found := next((told for node, told in reduced if node is function), None):
            return found | {"divisor": divisor, "times": times}
        is_scaling = depth < _DEPTH and type(function).__name__ in _SCALING  # checkpoints would compute again below
        factor = _factor(function) if is_scaling else 1.0
        divisor, times = divisor / min(factor, 1.0) if factor > 0 else divisor, times * max(factor, 1.0)
        below = [each for each, _ in function.next_functions if each is not None and each not in seen]
        seen.update(below)
        left += [(each, depth + 1, divisor, times) for each in below]
    return None


def _terms(tensors: Any) -> list[dict[str, Any]] | None:
    """The sums in a loss that the script divides by a sum over ranks, and what multiplies each."""
    root = next(digests.tensors_in(tensors), None)
    left, looks = list[tuple[Any, tuple[float, ...], tuple[float, ...]]](), 0
    left += [(root.grad_fn, (), ())] if root is not None and root.grad_fn is not None else []
    found = list[dict[str, Any]]()
    while left and looks < _ENDS:
        (function, divisors, factors), looks = left.pop(), looks + 1
        below = [each for each, _ in function.next_functions if each is not None]
        name, inner = type(function).__name__, type(torch_state.below(function)).__name__
        if name in _SCALING and len(below) == 1:
            by = _divisor(function) if name == _SCALING[1] else 1.0
            divisors += (by,) if by > 1 else ()
            factors += (_factor(function),) if by <= 1 else ()
            left.append((below[0], divisors, factors))
        elif name in _THROUGH:
            left += [(each, divisors, factors) for each in below]
        elif "Gather" not in inner and (name.startswith("Sum") or getattr(function, "_saved_reduction", 0) == _SUM):
            sums = [(by, on) for by in divisors if (on := means.summed_to(by))]
            told = {"factors": factors, "of": math.prod(getattr(function, "_saved_self_sym_sizes", ()))}
            told["is_once"] = len(divisors) == 1
            found += [told | {"divisor": by, "ranks": on["ranks"], "at": means.divided_at(by)} for by, on in sums]
    return found or None


def _factor(function: Any) -> float:
    """The factor by which a multiplication or a division scales a loss."""
    other = getattr(function, "_saved_other", None)
    number = _number(getattr(function, "_saved_self", None) if other is None else other)
    return number if type(function).__name__ == _SCALING[0] else 1 / number if number else 1.0


def _number(tensor: Any) -> float:
    """The single number of a tensor that this rank holds, else 1."""
    is_number = isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and _is_whole(tensor)
    return float(digests.local(tensor)) if is_number else 1.0


def _divisor(function: Any) -> float:
    """The number that an autograd function divides by: in a division, or a multiplication by less than 1."""
    other = getattr(function, "_saved_other", None)
    name, number = type(function).__name__, _number(other)
    if name == "MulBackward0":
        return 1 / number if 0 < number < 1 else 1.0
    return number or 1.0 if name == "DivBackward0" else 1.0


def drawn(*_: Any, **__: Any) -> After:
    """torch.randn and the like by the script, after training has begun."""
    frame = sys._getframe(3)
    if not recorder.counts.optimizer_steps or recorder.counts.optimizer_steps > _DRAWN or not places.is_by_user(frame):
        return None
    at = places.here(frame)

    def after(result: Any, error: BaseException | None) -> None:
        if isinstance(result, torch.Tensor) and result.numel() >= _DRAWN:
            digest = digests.of_tensors({"": result})[""]
            recorder.emit("drawn", limit=_DRAWN, at=at, digest=digest)

    return after


def clipped(how: str, parameters: Any, limit: Any = None, *_: Any, **named: Any) -> After:
    """clip_grad_norm_ and clip_grad_value_. The parameters may be an iterator, so nothing is consumed."""
    state.clips_called += 1
    limit = named.get("max_norm", named.get("clip_value", limit))
    told = {"at": places.here(), "how": how, "limit": float(limit), "backwards_before": recorder.counts.backwards}
    told["reduced_before"] = bool(gradients.reduced)
    sequence, is_sampled = state.clips_called, _next_is_sampled()
    if is_sampled:
        gradients.note_rescaled()

    def after(norm: Any, error: BaseException | None) -> None:
        if error is None:
            if is_sampled and isinstance(norm, torch.Tensor) and _is_whole(norm):
                told["norm"] = float(digests.local(norm))
            clips.append((sequence, told))
            del clips[:-_MOST]

    return after


def _is_whole(tensor: Any) -> bool:
    """True if this rank holds all of a tensor: a DTensor may need other ranks."""
    return all(placement.is_replicate() for placement in getattr(tensor, "placements", ()))
