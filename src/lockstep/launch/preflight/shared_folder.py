"""A check that all ranks can write into the run directory, and see what others write there."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.parallel.world import World
from lockstep.launch.preflight.facts import within

_VISIBLE_S = 10.0  # how long a network file system may take to show a file
_ANSWER_S = 15.0  # longer than it may take to show a file
_STALE_S = 600.0  # a file of a process that was killed


@dataclass(frozen=True)
class Access:
    """What a rank can do in the run directory."""

    fault: str
    """Why it cannot write there. Empty: it can."""
    unseen: tuple[int, ...] = ()
    """The ranks whose file it does not see, among the first ranks of all nodes."""


def probe(folder: Path, world: World) -> list[Access]:
    """Every rank writes a small file, and looks for the files of all nodes. All ranks call it.

    Returns:
        what each rank can do, by rank.
    """
    token: str = world.broadcast(uuid.uuid4().hex[:12])
    with contextlib.ExitStack() as stack:
        made, fault = False, ""
        if world.rank == 0:
            _, fault = within(lambda: stack.enter_context(_made(folder)), _ANSWER_S)
        world.all_sum([0.0])  # rank 0 has made the folder
        path = _file(folder, token, world.rank)
        if not fault:
            made, fault = within(lambda: _write(path, token), _ANSWER_S)  # type: ignore[assignment]
        if made:
            stack.callback(within, lambda: path.unlink(missing_ok=True), _ANSWER_S)
        faults: list[str] = world.broadcast(world.gather(fault))
        writers = [rank for rank in world.nodes.first_ranks if not faults[rank]]
        seen, silent = within(lambda: _seen(folder, token, writers), _ANSWER_S)
        unseen = tuple(rank for rank in writers if rank not in (seen or ())) if not fault else ()
        found: list[Access] = world.broadcast(world.gather(Access(fault or silent, unseen)))
        world.all_sum([0.0])  # no rank looks any more
        return found


def _file(folder: Path, token: str, rank: int) -> Path:
    return folder / f".preflight-{token}-{rank}"


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder. If it is empty at the end, delete the folders that were made."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".preflight-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _STALE_S:
                path.unlink()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            time.sleep(0.01 * bool(new))  # for the files of the other ranks
            for path in new:
                path.rmdir()


def _write(path: Path, token: str) -> bool:
    """Write a file as soon as its folder is visible here."""
    deadline = time.monotonic() + _VISIBLE_S
    while not path.parent.is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
    with path.open("w") as file:
        file.write(token)
    return True


def _seen(folder: Path, token: str, ranks: list[int]) -> set[int]:
    """The ranks whose file is visible here with the content that they wrote."""
    deadline = time.monotonic() + _VISIBLE_S
    seen: set[int] = set()
    while True:
        for rank in ranks:
            with contextlib.suppress(OSError):
                if rank not in seen and _file(folder, token, rank).read_text() == token:
                    seen.add(rank)
        if len(seen) == len(ranks) or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)
