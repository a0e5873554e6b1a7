"""Writes predictions as arrays by name, with the samples along the first dimension: .npz and .safetensors."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.errors import UsageError
from lockstep.parts.plain import as_dense, as_numpy, is_tensor


def write(path: Path, predictions: Sequence[Mapping[str, Any]], final: Path) -> list[str]:
    """Write the arrays that `stack` returns.

    Args:
        path: file to write.
        final: path that the file will get. Its suffix gives the format, and errors name it.

    Returns:
        names that are left out: values that are None in all predictions, and text in .safetensors.

    Raises:
        UsageError: see `stack`.
        OSError: the file cannot be written.
    """
    arrays, left_out = stack(predictions, f"--out {final}")
    if final.suffix == ".npz":
        import numpy as np

        with zipfile.ZipFile(path, "w") as archive:  # numpy.savez takes no array named `file`
            for name, value in arrays.items():
                array = as_numpy(value) if is_tensor(value) else value
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return left_out
    import torch
    from safetensors.torch import save_file

    texts = [name for name, value in arrays.items() if not is_tensor(value) and value.dtype.kind == "U"]
    numbers = {name: value for name, value in arrays.items() if name not in texts}
    tensors = {name: value if is_tensor(value) else torch.from_numpy(value) for name, value in numbers.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return left_out + texts


def stack(predictions: Sequence[Mapping[str, Any]], where: str) -> tuple[dict[str, Any], list[str]]:
    """Stack the values of each name over all predictions.

    A value inside mappings, dataclasses and tuples gets the names on the way to it, joined with `/`. A list of numbers
    is an array.

    Args:
        where: what errors name as the place.

    Returns:
        an array or tensor by name, and the names whose value is None in all predictions.

    Raises:
        UsageError: names or shapes differ between predictions, or a value is neither a number nor a text.
    """
    flat = [_flat(prediction) for prediction in predictions]
    names = list(dict.fromkeys(name for values in flat for name in values))
    empty = [name for name in names if all(values.get(name) is None for values in flat)]
    arrays: dict[str, Any] = {}
    for name in names:
        if name in empty:
            continue
        missing = [number for number, values in enumerate(flat) if values.get(name) is None]
        if missing:
            raise _unfit(f"{name} is missing in prediction {missing[0]}", where)
        arrays[name] = _stacked(name, [values[name] for values in flat], where)
    return arrays, empty


def _stacked(name: str, values: list[Any], where: str) -> Any:
    import numpy as np

    all_tensors = all(is_tensor(value) for value in values)
    arrays: list[Any] = values
    try:
        if not all_tensors:
            arrays = [as_numpy(value) if is_tensor(value) else np.asarray(value) for value in values]
    except ValueError:  # a list of lists of several lengths
        raise _unfit(f"{name} holds lists of several lengths", where) from None
    shapes = list(dict.fromkeys(tuple(array.shape) for array in arrays))
    if len(shapes) > 1:
        more = ", ..." if len(shapes) > 4 else ""
        raise _unfit(f"{name} has several shapes: {', '.join(map(str, shapes[:4]))}{more}", where)
    if all_tensors:
        import torch

        return torch.stack([as_dense(tensor) for tensor in arrays])
    stacked = np.stack(arrays)
    if stacked.dtype.kind not in "biufcU" or len({array.dtype.kind == "U" for array in arrays}) > 1:
        raise _unfit(f"{name} is neither a number nor a text: {values[0]!r:.60}", where)
    return stacked


def _unfit(text: str, where: str) -> UsageError:
    remedy = "write a .jsonl file, which takes values of any shape, or change what Presenter.describe returns"
    return UsageError(text, where=where, remedy=remedy)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values inside nested mappings, dataclasses and sequences, by the joined names on the way to them."""
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
