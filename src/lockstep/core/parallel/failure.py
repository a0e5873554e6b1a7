"""When one rank fails, all ranks end and say which rank failed and why: a shared store keeps the first failure."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import uuid

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.core.errors import LockstepError, RankError, described
from lockstep.core.parallel import signals
from lockstep.core.parallel.launched import report_failure

_FAILURE, _SEEN = "failure", "seen"
_OF_GLOO = re.compile(r"/gloo/\S+:\d+\]")  # as in [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]
_POLL_S = 1.0
_GRACE_S = 10.0


def _is_of_connection(error: Exception) -> bool:
    """True if a collective or the store failed. gloo raises plain RuntimeErrors, which name the line of its source."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_OF_GLOO.search(str(error))))


class FailureBoard:
    """The first failure of any rank, in a store that all ranks reach.

    A thread looks at the store every second. A rank that waits in a collective for the failed rank usually wakes by
    itself, because the connection closes. If it does not wake (NCCL), the thread ends the process after `_GRACE_S`.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.me = uuid.uuid4().hex  # by mistake, another process may have the same rank
        self.first: dict[str, str | int | bool] | None = None
        self.closed = threading.Event()
        self.counting, self.counted = threading.Lock(), False
        self.thread = threading.Thread(target=self._watch, name="lockstep-failures", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self.closed.set()
        self.thread.join(5)

    def explain(self, error: Exception) -> RankError | None:
        """Tell the other ranks that this rank failed with `error`.

        Returns:
            the error to raise instead, if this rank failed because another rank did; else None.
        """
        lost = _is_of_connection(error)
        if lost:  # the rank that caused this may be about to write its failure
            deadline = time.monotonic() + 3 * _POLL_S
            while (
                self.first is None
                and time.monotonic() < deadline
                and self.thread.is_alive()
                and signals.current().signal != signal.SIGTERM
            ):
                time.sleep(0.05)
            self._read()  # the agent may have asked this rank to stop before the thread has looked
        with contextlib.suppress(dist.DistError):
            if self.first is None and not lost:
                text = str(error) if isinstance(error, LockstepError) else described(error)
                own_failure = {
                    "rank": self.rank,
                    "author": self.me,
                    "text": text,
                    "retryable": error.retryable if isinstance(error, LockstepError) else True,
                    "retries_differently": isinstance(error, LockstepError) and error.retries_differently,
                }
                first = json.loads(self.store.compare_set(_FAILURE, "", json.dumps(own_failure)))
                self.first = first
                if first["author"] != self.me:  # this rank failed too, but later
                    self._count_as_informed()
                self._linger()
        if self.first is not None and self.first["author"] == self.me:
            return None
        return self._error_of(self.first, error) if self.first is not None or lost else None

    def _error_of(self, first: dict[str, str | int | bool] | None, error: Exception | None = None) -> RankError:
        """The error of this rank, which ends because of `first`, or because it lost the connection (`error`)."""
        where = f"rank {self.rank} stopped because of it"
        if first is None:
            lost = RankError(
                f"lost the connection to another rank, which gave no reason: {str(error).splitlines()[0]}",
                where=where,
                remedy="the process of that rank was killed, or its machine or the network between them failed: "
                "look at the output of that rank, and at the system log of its machine, where the out-of-memory "
                "killer leaves a line",
            )
            lost.lost_another = True
            return lost
        is_alike = error is not None and str(error) == first["text"]  # all ranks found the same, maybe of another rank
        remedy = None if is_alike else f"the fault is on rank {first['rank']}"
        other = RankError(f"rank {first['rank']} failed: {first['text']}", where=where, remedy=remedy)
        other.origin, other.retryable = (int(first["rank"]), str(first["text"])), bool(first["retryable"])
        other.retries_differently = bool(first["retries_differently"])
        return other

    def _count_as_informed(self) -> None:
        """Let rank 0 know that this rank has read the failure."""
        with self.counting:
            if not self.counted:
                self.counted = True
                self.store.add(_SEEN, 1)

    def _linger(self) -> None:
        """Rank 0 often holds the store, so it waits until the other ranks have read the failure."""
        deadline = time.monotonic() + 3 * _POLL_S
        while self.rank == 0 and self.store.add(_SEEN, 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)

    def _read(self) -> bool:
        """Read the first failure of all ranks. True if this rank need not look again."""
        try:
            if not self.store.check([_FAILURE]):
                return False
            first = json.loads(self.store.get(_FAILURE))
            if first["author"] != self.me:
                self.first = first
                self._count_as_informed()
        except dist.DistError:
            pass  # the store went with rank 0's process
        return True

    def _watch(self) -> None:
        while not self.closed.wait(_POLL_S):
            if self._read():
                break
        else:
            return
        first = self.first
        if first is not None and first["author"] != self.me and not self.closed.wait(_GRACE_S):
            cause = self._error_of(first)
            print(f"[rank {self.rank}] error: {cause}", file=sys.stderr, flush=True)
            report_failure(cause, str(cause))
            os._exit(1)  # the main thread waits in a collective that will not end, and cannot be interrupted
