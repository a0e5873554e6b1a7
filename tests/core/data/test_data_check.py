"""The check of the data before a training: ranks share the work, and all raise the same error."""

import pytest

from lockstep.core.data.data_check import check_data
from lockstep.core.errors import DataError
from lockstep.core.parallel.world import join_world
from tests import runs
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


def check(wrong):
    """What was checked on this rank, the beats, and the remarks or the error."""
    data = Samples(range(11), wrong)
    with join_world("cpu") as world:
        before = world.heartbeat.beats
        try:
            found = check_data(data, world)
        except DataError as error:
            found = str(error)
        return data.seen, world.heartbeat.beats - before, found


@pytest.mark.cases("wrong0-3", "wrong2-1")
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
    data = Samples(range(3), [1])
    data.check_first = False
    with join_world("cpu") as world:
        assert check_data(data, world) == []
    assert data.seen == []


@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_new_run_checks_its_data_before_it_trains(tmp_path, part):
    class Checked(Plain):
        def model(self):
            found = super().model()
            return found if part == "eval" else pytest.fail("the model was made before the data were checked")

        def loss(self, model, batch):
            pytest.fail("a batch was used before the data were checked")

        def train_data(self):
            return self.checked(super().train_data(), "train")

        def eval_data(self):
            return self.checked(super().eval_data(), "eval")

        def checked(self, data, name):
            data.check_first, data.check = True, lambda index: self.refuse(name, index)
            return data

        def refuse(self, name, index):
            if name == part and index == 2:
                raise DataError("broken", where=f"{name} {index}")

    with pytest.raises(DataError, match=f"{part} 2: broken"):
        runs.fit(Checked(eval_length=20), runs.config(train={"steps": 2, "eval_every_steps": 1}), tmp_path / "run")
