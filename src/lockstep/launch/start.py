"""One start of ranks: the nodes that have met for it, where their ranks meet, and its folder on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core import shortages
from lockstep.core.parallel.launched import KEPT_ROOM

_KEPT_BYTES = 1 << 15


@dataclass(frozen=True)
class Start:
    """One start of ranks on one or several nodes, which have met already."""

    rank: int
    """The number of this node, from 0."""
    sizes: Sequence[int]
    """The number of ranks of each node."""
    address: str
    """Where ranks meet: on the node of rank 0."""
    port: int
    run_id: str
    """The same for all starts of one launch."""
    look: Callable[[], bool] = lambda: False
    """Called twice a second. It returns whether the ranks of this node must end because of another node."""


def on_one_node(nproc: int) -> Start:
    """A start of `nproc` ranks, all on this machine."""
    return Start(rank=0, sizes=[nproc], address="127.0.0.1", port=free_port(), run_id=f"lockstep-{os.getpid()}")


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def folder_of(ranks: int) -> Iterator[Path]:
    """The folder for a start of `ranks` ranks on this machine. It is deleted at the end of the block.

    It is for heartbeats, reports and the request to stop. They may have to be written when the disk is full, so they
    reuse the space of files that this function writes.

    Raises:
        ShortageError: there is no space for temporary files.
    """
    with shortages.temporary_folder() as folder:
        try:
            for number in range(ranks + 1):
                (folder / f"{KEPT_ROOM}{number}").write_bytes(os.urandom(_KEPT_BYTES))
        except OSError as error:
            raise shortages.of_temporary_files(error) from error
        yield folder
