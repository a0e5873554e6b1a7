"""The first failure of any rank, as all ranks learn it."""

import signal
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from lockstep.core.errors import DataError
from lockstep.core.parallel import failure
from lockstep.launch import decision

_GLOO = "/pytorch/third_party/gloo/gloo/transport/tcp"
CLOSED = f"[{_GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:48521. This is typically caused by a"


def test_rank_0_waits_for_no_rank_that_failed_too(monkeypatch):
    """All ranks refuse the same input at the same time, so none looks at the store once more."""
    monkeypatch.setattr(failure.FailureBoard, "_watch", lambda board: None)
    monkeypatch.setattr(failure, "_POLL_S", 0.5)
    store, error = HashStore(), DataError("the file is empty")
    first, second = (failure.FailureBoard(store, rank, 2) for rank in range(2))
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(first.explain(error)))
    waiting.start()
    while not store.check(["failure"]):
        pass
    assert second.explain(error).origin == (0, "the file is empty")
    waiting.join()
    assert answers == [None]
    assert store.add("seen", 0) == 1


def test_a_rank_that_is_asked_to_stop_looks_once_more_for_the_cause(monkeypatch):
    """The agent asks it as soon as the failed rank is gone, which may be before the thread has looked at the store."""
    monkeypatch.setattr(failure.FailureBoard, "_watch", lambda board: None)
    monkeypatch.setattr(failure.signals, "current", lambda: SimpleNamespace(signal=signal.SIGTERM))
    store = HashStore()
    first, second = (failure.FailureBoard(store, rank, 2) for rank in range(2))
    assert second.explain(DataError("rank 1 alone cannot read it")) is None
    other = first.explain(RuntimeError(CLOSED))
    assert other.origin == (1, "rank 1 alone cannot read it")


def test_a_rank_that_lost_another_is_not_the_cause_where_that_rank_has_told_its_own():
    board = failure.FailureBoard(HashStore(), 0, 2)
    board.close()
    lost = board.explain(RuntimeError(CLOSED))
    assert lost.lost_another
    assert "gave no reason" in str(lost)
    report = {"text": str(lost), "lost_another": True}
    assert not decision.failed_by_itself(decision.RankFailure(0, exit_code=1, time=1, report=report))


@pytest.mark.parametrize(
    ("error", "is_of_connection"),
    [
        (RuntimeError(CLOSED), True),
        (RuntimeError(f"[{_GLOO}/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"), True),
        (RuntimeError(f"[enforce fail at {_GLOO}/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4."), True),
        (dist.DistBackendError("NCCL error"), True),
        (dist.DistNetworkError("the client socket has failed to connect"), True),
        (dist.DistStoreError("wait timeout after 3000ms"), True),
        (RuntimeError("no class is called igloo"), False),
        (RuntimeError("gloo has no reduce_scatter of this type"), False),
        (ValueError(CLOSED), False),
    ],
)
def test_a_lost_connection_is_told_by_its_type_and_gloos_by_the_line_of_its_source(error, is_of_connection):
    assert failure._is_of_connection(error) is is_of_connection
