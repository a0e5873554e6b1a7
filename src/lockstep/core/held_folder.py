"""A folder that is held open, so that a run notices when a different folder takes its place."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import final

from lockstep.core.errors import TrainingError


@final
class HeldFolder:
    """Holds `path` open until the end of the `with` block.

    An open folder keeps its inode, so no other folder can pass for it. If this rank cannot open the folder, because its
    machine does not see it, `check` accepts any folder: the commit of a checkpoint names that fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def __enter__(self) -> HeldFolder:
        with contextlib.suppress(OSError):
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def anchored(self, path: Path) -> Path:
        """A path to the same file below the held folder, even if a different folder takes its place in between.

        It is `path` itself if the system has no paths by descriptor.
        """
        anchor = Path(f"/proc/self/fd/{self._handle}")
        if self._handle is None or not anchor.exists():
            return path
        return anchor / path.relative_to(self.path)

    def check(self) -> None:
        """Check that `path` still leads to the folder that is held.

        Raises:
            TrainingError: it does not; says where the folder is now, if the system knows it.
        """
        if self._handle is None:
            return
        try:
            held = os.fstat(self._handle)
            found: os.stat_result | None = os.stat(self.path)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise self._error(f"can no longer be read: {error.strerror}") from error
        if found is None:
            raise self._error("no longer exists")
        if not os.path.samestat(held, found):
            raise self._error("is now a different folder")

    def _error(self, what: str) -> TrainingError:
        now = self._place()
        whereto = f"; the folder that this run began in is now {now}" if now else "; it was moved or deleted"
        back = f"move {now} back to {self.path}, or give it as --run-dir" if now else f"bring {self.path} back"
        return TrainingError(
            f"the run directory {what}{whereto}. Nothing more is saved there",
            where=str(self.path),
            remedy=f"{back}, then run the same command to resume from its newest checkpoint. Do not move a run "
            "directory while its run trains",
        )

    def _place(self) -> str | None:
        """Where the held folder is now. None: it was deleted, or the system does not report it."""
        assert self._handle is not None
        with contextlib.suppress(OSError):
            place = os.readlink(f"/proc/self/fd/{self._handle}")
            if os.path.samestat(os.stat(place), os.fstat(self._handle)):
                return place
        return None
