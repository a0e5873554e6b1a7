"""Wrong arguments of public calls, and messages about keys: both name what the user writes in Python."""

import inspect

import pytest
import torch
from torch import nn

import lockstep
from lockstep.core import caller, keywords
from lockstep.core.config import other_words
from lockstep.core.config.sections import all_keys
from lockstep.core.errors import UsageError

KEYS = {path for path, _ in all_keys()}
MODEL = nn.Linear(4, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
DATA = (torch.randn(8, 4),)


def loop(*more, **given):
    return lockstep.Loop(MODEL, OPTIMIZER, DATA, *more, **given)


def remedy_of(call):
    with pytest.raises(UsageError) as caught:
        call()
    return caught.value.remedy


@pytest.mark.parametrize("word", sorted(other_words.table()))
@pytest.mark.parametrize("call", [loop, lambda **given: lockstep.Trainer("digits", **given)], ids=["Loop", "Trainer"])
def test_a_word_of_other_libraries_is_an_error_that_names_ours(call, word):
    name = "Loop" if call is loop else "Trainer"
    if word in inspect.signature(getattr(lockstep, name).__init__).parameters:
        return
    remedy = remedy_of(lambda: call(**{word: 7}))
    starts = ("write ", "put it into the config: {", "leave it out", *caller.NOT_IN_A_LOOP.values())
    is_known = remedy.startswith(starts) and " --" not in remedy.replace("lockstep run --nproc", "")
    assert is_known or "ts arguments are " in remedy
    assert is_known or all(one.startswith(("--", "give ")) for one in other_words.table()[word]), remedy


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"epoch": 3}, "write epochs=3"),
        ({"batch_size": 8}, "write global_batch=8"),
        ({"bf16": True}, 'write precision="bf16"'),
        ({"device": "cpu"}, 'write config={"device": "cpu"}'),
        ({"save_steps": 5}, 'write config={"checkpoint.every_steps": 5}'),
        ({"output_dir": "x"}, 'write Loop(run_dir="x")'),
        ({"devices": 2}, "write lockstep run --nproc 2"),
        ({"lr": 0.1}, caller.NOT_IN_A_LOOP["optim"]),
        ({"val_data": DATA}, caller.NOT_IN_A_LOOP["data.eval"]),
        ({"callbacks": [1]}, "write parts=[...], with objects of lockstep.Part"),
    ],
)
def test_what_is_written_for_a_loop(given, remedy):
    assert remedy_of(lambda: loop(**given)) == remedy


@pytest.mark.parametrize(
    ("call", "where", "nearest"),
    [
        (lambda: loop(runs_dir="x"), "Loop(runs_dir=...)", "run_dir"),
        (lambda: lockstep.Loop.save(None, "x", if_bst=1.0), "Loop.save(if_bst=...)", "if_best"),
        (lambda: lockstep.Loop.evaluate(None, DATA, metric=1), "Loop.evaluate(metric=...)", "metrics"),
        (lambda: lockstep.Trainer("digits", check_point=3), "Trainer(check_point=...)", "checkpoint"),
        (lambda: lockstep.Trainer("digits").export("x", forced=True), "Trainer.export(forced=...)", "force"),
        (lambda: lockstep.Stream([1], lenght=3), "Stream(lenght=...)", "length"),
        (lambda: lockstep.WeightedSampler([1.0], sample=3), "WeightedSampler(sample=...)", "num_samples"),
        (lambda: lockstep.Player("a", matches="b"), "Player(matches=...)", "match"),
        (lambda: lockstep.Follower("a", "b", decays=0.9), "Follower(decays=...)", "decay"),
        (lambda: lockstep.Metrics(metric=3), "Metrics(metric=...)", "metrics"),
        (lambda: lockstep.trained_only(MODEL, kept="x"), "trained_only(kept=...)", "keep"),
    ],
)
def test_an_unknown_argument_is_an_error_with_the_nearest(call, where, nearest):
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.where == where
    assert caught.value.remedy.startswith(f"did you mean {nearest}? Its arguments are ")


def test_missing_arguments_are_errors_that_list_all_and_other_errors_stay():
    assert remedy_of(lambda: lockstep.Loop(MODEL, OPTIMIZER)).startswith("its arguments are model, optimizer, train_d")
    assert remedy_of(lambda: loop(32)).startswith("its arguments are model, optimizer, train_data, global_batch")

    def fails(number):
        return number + "1"

    with pytest.raises(TypeError, match="unsupported operand"):
        keywords.checked(fails, "fails")(1)


def test_a_config_without_a_section_names_the_section_that_is_meant():
    assert remedy_of(lambda: lockstep.RunConfig(trian={})).startswith("did you mean train? There are: name, seed, ")
    assert remedy_of(lambda: lockstep.RunConfig(epochs=3)) == "it is in a section: train.epochs"


def test_each_argument_of_a_loop_is_a_key():
    assert caller.LOOP_ARGUMENTS.keys() <= KEYS
    assert set(caller.LOOP_ARGUMENTS.values()) <= inspect.signature(lockstep.Loop.__init__).parameters.keys()
    names = [*caller.LOOP_ARGUMENTS.values(), "data"]
    assert caller.keys_of(names) == (*caller.LOOP_ARGUMENTS, "data")


@pytest.mark.parametrize("key", sorted(KEYS))
def test_messages_to_the_user_of_a_loop_have_the_names_that_the_user_writes(key):
    text = f"raise {key}, or set {key}=3: see x/{key}.py and runs/{key}"
    said = caller.words(text, "Loop")
    assert caller.words(text) == text
    assert caller.words(said, "Loop") == said
    assert said.endswith(f": see x/{key}.py and runs/{key}")
    section = key.partition(".")[0]
    if key in caller.LOOP_ARGUMENTS:
        argument = caller.LOOP_ARGUMENTS[key]
        assert said.startswith(f"raise {argument}, or set {argument}=3:")
    elif section in ("optim", "schedule") and key != "optim.name":
        assert said.startswith(f"raise {key.rpartition('.')[2]} of the {'optimizer' if section == 'optim' else 'sch'}")
    elif "." in key and key not in ("data.train", "optim.name"):
        assert said.startswith(f'raise {key}, or set Loop(config={{"{key}": 3}}):')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("use --nproc 1, or device=cpu.", 'use lockstep run --nproc 1, or Loop(config={"device": "cpu"}).'),
        ("the device of this rank", "the device of this rank"),
        ("lower batch.global, or use --fresh", "lower global_batch, or use Loop(fresh=True)"),
        (
            "checkpoint.keep_best=[min,eval/loss] keeps",
            'Loop(config={"checkpoint.keep_best": ["min", "eval/loss"]}) keeps',
        ),
        ("--allow-change batch.global", 'Loop(allow_change=["batch.global"])'),
        ("written: runs/mine/train.log", "written: runs/mine/train.log"),
        ("Task.train_data: is empty", "train_data: is empty"),
    ],
)
def test_sentences_to_the_user_of_a_loop(text, said):
    assert caller.words(text, "Loop") == said
    assert caller.words(said, "Loop") == said
    with caller.command():
        assert caller.words(text, "Loop") == text
