"""The ranks agree on the step at which they stop, after any of them was asked to."""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.core.parallel.signals import StopFlag
from lockstep.core.parallel.world import World

_EVERY_S = 1.0


class StopConsensus:
    """Agreement on whether any rank was asked to stop: the same answer on all ranks, at the same call.

    Call it after equal amounts of work on every rank. The ranks communicate about once a second. The number of calls in
    a second follows from the time that the earlier calls took. It is summed over ranks, so that all ranks compute the
    same.
    """

    def __init__(self, world: World, flag: StopFlag) -> None:
        self.world, self.flag = world, flag
        self.left = self.between = 1
        self.begun = self.since = time.perf_counter()
        self._agreed_s = 0.0
        self.wants_end: Callable[[], bool] = lambda: False
        """True if something on this rank asks that the training ends as after its last step."""
        self.ends = False
        """True if something on any rank asked for it, at the last communication."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was made: a mean over ranks at their last communication, so equal on all."""
        return time.perf_counter() - self.begun if self.world.size == 1 else self._agreed_s

    def __call__(self) -> bool:
        if self.world.size == 1:
            self.ends = self.wants_end()
            return self.flag.signal is not None
        self.left -= 1
        if self.left:
            return False
        now = time.perf_counter()
        values = [float(self.flag.signal is not None), float(self.wants_end()), now - self.since, now - self.begun]
        asked, wanted, seconds, elapsed = self.world.all_sum(values)
        self.ends = wanted > 0
        self._agreed_s = elapsed / self.world.size
        per_call = seconds / self.world.size / self.between
        # At most twice as many calls as before: the first steps may be quicker than those that follow.
        self.left = self.between = max(1, min(2 * self.between, int(_EVERY_S / max(per_call, 1e-9))))
        self.since = now
        return asked > 0

    def restart(self) -> None:
        """Forget how long calls took, because the work between the next calls is different."""
        self.left = self.between = 1
        self.since = time.perf_counter()
