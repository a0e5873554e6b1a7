"""The first difference between two samples, from a short record of each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.core.data.tensors import values_of
from lockstep.core.errors import number_of

_NUMBERS, _LETTERS, _LEAVES = 4096, 200, 64  # kept of a leaf, of a text, of a sample


class Leaf(NamedTuple):
    """A tensor, a text or a number in a sample."""

    place: str
    """Its place in the sample, such as `['image']` or `[1]`."""
    kind: str
    """Its type; of tensors and arrays also the type of the numbers and the shape."""
    digest: str
    """SHA-256 of all of it."""
    head: np.ndarray[Any, Any] | str
    """The first numbers, or the text."""


def record(sample: Any) -> list[Leaf]:
    """The first leaves of a sample. Objects of unknown kinds are represented only by their type."""
    found: list[Leaf] = []
    for place, value in walk(sample):
        if len(found) == _LEAVES:
            break
        found.append(_leaf(place, value))
    return found


def first(one: Sequence[Leaf], other: Sequence[Leaf], names: tuple[str, str]) -> str:
    """The first difference of two records as a sentence. `names` says whose samples they are."""
    for mine, yours in zip(one, other, strict=False):
        if mine == yours if isinstance(mine.head, str) else mine[:3] == yours[:3]:
            continue
        place = f"sample{mine.place}"
        if mine.place != yours.place:
            return f"{place} on {names[0]} is at the place of sample{yours.place} on {names[1]}"
        if mine.kind != yours.kind:
            return f"{place} is {mine.kind} on {names[0]}, and {yours.kind} on {names[1]}"
        if isinstance(mine.head, str) or isinstance(yours.head, str):
            return f"{place} is {mine.head} on {names[0]}, and {yours.head} on {names[1]}"
        return _first_number(place, (mine, yours), names)
    if len(one) != len(other):
        return f"it has {number_of(len(one), 'part')} on {names[0]}, and {len(other)} on {names[1]}"
    return f"the difference is beyond the first {_LEAVES} parts of the sample"


def _first_number(place: str, leaves: tuple[Leaf, Leaf], names: tuple[str, str]) -> str:
    heads = [np.asarray(leaf.head) for leaf in leaves]
    pairs = zip(*heads, strict=True)
    number = next((at for at, (one, other) in enumerate(pairs) if one.tobytes() != other.tobytes()), None)  # NaN is NaN
    if number is None:
        return f"{place} ({leaves[0].kind}) differs after its first {len(heads[0]):,} numbers"
    at = f"at number {number} of {leaves[0].kind}"
    values = [f"{head[number]} on {name}" for head, name in zip(heads, names, strict=True)]
    return f"{place}, {at}: {values[0]}, and {values[1]}"


def walk(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The values in mappings, lists, tuples and dataclasses, with their places."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from walk(item, f"{place}[{number}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from walk(getattr(value, field.name), f"{place}.{field.name}")
    else:
        yield place, value


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values on the CPU. Types that NumPy lacks become float32."""
    try:
        return tensor.cpu().numpy()
    except TypeError:
        return tensor.cpu().float().numpy()


def _leaf(place: str, value: Any) -> Leaf:
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        shape = [value.size(0), "..."] if value.is_nested else list(value.shape)
        kind = f"{str(value.dtype).removeprefix('torch.')} {shape}".replace("'", "")
        flat = [_as_array(part).reshape(-1) for part in values_of(value)]
        array = flat[0] if len(flat) == 1 else np.concatenate(flat) if flat else np.empty(0)
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        kind, array = f"{value.dtype} {list(value.shape)}", np.asarray(value)
    elif hasattr(value, "tobytes") and hasattr(value, "size") and hasattr(value, "mode"):  # a PIL image
        array = np.asarray(value)
        kind = f"{name} {value.mode} {list(array.shape)}"
    else:
        text = repr(value)
        text = name if " at 0x" in text else text
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        return Leaf(place, name, digest, text if len(text) <= _LETTERS else f"{text[:_LETTERS]}...")
    whole = np.ascontiguousarray(np.ma.getdata(array))
    return Leaf(place, kind, hashlib.sha256(whole.tobytes()).hexdigest(), whole.reshape(-1)[:_NUMBERS].copy())
