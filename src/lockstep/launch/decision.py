"""After ranks have ended: is the training done, are all ranks restarted, or does the run end, and why?

Pure functions, without processes. On several nodes, every launcher calls them with the same `Ending`, so that all nodes
decide the same.
"""

from __future__ import annotations

import enum
import os
import signal
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.core.errors import LockstepError, Preempted, RankError

NOT_BEGUN = str(Preempted.before_training())
NO_MEMORY = "the system probably ran out of memory: lower batch.micro or the number of ranks"
_SAME_STEP, _SAME_STEP_KILLED = 2, 5


@dataclass(frozen=True)
class RankFailure:
    """The end of a rank that did not end well."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it, as in `subprocess`."""
    time: int
    """Time of its report, in seconds since 1970; 0 if it left none."""
    report: dict[str, Any]
    """Its report, written with `launched.report_failure`, with `text`; empty if it wrote none."""
    node: str = ""
    """The node on which it ran; empty if there is one node."""


@dataclass(frozen=True)
class Ending:
    """The end of the ranks of all nodes, after one start."""

    failures: tuple[RankFailure, ...]
    """Empty: all ranks ended well."""
    step: int = -1
    """The largest step of any rank; -1 if training did not begin."""
    asked: bool = False
    """True if a launcher was asked to stop."""
    joining: bool = False
    """True if the ranks were stopped because another node wants to join."""
    lost: tuple[str, ...] = ()
    """Nodes without a heartbeat."""
    warm_process: str = ""
    """The end of the process from which ranks are forked; empty if it is running."""
    nodes: tuple[str, ...] = ()
    """The nodes of this start. Empty if there is one node."""
    least: int = 1
    """The least number of nodes that must take part."""

    def as_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Ending:
        """The inverse of `as_dict`."""
        failures = tuple(RankFailure(**failure) for failure in values["failures"])
        return cls(**values | {"failures": failures, "lost": tuple(values["lost"]), "nodes": tuple(values["nodes"])})


@dataclass(frozen=True)
class StartHistory:
    """The past that a decision needs: what earlier starts left behind."""

    restarts: int = 0
    """Restarts after failures of ranks. Restarts because a node left or joined do not count."""
    crashed_at: int | None = None
    """The step at which the last start failed."""
    in_a_row: int = 0
    """Number of consecutive starts that failed at this step."""


class Action(enum.Enum):
    """The next thing to do."""

    DONE = "done"
    RESTART = "restart"
    STOP = "stop"
    FAIL = "fail"


@dataclass(frozen=True)
class Decision:
    """The next thing to do, and why."""

    action: Action
    history: StartHistory
    text: str = ""
    """For RESTART, the line that reports it; for STOP, the message of `Preempted`."""
    error: LockstepError | None = None
    """For FAIL."""
    differs: bool = False
    """For RESTART: True if the next start behaves differently, because memory did not suffice."""
    left_out: tuple[str, ...] = ()
    """For RESTART: nodes that no longer take part, because the watch found them at fault."""


def decide(ending: Ending, history: StartHistory, max_restarts: int) -> Decision:
    """Decide what follows from an `ending`.

    All ranks are restarted after a rank was killed or crashed, up to `max_restarts` times, and after a node was lost or
    wants to join. They are not restarted
    - after an error that would come again (wrong usage, a loss that is not finite);
    - after an exception before the end of the first step of a new run, unless something outside the training caused it
      (`LockstepError.from_outside`): the next start would fail in the same way;
    - after two crashes in a row at the same step, or five if a rank was killed or a node was lost, because kills from
      outside may hit the same step twice.

    If the watch found nodes at fault, the others are restarted without them, if they are enough. That does not count as
    a restart either.

    If the next start behaves differently (smaller micro-batches, after memory did not suffice), the ranks are
    restarted. That counts neither as a restart nor as in a row: it ends with micro-batches of one sample.
    """
    if not ending.failures and not ending.lost:
        return Decision(Action.DONE, history)
    by_itself = any(failed_by_itself(failure) for failure in ending.failures)
    preempted = [failure for failure in ending.failures if failure.exit_code == Preempted.exit_code]
    if not ending.lost:
        # The agent stops the other ranks when a rank has failed. A rank that has not begun then ends as if preempted.
        codes = {failure.exit_code for failure in ending.failures}
        deaf = codes <= {-signal.SIGUSR1, -signal.SIGTERM}
        if ending.joining and not ending.asked and not by_itself and (preempted or deaf):
            return Decision(Action.RESTART, history, "a node joins: all ranks restart, including its ranks")
        if preempted and (ending.asked or not by_itself):
            return Decision(Action.STOP, history, str(preempted[0].report.get("text") or NOT_BEGUN))
        if ending.asked and (deaf or -signal.SIGUSR1 in codes):  # a rank was not listening yet
            return Decision(Action.STOP, history, NOT_BEGUN)
    is_new = ending.step <= 0 and not history.restarts
    cause, retryable, retries_differently = _cause_of(ending, is_new)
    if ending.asked and ending.lost:
        text = f"{cause.what} while the run was stopping; training since the newest checkpoint is lost"
        return Decision(Action.STOP, history, text)
    when = f"at step {ending.step}" if ending.step >= 0 else "before training began"
    if retryable and retries_differently and not ending.asked and not ending.lost:
        return Decision(Action.RESTART, history, f"{cause.what}\nfailed {when}: all ranks restart", differs=True)
    guilty = _guilty_nodes(ending)
    if guilty and not ending.asked and not ending.lost:
        named = f"node{'s' * (len(guilty) > 1)} {', '.join(guilty)}"
        text = f"{cause.what}\n{named} will no longer take part: the others continue"
        return Decision(Action.RESTART, history, text, left_out=guilty)
    if not retryable or ending.asked or (history.restarts == max_restarts and not ending.lost):
        return Decision(Action.FAIL, history, error=cause)
    in_a_row = history.in_a_row + 1 if ending.step == history.crashed_at else 1
    killed = [failure for failure in ending.failures if not failure.report.get("stopped")]
    from_outside = bool(ending.lost) or -signal.SIGKILL in {failure.exit_code for failure in killed}
    if in_a_row >= (_SAME_STEP_KILLED if from_outside else _SAME_STEP):
        reason = f"it failed {in_a_row} times in a row {when}, so it was not restarted"
        cause.remedy = f"{reason}. {cause.remedy or ''}".rstrip()
        return Decision(Action.FAIL, history, error=cause)
    next_one = replace(history, crashed_at=ending.step, in_a_row=in_a_row)
    if ending.lost:
        return Decision(Action.RESTART, next_one, f"{cause.what}\nall ranks stopped {when}, and restart")
    next_one = replace(next_one, restarts=history.restarts + 1)
    text = f"{cause.what}\nfailed {when}: restart {next_one.restarts} of {max_restarts}"
    return Decision(Action.RESTART, next_one, text)


def _guilty_nodes(ending: Ending) -> tuple[str, ...]:
    """The nodes whose ranks the watch found at fault; empty if too few nodes would be left."""
    ranks = {rank for failure in ending.failures for rank in failure.report.get("guilty") or ()}
    guilty = {failure.node for failure in ending.failures if failure.rank in ranks and failure.node}
    left = [node for node in ending.nodes if node not in guilty]
    return tuple(sorted(guilty)) if guilty and len(left) >= max(1, ending.least) else ()


def failed_by_itself(failure: RankFailure) -> bool:
    """True if a rank failed neither because of another rank nor because the agent or a signal stopped it."""
    report = failure.report
    if failure.exit_code in (-signal.SIGTERM, -signal.SIGUSR1, Preempted.exit_code) or report.get("stopped"):
        return False
    if _ended_by_nccl(report):
        return False
    if failure.exit_code == 1 and not report:  # how `signals` ends a rank after the agent's SIGTERM
        return False
    return not report.get("origin") and not report.get("lost_another")


def _ended_by_nccl(report: dict[str, Any]) -> bool:
    """True if the last lines of a rank that a signal ended show that NCCL did so because of another rank."""
    output = "\n".join(report.get("last_lines") or [])
    if "NCCL" not in output:
        return False
    from lockstep.core.parallel import device_errors

    return device_errors.is_of_another_rank(output)


def _cause_of(ending: Ending, is_new: bool) -> tuple[LockstepError, bool, bool]:
    """Why the ranks ended: the error, whether a restart may succeed, and whether it behaves differently."""
    if ending.lost:
        would_come_again = [
            cause
            for failure in ending.failures
            if failed_by_itself(failure) and not (cause := first_cause([failure]))[1]
        ]
        if would_come_again:
            return would_come_again[0]
        nodes = f"node{'s' * (len(ending.lost) > 1)} {', '.join(ending.lost)}"
        remedy = "check the output of the launcher there, and the system log of its machine"
        return RankError(f"{nodes} sent no heartbeat", remedy=remedy), True, False
    if ending.warm_process:
        return RankError(ending.warm_process, remedy=NO_MEMORY), True, False
    return first_cause(ending.failures, is_new=is_new)


def first_cause(failures: Sequence[RankFailure], *, is_new: bool = False) -> tuple[LockstepError, bool, bool]:
    """Of all ranks that failed, the one that made the others fail.

    Args:
        is_new: whether a new run has not ended its first step. Then an exception of the training itself would come
        again.

    Returns:
        the error, whether a restart may succeed, and whether it behaves differently.
    """
    causes = []
    for failure in failures:
        knows_the_cause = bool(failure.report.get("origin"))
        distance = 0 if failed_by_itself(failure) else 1 if knows_the_cause else 2
        causes.append((distance, failure.time, failure.rank, failure))
    *_, failure = min(causes, key=lambda cause: cause[:3])
    report = failure.report
    if failure.exit_code < 0 and (report.get("stopped") or not report.get("text")):
        return _killed(failure)
    text = report.get("text") or "it gave no reason; see its output above"
    rank, text = report.get("origin") or (failure.rank, text)
    node = next((other.node for other in failures if other.rank == rank), "")
    cause = RankError(f"rank {rank}{_on(node)} failed: {text}")
    cause.exit_code = max(1, failure.exit_code)  # a rank that has reported its error may be killed while it ends
    retries_differently = bool(report.get("retries_differently", False))
    would_come_again = is_new and report.get("from_outside") is False and not retries_differently
    return cause, bool(report.get("retryable", True)) and not would_come_again, retries_differently


def _killed(failure: RankFailure) -> tuple[LockstepError, bool, bool]:
    """The same as `first_cause`, for a rank that a signal ended before it could report an error."""
    number, output = -failure.exit_code, "\n".join(failure.report.get("last_lines") or [])
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "<N/A>"
    what = f"rank {failure.rank}{_on(failure.node)} was killed by signal {number} ({name})"
    if output:
        what += "; the last lines of its stderr:\n" + textwrap.indent(output, "    ")
    remedy = NO_MEMORY if number == signal.SIGKILL else None
    if number == signal.SIGSEGV and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        remedy = "unset TORCH_DISTRIBUTED_DEBUG: with DETAIL, torch ends with this signal if DDP runs on CPUs"
        return RankError(what, remedy=remedy), False, False
    if output:
        from lockstep.core.parallel import device_errors

        remedy = device_errors.advice(output)
        return RankError(what, remedy=remedy), not device_errors.is_deterministic(output), False
    return RankError(what, remedy=remedy), True, False


def _on(node: str) -> str:
    return f" on node {node}" if node else ""
