"""The folder of a launch: heartbeats, reports and the request to stop. Room for them is kept from the beginning on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lockstep.core import shortages

_KEPT, _KEPT_BYTES = "kept-room-", 1 << 15


@contextlib.contextmanager
def made(ranks: int) -> Iterator[Path]:
    """The folder for a start of `ranks` ranks on this machine, which is deleted at the end of the block.

    Files that are written last, when the disk may be full, take the room of files that this function writes.

    Raises:
        ShortageError: there is no room for temporary files.
    """
    with shortages.temporary_folder() as folder:
        try:
            for number in range(ranks + 1):
                (folder / f"{_KEPT}{number}").write_bytes(os.urandom(_KEPT_BYTES))
        except OSError as error:
            raise shortages.of_temporary_files(error) from error
        yield folder


def write(path: Path, content: bytes) -> None:
    """Write a file into the folder of a launch, if need be in the room that was kept.

    Raises:
        OSError: there is no room in spite of that.
    """
    while True:
        try:
            path.write_bytes(content)
        except OSError as error:
            kept = next(path.parent.glob(f"{_KEPT}*"), None) if shortages.is_full(error) else None
            if kept is None:
                raise
            kept.unlink(missing_ok=True)  # another rank may have taken it
        else:
            return
