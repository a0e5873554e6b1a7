"""Observes rows of a whole evaluation that ranks gather and then compare, and counts that ranks sum repeatedly."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from lockstep_audit.observe import data, digests, places
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import After, recorder

_FEW, _LARGEST, _SMALL, _TURNS = 12, 1_000_000, 1024, 2
_gathered: deque[tuple[list[torch.Tensor], list[str | int] | None]] = deque(maxlen=8)
"""Tensors of all ranks with one row per sample of an evaluation, and where they were gathered."""
_counts: Registry[tuple[torch.Tensor, int, bool]] = Registry()
"""Tensors that were summed over ranks: the sums, how often they were summed, and whether the script added to them."""
_lines: set[str] = set()
_sizes: list[Any] = []
"""The last exchange of one whole number for each rank: the rank's own, and the results."""
_padded: list[tuple[int, int, int, list[str | int] | None]] = []
"""Gathers of rows that were padded to the longest of the ranks, since the last step: all rows, those without padding
(-1: unknown), the step, and where."""


def note(name: str, values: Sequence[Any], at: list[str | int] | None) -> dict[str, Any]:
    """A gather of tensors or objects. For objects: the number of rows if it is a list of plain values."""
    if name.endswith("_object"):
        given = values[1] if name == "all_gather_object" and len(values) > 1 else values[0]
        is_plain = isinstance(given, (list, tuple)) and all(isinstance(each, (int, float, str)) for each in given)
        is_plain = is_plain or getattr(given, "ndim", 0) == 1
        sizes_exchanged(given, values[0])
        is_whole = isinstance(given, list) and given and all(isinstance(each, int) for each in given[:_FEW])
        return {"rows": len(given) if is_plain else -1} | ({"first": given[:_FEW]} if is_whole else {})
    given = next(digests.tensors_in(values[0] if name == "gather" else values[1:], 1), None)
    tensors = list(digests.tensors_in(values[1] if name == "gather" and len(values) > 1 else values[0], 2))
    if given is not None and name == "all_gather":
        sizes_exchanged(given, values[0])
    if given is not None and given.ndim and given.numel() > 1 and _sizes:
        _note_padded(given, at)
    turn, told = data.last, dict[str, Any](given=None if given is None else list(given.shape))
    if given is not None and given.dtype == torch.int64 and given.device.type == "cpu" and given.ndim:
        told["first"] = given.flatten()[:_FEW].tolist()
    if turn is None or turn.batches < 2 or given is None or not given.ndim or given.device.type != "cpu":
        return told
    tensors = list(tensors[0].view(-1, *given.shape).unbind()) if name == "all_gather_into_tensor" else tensors
    if given.shape[0] == turn.samples > _FEW and sum(each.numel() for each in tensors) <= _LARGEST:
        _gathered.append((tensors, at))
    return told


def sizes_exchanged(own: Any, results: Any) -> None:
    """Ranks gather one whole number each, or find the largest."""
    if isinstance(own, torch.Tensor):
        own = int(own) if own.numel() == 1 and not own.is_floating_point() and own.device.type == "cpu" else None
    if type(own) is int:
        _sizes[:] = [own, results]


def _note_padded(given: torch.Tensor, at: list[str | int] | None) -> None:
    """A gather of rows: of as many from each rank as the rank with the most has, if others have fewer."""
    sizes = [int(each) for each in (_sizes[1] if isinstance(_sizes[1], list) else [_sizes[1]])]
    longest, world = max(sizes), torch.distributed.get_world_size()
    whole = sum(sizes) if len(sizes) == world else -1
    if given.shape[0] == longest > 1 and min(_sizes[0], *sizes) < longest:
        step = recorder.counts.optimizer_steps
        _padded[:] = [*[each for each in _padded if each[2] == step][-_TURNS:], (longest * world, whole, step, at)]


def counted(rows: int, by: str) -> None:
    """A metric of so many rows: of all that were gathered, with padding."""
    for gathered, whole, step, at in _padded:
        if rows == gathered != whole and step == recorder.counts.optimizer_steps:
            recorder.emit("padding", limit=4, at=at, by=by, by_at=places.here(), rows=rows, own=whole)
            return


def compared(one: Any, other: Any = None, *_: Any, **__: Any) -> After:
    """Tensor == Tensor, Tensor - Tensor, or a loss: compares rows in the order of ranks with rows in another order."""
    if not _gathered or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    is_read = one.device.type == other.device.type == "cpu"
    if is_read and one.ndim and other.ndim and one.shape[0] == other.shape[0] > _FEW:
        froms = [_from(each) for each in (one, other)]
        if sum(each is not None for each in froms) == 1:
            gathered_at, is_dealt = next(each for each in froms if each is not None)
            told = {"gathered_at": gathered_at, "is_dealt": is_dealt or None}
            recorder.emit("lined_up", limit=4, at=places.here(), rows=one.shape[0], **told)
    return None


def _from(tensor: torch.Tensor) -> list[Any] | None:
    """Where the rows were gathered, if a tensor begins with those of rank 0, then of rank 1, and so on.

    And whether it has one row of each rank in turn instead, as a sampler deals them.
    """
    flat, size = tensor.detach().flatten(), len(tensor)
    for parts, at in _gathered:
        rows = sum(map(len, parts))
        if rows - len(parts) < size <= rows and len({len(part) for part in parts}) == 1:
            whole, dealt = torch.cat(parts).detach()[:size], torch.stack(parts, 1).detach().flatten(0, 1)[:size]
            if whole.numel() != flat.numel() and whole.ndim == 2:
                whole, dealt = whole.argmax(1), dealt.argmax(1)
            is_whole, is_dealt = (torch.equal(each.flatten().to(flat.dtype), flat) for each in (whole, dealt))
            if is_whole or is_dealt:
                return [at, is_dealt]
    return None


def summed(tensor: torch.Tensor, before: torch.Tensor, at: list[str | int] | None) -> None:
    """An in-place sum over ranks of a few numbers. The script may have added to an earlier sum."""
    owner = tensor._base if tensor._base is not None else tensor
    known = _counts.get(owner)
    turns, added = 0, False
    if known is not None and known[0].shape == before.shape and bool((before >= known[0]).all()):
        turns, added = known[1] + 1, known[2] or bool((before > known[0]).any())
    _counts.put(owner, (tensor.detach().clone(), turns, added))
    if turns == _TURNS and str(at) not in _lines:
        _lines.add(str(at))
        recorder.emit("summed_again", at=at, elements=tensor.numel(), added=added)


def before_sum(tensor: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a rank before they are summed, if they can be counts."""
    if not 0 < tensor.numel() <= _SMALL or tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_complex():
        return None
    is_count = bool((tensor >= 0).all()) and bool((tensor > 0).any())
    return tensor.detach().clone() if is_count else None
