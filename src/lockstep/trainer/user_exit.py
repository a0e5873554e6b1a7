"""The end of a script with a `Loop`: by itself, by an exception, by a signal, or on one rank only.

A `Loop` holds what `Trainer.fit` holds by `with`: the group of ranks, the run directory, the writers of the log. So it
has to learn how the script ends.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.core import caller, this_process
from lockstep.core.errors import LockstepError, Preempted, RankError
from lockstep.core.parallel.launched import LAUNCHED, report_failure
from lockstep.core.parallel.rendezvous import store_of_ranks
from lockstep.core.parallel.world import World

_LEAVE_S = 30.0
"""So long a rank that has left its loop waits for the others."""
_open: list[Exit] = []
_is_fresh = False


class Exit:
    """What one `Loop` holds. `world` is left when the script ends, `training` when the loop ends.

    Args:
        leave: is called before an end without an exception: the script may have left the loop early.
        quiet: the log is not on the terminal.
    """

    def __init__(self, leave: Callable[[], None], *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.world, self.training = ExitStack(), ExitStack()
        self._leave = leave
        _install()
        _open.append(self)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Around work of the engine: an error releases all that is held."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            found = self.fail(error)
            if isinstance(found, LockstepError):
                caller.translate(found, "Loop")
            if isinstance(found, Preempted) and LAUNCHED not in os.environ:
                report_failure(found, str(found))
                if this_process.is_first():
                    said = "" if found.is_in_log and not self._quiet else f"{found}; "
                    print(f"{said}{found.remedy}", file=sys.stderr, flush=True)
                raise SystemExit(found.exit_code) from None
            if found is error:
                raise
            raise found from error

    def end_training(self) -> None:
        """Release the run directory, the log and the signals."""
        self.training.close()

    def close(self) -> None:
        """Release all if the script did not fail."""
        if self in _open:
            self._leave()
            _open.remove(self)
            self.training.close()
            self.world.close()

    def fail(self, error: BaseException) -> BaseException:
        """Release all after an error, and report it to other ranks and the launcher. Returns the clearest error."""
        if self not in _open:
            return error
        _open.remove(self)
        for stack in (self.training, self.world):
            try:
                stack.__exit__(type(error), error, error.__traceback__)
            except BaseException as better:
                error = better
        return error


def close_open() -> None:
    """Release what an earlier `Loop` of this process holds."""
    for one in list(_open):
        one.close()


def fail_open(error: BaseException) -> BaseException:
    """Release what loops of this process hold, after an error of the script. Returns the clearest error."""
    for one in list(_open):
        error = one.fail(error)
    return error


def is_fresh() -> bool:
    """True if the command that runs the script asks its loops to delete their earlier runs."""
    return _is_fresh


def run_script(arguments: Sequence[str], *, fresh: bool = False) -> None:
    """Run a script as `python SCRIPT ARGS` does. An error of it ends its loops, so that other ranks learn of it."""
    global _is_fresh
    _is_fresh = fresh
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    try:
        with caller.script():
            runpy.run_path(arguments[0], run_name="__main__")
    except BaseException as error:
        found = fail_open(error)
        if found is error:
            raise
        raise found from error
    close_open()


def check_all_left(world: World, name: str, step: int, *, complete: bool) -> None:
    """Wait until all ranks have left their loops after the same step. A rank that trains on is not interrupted.

    Args:
        name: of this loop, the same on all ranks.

    Raises:
        RankError: they have not; names the ranks.
    """
    if world.size == 1:
        return
    store, _ = store_of_ranks(world.rank, world.size, _LEAVE_S)
    prefix, own = f"lockstep/left/{name}", f"{step}{'' if complete else ' (in the middle of it)'}"
    store.set(f"{prefix}/{world.rank}", own)
    keys = [f"{prefix}/{rank}" for rank in range(world.size)]
    found: dict[int, str] = {}
    for rank, key in enumerate(keys):
        with contextlib.suppress(Exception):  # it has not left in time; torch has no class for this
            store.wait([key], datetime.timedelta(seconds=_LEAVE_S if rank == len(found) else 0.1))
            found[rank] = store.get(key).decode()
    others = [rank for rank in range(world.size) if found.get(rank) != own]
    if others:
        listed = ", ".join(f"rank {rank}: {found.get(rank, 'still in its loop')}" for rank in others)
        raise RankError(
            f"rank {world.rank} left its loop after step {own}, and other ranks did not: {listed}",
            where="for step in loop",
            remedy="leave the loop on all ranks after the same step: decide by values that are equal on all ranks, "
            "such as the results of loop.evaluate, and not by loop.rank, a clock or the loss of one micro-batch",
        )


def _install() -> None:
    if not getattr(_hook, "installed", False):
        _hook.installed = True  # type: ignore[attr-defined]
        _hook.before = sys.excepthook  # type: ignore[attr-defined]
        sys.excepthook = _hook
        atexit.register(_at_exit)


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
    found = fail_open(error)
    _hook.before(type(found), found, found.__traceback__)  # type: ignore[attr-defined]


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)
    if error is not None:
        fail_open(error)
        return
    try:
        close_open()
    except BaseException as failure:
        sys.excepthook(type(failure), failure, failure.__traceback__)
        sys.stderr.flush()
        os._exit(getattr(failure, "exit_code", 1))
