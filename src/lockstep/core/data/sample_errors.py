"""Errors of reading and preparing a sample: about the data, or about the code that did it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core import debugging, shortages
from lockstep.core.code_files import is_own_code
from lockstep.core.errors import SKIP, DataError, LockstepError, TrainingError, frame_of_task, listed, short_traceback

_AFTER_FORK = "in forked subprocess"  # from the message of torch for CUDA, and for other devices
_OF_DATA = (OSError, EOFError, ValueError)  # decoders raise them; those of text, JSON and images are among them


def error_of_sample(index: int, error: Exception, *, where: str, method: str) -> LockstepError:
    """The error to raise for sample `index`.

    Args:
        error: what `method` raised.
        where: the file of the sample, or its place in the data set.
        method: that raised the error: `Task.prepare`, or the data set's own `__getitem__`.

    Returns:
        a DataError, if the sample is at fault: an error of files, of values, or of a library that decodes. A
        TrainingError with a traceback, if the code is at fault: all other errors.
    """
    if isinstance(error, DataError):
        return DataError(error.what, where=error.where or where, remedy=error.remedy)
    if known := error if isinstance(error, LockstepError) else debugging.explanation(error):
        return known
    text = f"{type(error).__name__}: {error}"
    frame = frame_of_task(error)
    if _AFTER_FORK in text:
        return TrainingError(
            f"{method} uses a GPU in a loader worker, which is forked from the rank: {text}\n{short_traceback(error)}",
            where=f"{frame.filename}:{frame.lineno}, in {frame.name}",
            remedy="keep the samples in the memory of the host, or data.start_method=spawn, or data.workers=0",
        )
    line = f"{frame.filename}:{frame.lineno}, in {frame.name}"
    if _is_of_data(error, method):
        return DataError(
            f"sample {index} cannot be read: {text}" + (f" ({line})" if is_own_code(frame.filename) else ""),
            where=where,
            remedy=f"repair or remove it, or {SKIP}",
        )
    return TrainingError(
        f"{method} failed for sample {index} ({where}): {text}\n{short_traceback(error)}",
        where=line,
        remedy="repair this code. If the sample itself is at fault, raise ValueError with the reason there: then "
        "data.on_error=skip continues without the sample",
    )


def error_of_batch(indices: Sequence[int], error: Exception) -> LockstepError | None:
    """The error to raise if `Task.collate` raised `error` for the samples `indices`. None: `error` as it is."""
    if isinstance(error, LockstepError | OSError | MemoryError):
        return None
    if known := shortages.explanation(error) or debugging.explanation(error):
        return known
    frame = frame_of_task(error)
    is_own = is_own_code(frame.filename)
    return TrainingError(
        f"Task.collate failed for samples {listed([str(index) for index in indices])}: "
        f"{type(error).__name__}: {error}\n{short_traceback(error)}",
        where=f"{frame.filename}:{frame.lineno}, in {frame.name}" if is_own else None,
        remedy="repair this code"
        if is_own
        else "write Task.collate, or let Task.prepare return tensors of equal shapes and types for all samples",
    )


def _is_of_data(error: Exception, method: str) -> bool:
    kind = type(error)
    if isinstance(error, _OF_DATA):
        return True
    if kind is RuntimeError:  # of a library that reads, as torch.load; in `prepare`, an operation with wrong tensors
        return method != "Task.prepare"
    return kind.__module__ not in ("builtins", "torch")  # an error that a decoder declares, as zlib.error
