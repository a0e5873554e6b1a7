"""The check of the data before a training: ranks share the work, and all raise the same error."""

import pytest

from lockstep.distributed.world import join_world
from lockstep.engine.data_check import check_data
from lockstep.errors import DataError
from tests.own_tasks import Plain
from tests.ranks import run_ranks


class Samples(list):
    """Samples that are numbers, some of which are wrong."""

    check_first = True

    def __init__(self, numbers, wrong):
        super().__init__(numbers)
        self.wrong, self.seen = wrong, []

    def check(self, index):
        number = self[index]
        self.seen.append(number)
        if number in self.wrong:
            raise DataError("broken", where=f"sample {number}", remedy="repair it")
        return f"remark {number}" if number % 4 == 0 else None


class Checked(Plain):
    def __init__(self, wrong):
        super().__init__()
        self.parts = Samples(range(8), wrong), Samples(range(8, 11), wrong)

    def train_data(self):
        return self.parts[0]

    def eval_data(self):
        return self.parts[1]


def check(wrong):
    """What was checked on this rank, the beats, and the remarks or the error."""
    task = Checked(wrong)
    with join_world("cpu") as world:
        before = world.heartbeat.beats
        try:
            found = check_data(task, world)
        except DataError as error:
            found = str(error)
        return [*task.parts[0].seen, *task.parts[1].seen], world.heartbeat.beats - before, found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("wrong", [(), (5,), (9, 2, 3)])
def test_ranks_share_the_check_and_agree(world, wrong):
    found = run_ranks(world, check, wrong)
    assert sorted(index for seen, *_ in found for index in seen) == list(range(11))
    assert [beats for _, beats, _ in found] == [len(seen) for seen, *_ in found]
    results = [result for *_, result in found]
    assert results == world * results[:1]
    if not wrong:
        assert results[0] == ["remark 0", "remark 4", "remark 8"]
    elif len(wrong) == 1:
        assert results[0] == "sample 5: broken\n  remedy: repair it"
    else:
        assert results[0].splitlines()[0] == "3 samples cannot be used:"
        assert results[0].splitlines()[1:4] == [f"  sample {index}: broken" for index in sorted(wrong)]


def test_data_that_need_no_check():
    task = Checked((1, 9))
    for part in task.parts:
        part.check_first = False
    with join_world("cpu") as world:
        assert check_data(task, world) == []
    assert task.parts[0].seen == []
