"""The first failure of any rank, as all ranks learn it."""

import threading

from torch.distributed import HashStore

from lockstep.distributed import failure
from lockstep.errors import DataError


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
