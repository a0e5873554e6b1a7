"""The work of CUDA's allocator before a shortage of memory, as a file for pytorch.org/memory_viz.

torch calls these functions private: `_record_memory_history`, `_dump_snapshot`, `_cuda_attach_out_of_memory_observer`.
No other module uses them, and a test says when torch changes them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.cuda import memory

_ENTRIES = 100_000  # allocations and frees that are kept, of some kB each
_target: Path | None = None


@contextlib.contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Inside, allocations are recorded. At the first shortage of memory, they are written to `file`."""
    global _target
    _observe()
    memory._record_memory_history(max_entries=_ENTRIES, stacks="python")
    _target = file
    try:
        yield
    finally:
        _target = None
        memory._record_memory_history(enabled=None)


@functools.cache
def _observe() -> None:
    """Let the allocator call `write` before it raises an error. It has no way to stop, so this is done once."""
    torch._C._cuda_attach_out_of_memory_observer(lambda *_: write())  # type: ignore[attr-defined]


def write(dump: Any = memory._dump_snapshot) -> None:
    """Write what was recorded, if it is the first time. A file that cannot be written does not end the training."""
    global _target
    file, _target = _target, None
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        dump(str(file))
        text = f"out of memory: {file} has the allocations, for pytorch.org/memory_viz"
    except Exception as error:
        text = f"warning: {file} was not written: {type(error).__name__}: {error}"
    print(text, file=sys.stderr, flush=True)
