import copy
import inspect
import pickle

import pytest

from lockstep.core import errors
from lockstep.core.errors import (
    CheckpointError,
    DataError,
    DeviceError,
    LockstepError,
    MemoryShortage,
    RankError,
    TrainingError,
    UsageError,
    WatchError,
    number_of,
)
from lockstep.trainer import user_exit
from tests import own_tasks, runs

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, LockstepError)]


def fields(error):
    return error.what, error.where, error.remedy


def test_these_are_all_the_kinds():
    assert set(KINDS) == {
        LockstepError,
        UsageError,
        DataError,
        TrainingError,
        MemoryShortage,
        DeviceError,
        CheckpointError,
        RankError,
        WatchError,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_has_place_fault_and_remedy(kind):
    assert str(kind("7 is odd", where="file.yaml", remedy="use 8")) == "file.yaml: 7 is odd\n  remedy: use 8"


def test_the_text_leaves_out_what_is_not_known():
    assert str(LockstepError("7 is odd")) == "7 is odd"
    assert str(LockstepError("7 is odd", where="file.yaml")) == "file.yaml: 7 is odd"
    assert str(LockstepError("7 is odd", remedy="use 8")) == "7 is odd\n  remedy: use 8"


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_can_be_read_back(kind):
    error = kind("what", where="where", remedy="remedy")
    assert fields(error) == ("what", "where", "remedy")
    assert fields(kind("what")) == ("what", None, None)


def test_place_and_remedy_are_given_by_name_only():
    with pytest.raises(TypeError):
        LockstepError("what", "where")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_class_fields_and_text_survive_pickling(kind, protocol):
    for error in (kind("what", where="where", remedy="remedy"), kind("what"), kind("what", remedy="remedy")):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is kind
        assert fields(back) == fields(error)
        assert str(back) == str(error)
        assert back.exit_code == error.exit_code


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", KINDS)
def test_class_and_fields_survive_copying(kind, copied):
    back = copied(kind("what", where="where", remedy="remedy"))
    assert type(back) is kind
    assert fields(back) == ("what", "where", "remedy")


def test_wrong_usage_exits_with_2_a_watch_that_fires_with_3_and_every_other_failure_with_1():
    others = {UsageError: 2, WatchError: 3}
    assert {kind: kind("what").exit_code for kind in KINDS} == {kind: others.get(kind, 1) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_caught_as_a_lockstep_error(kind):
    with pytest.raises(LockstepError, match="what") as caught:
        raise kind("what")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("widht", ["width", "height"], "width"),
        ("adamw", ["SGD", "AdamW"], "AdamW"),
        ("eval/acuracy", ["eval/loss", "eval/accuracy"], "eval/accuracy"),
        ("accuracy", ["eval/loss", "eval/accuracy"], "eval/accuracy"),
        ("eval/wer", ["eval/loss", "eval/f1"], None),  # only the part that all names have is the same
        ("data", ["name", "task"], None),
        ("resnet50", ["digits", "text", "toy"], None),
        (7, ["seven"], None),
        ("x", [], None),
    ],
)
def test_a_name_is_suggested_only_where_it_is_near(name, known, meant):
    assert errors.did_you_mean(name, known) == (f"did you mean {meant}? " if meant else "")


class FailingLoss(own_tasks.Plain):
    def loss(self, model, batch):
        return self.part(batch)

    def part(self, batch):
        return batch["labels"]


def test_an_error_in_a_method_of_a_task_is_described_by_method_and_line(tmp_path):
    with pytest.raises(TypeError) as caught:
        runs.fit(FailingLoss(), runs.config(), tmp_path)
    first, second, *_ = errors.described(caught.value).splitlines()
    line = FailingLoss.part.__code__.co_firstlineno + 1
    assert first.startswith(f"{__file__}:{line}, in part: Task.loss failed: TypeError: list indices")
    assert second.startswith("Traceback")


def test_an_error_of_a_script_is_described_by_its_own_frames(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def part():\n    return [][3]\n\n\npart()\n")
    with pytest.raises(IndexError) as caught:
        user_exit.run_script([str(script)])
    error = caught.value
    while error.__traceback__.tb_frame.f_code is not user_exit.run_script.__code__:  # without the frames of this test
        error.__traceback__ = error.__traceback__.tb_next
    first, second, *rest = errors.described(error).splitlines()
    assert first == f"{script}:2, in part: IndexError: list index out of range"
    assert "--debug shows all" in second
    assert [line.split(",")[0] for line in rest if line.startswith("  File")] == [f'  File "{script}"'] * 2


def test_an_error_of_lockstep_itself_is_a_traceback():
    with pytest.raises(TypeError) as caught:
        errors.did_you_mean("a", None)
    assert errors.described(caught.value).startswith("Traceback")


def test_one_thing_is_counted_in_the_singular():
    assert [number_of(many, "step") for many in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
    assert [number_of(2, noun) for noun in ("batch", "epoch", "box", "pass", "entry", "day")] == [
        "2 batches",
        "2 epochs",
        "2 boxes",
        "2 passes",
        "2 entries",
        "2 days",
    ]
    assert [number_of(many, "file", "is", "are") for many in (1, 2)] == ["1 file is", "2 files are"]
