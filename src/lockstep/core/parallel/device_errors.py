"""Errors that a GPU reports: which of them end a process, which would come again, and what to do about them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from lockstep.core.errors import DeviceError, short_traceback

_ASSERT = re.compile(r"device-side assert|block: \[[\d, ]*\], thread: \[[\d, ]*\] Assertion")
_FATAL = re.compile(r"(CUDA|HIP) error:|device-side assert|STATUS_EXECUTION_FAILED")
_SHORTAGE = re.compile(r"out of memory|ALLOC_FAILED", re.IGNORECASE)
_HARDWARE = re.compile(r"\bECC\b|NVLink|\bXid\b|unspecified launch failure|hardware", re.IGNORECASE)

_ADVICE_ASSERT = (
    "a kernel found a wrong value, most often an index out of range: check that labels are between 0 and the number of "
    "classes - 1, and token ids below the size of the vocabulary. With the environment variable "
    "CUDA_LAUNCH_BLOCKING=1 the traceback names the operation; with device=cpu the error names the value"
)
_ADVICE_HARDWARE = "the GPU or its link may be damaged: look for Xid errors in the system log (dmesg) of its machine"
_ADVICE_NCCL = (
    "NCCL ended the process because another rank or the network between ranks failed: look at the other ranks first; "
    "with the environment variable NCCL_DEBUG=INFO it says more"
)
_ADVICE_CUDA = (
    "GPU errors are noticed after the operation that caused them: with the environment variable "
    "CUDA_LAUNCH_BLOCKING=1 the traceback names that operation"
)


def is_deterministic(text: str) -> bool:
    """True if the error in `text` would come again at the same step: an assertion in a kernel depends on values."""
    return _ASSERT.search(text) is not None


def advice(text: str) -> str | None:
    """Advice on the GPU error in `text`, which is output or a traceback; None if there is no such error."""
    if is_deterministic(text):
        return _ADVICE_ASSERT
    if _SHORTAGE.search(text):
        return None
    if _FATAL.search(text):
        return _ADVICE_HARDWARE if _HARDWARE.search(text) else _ADVICE_CUDA
    return _ADVICE_NCCL if "NCCL" in text else None


def is_of_another_rank(text: str) -> bool:
    """True if NCCL ended a rank, whose output `text` is, because another rank or the network failed."""
    return "NCCL" in text and not (_FATAL.search(text) or _ASSERT.search(text) or "ncclUnhandledCudaError" in text)


def is_fatal(error: BaseException) -> bool:
    """True if `error` or a cause of it says that this process can no longer use its GPU."""
    return _fatal_cause(error) is not None


_lost: list[str] = []


def note(error: BaseException) -> None:
    """Remember if `error` says that this process can no longer use its GPU."""
    if is_fatal(error):
        _lost.append(str(error))


def has_lost_device() -> bool:
    """True if an error that was noted says that this process can no longer use its GPU."""
    return bool(_lost)


def _fatal_cause(error: BaseException) -> BaseException | None:
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        if isinstance(link, DeviceError):
            return link
        of_device = isinstance(link, torch.AcceleratorError) or (
            isinstance(link, RuntimeError) and _FATAL.search(str(link))
        )
        if of_device and not isinstance(link, torch.OutOfMemoryError) and not _SHORTAGE.search(str(link)):
            return link
        link = link.__cause__ or link.__context__
    return None


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside, an error of a GPU is raised as a `DeviceError` with its traceback and with advice.

    Raises:
        DeviceError: a GPU reported an error that this process does not survive.
    """
    try:
        yield
    except Exception as error:
        cause = _fatal_cause(error)
        note(error)
        if cause is None or isinstance(cause, DeviceError):
            raise
        text = short_traceback(error)
        known = DeviceError(text, remedy=advice(str(cause)) or _ADVICE_CUDA)
        known.retryable = not is_deterministic(str(cause))
        raise known from error
