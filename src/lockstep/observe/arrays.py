"""Predictions as arrays by name, with the samples along the first dimension: .npz and .safetensors."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.observe.plain import as_dense, as_numpy, is_tensor


def write(path: Path, rows: Sequence[Mapping[str, Any]], final: Path) -> list[str]:
    """Write what `stack` makes of `rows` in the format of `final`, whose name errors give.

    Returns:
        names that are left out: None in all rows, and text in .safetensors.
    """
    where = f"--out {final}"
    columns, left_out = stack(rows, where)
    if final.suffix == ".npz":
        import numpy as np

        with zipfile.ZipFile(path, "w") as archive:  # as numpy.savez, which cannot take an array of the name `file`
            for name, value in columns.items():
                array = as_numpy(value) if is_tensor(value) else value
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return left_out
    import torch
    from safetensors.torch import save_file

    texts = [name for name, value in columns.items() if not is_tensor(value) and value.dtype.kind == "U"]
    numbers = {name: value for name, value in columns.items() if name not in texts}
    tensors = {name: value if is_tensor(value) else torch.from_numpy(value) for name, value in numbers.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return left_out + texts


def stack(rows: Sequence[Mapping[str, Any]], where: str) -> tuple[dict[str, Any], list[str]]:
    """An array or tensor for each name, and the names that are None in all rows.

    What lies in mappings, dataclasses and tuples has the names on its way joined with `/`. A list of numbers is an
    array.

    Raises:
        UsageError: rows that have other names or shapes, or values that are no numbers and no text.
    """
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    empty = [name for name in names if all(row.get(name) is None for row in flat)]
    columns: dict[str, Any] = {}
    for name in names:
        if name in empty:
            continue
        missing = [number for number, row in enumerate(flat) if row.get(name) is None]
        if missing:
            raise _unfit(f"{name} is missing in row {missing[0]}", where)
        columns[name] = _stacked(name, [row[name] for row in flat], where)
    return columns, empty


def _stacked(name: str, values: list[Any], where: str) -> Any:
    import numpy as np

    tensors = all(is_tensor(value) for value in values)
    found: list[Any] = values
    try:
        if not tensors:
            found = [as_numpy(value) if is_tensor(value) else np.asarray(value) for value in values]
    except ValueError:  # a list of lists of several lengths
        raise _unfit(f"{name} holds lists of several lengths", where) from None
    shapes = list(dict.fromkeys(tuple(one.shape) for one in found))
    if len(shapes) > 1:
        more = ", ..." if len(shapes) > 4 else ""
        raise _unfit(f"{name} has another shape in another row: {', '.join(map(str, shapes[:4]))}{more}", where)
    if tensors:
        import torch

        return torch.stack([as_dense(one) for one in found])
    stacked = np.stack(found)
    if stacked.dtype.kind not in "biufcU" or len({one.dtype.kind == "U" for one in found}) > 1:
        raise _unfit(f"{name} is neither a number nor a text: {values[0]!r:.60}", where)
    return stacked


def _unfit(text: str, where: str) -> UsageError:
    remedy = "write a .jsonl file, which takes values of any shape, or change what Task.describe returns"
    return UsageError(text, where=where, remedy=remedy)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """What is no mapping, dataclass or sequence of such, by the names on its way."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple) or (isinstance(value, list) and any(_is_nested(item) for item in value)):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{name}/{key}" if name else str(key))
    return flat


def _is_nested(item: Any) -> bool:
    return isinstance(item, Mapping | tuple) or hasattr(item, "dtype") or dataclasses.is_dataclass(item)
