"""grid.yaml is read, and each of its values is checked before anything starts."""

import pytest

from lockstep.configs import config_file, config_layers
from lockstep.core.errors import UsageError
from lockstep_lab.search import grid
from lockstep_lab.search.grid import Range

AIM = "metric: eval/accuracy\ndirection: max\n"


def read(folder, text, overrides=(), target="digits"):
    path = folder / "grid.yaml"
    path.write_text(text)
    return grid.read(path, target, overrides, config_file.load(target, overrides))


def test_lists_and_ranges_are_read(tmp_path):
    found = read(
        tmp_path,
        "keys:\n  optim.lr: {low: 1e-4, high: 0.1, log: true}\n  batch.global: {low: 32, high: 96, step: 32}\n"
        f"  optim.name: [AdamW, SGD]\n{AIM}",
    )
    assert found.keys == {
        "optim.lr": Range(1e-4, 0.1, log=True),
        "batch.global": Range(32, 96, step=32),
        "optim.name": ["AdamW", "SGD"],
    }
    assert (found.sampler, found.pruner, found.metric, found.direction) == ("tpe", "median", "eval/accuracy", "max")
    assert found.keys["batch.global"].values() == [32, 64, 96]
    assert found.keys["optim.lr"].values() is None


def test_a_grid_has_all_combinations(tmp_path):
    text = f"sampler: grid\nkeys: {{optim.lr: [0.1, 0.01], batch.global: {{low: 16, high: 32, step: 16}}}}\n{AIM}"
    found = read(tmp_path, text)
    assert [tuple(one.values()) for one in found.combinations()] == [(0.1, 16), (0.1, 32), (0.01, 16), (0.01, 32)]


@pytest.mark.parametrize(
    ("keys", "sampler"),
    [
        ("{optim.lr: [0.1, 0.01], seed: [0, 1]}", "grid"),
        ("{seed: {low: 1, high: 20}}", "grid"),
        ("{seed: {low: 1, high: 21}}", "tpe"),
        ("{seed: {low: 0, high: 4000000000}}", "tpe"),
        ("{optim.lr: {low: 0.1, high: 0.2}}", "tpe"),
    ],
)
def test_few_combinations_are_all_made(tmp_path, keys, sampler):
    assert read(tmp_path, f"keys: {keys}\n{AIM}").sampler == sampler


def test_a_range_ends_at_its_last_step(tmp_path):
    found = read(tmp_path, f"keys: {{optim.lr: {{low: 0.1, high: 1.0, step: 0.4}}}}\n{AIM}").keys["optim.lr"]
    assert found.high == found.values()[-1] == pytest.approx(0.9)


def test_the_aim_is_that_of_the_best_checkpoint(tmp_path):
    found = read(tmp_path, "keys: {optim.lr: [0.1]}", ["checkpoint.keep_best=min eval/loss"])
    assert (found.metric, found.direction) == ("eval/loss", "min")


@pytest.mark.parametrize(
    "value", ["AdamW", "1e-3", "null", "a b", "true", [0.9, 0.999], {"a": 1}, 1e-05, None, True, 3, "x: y", "no"]
)
def test_values_reach_a_training_as_they_are(value):
    (text,) = grid.overrides_of({"key": value})
    assert config_layers.parsed(text.removeprefix("key=")) == value


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (f"keys: {{optim.lrr: [0.1]}}\n{AIM}", ["optim.lrr", "did you mean optim.lr?"]),
        (f"keys: {{optim.lr: [0.1, 0.01, -1]}}\n{AIM}", ["optim.lr: -1"]),  # the last value
        (f"keys: {{optim.lr: [0.1], batch.global: [32, 64.5]}}\n{AIM}", ["batch.global"]),
        (f"keys: {{optim.name: [AdamW, Adan]}}\n{AIM}", ["torch.optim has no 'Adan'"]),
        (f"keys: {{optim.lr: {{low: 0.1, high: 0.01}}}}\n{AIM}", ["low (0.1) must be below high"]),
        (f"keys: {{optim.lr: {{low: 0.0, high: 0.1, log: true}}}}\n{AIM}", ["low must be above 0"]),
        (f"keys: {{optim.lr: {{low: 0.1, hihg: 0.2}}}}\n{AIM}", ["no 'hihg'", "did you mean high?"]),
        (f"keys: {{optim.lr: {{low: a, high: 2}}}}\n{AIM}", ["must be numbers"]),
        (f"keys: {{optim.lr: 0.1}}\n{AIM}", ["neither a list nor a range"]),
        (f"keys: {{optim.lr: []}}\n{AIM}", ["the list is empty"]),
        (f"keys: {{optim.lr: [0.1, 0.2, 0.1]}}\n{AIM}", ["0.1 occurs twice"]),
        (f"keys: {{name: [2020-01-01]}}\n{AIM}", ["a date is not a value: put it in quotes"]),
        (f"keys: {{optim: [{{lr: 0.1}}], optim.lr: [0.1]}}\n{AIM}", ["optim.lr: overlaps with optim"]),
        (f"keys: {{batch.global: {{low: 16, high: 64, step: 0.5}}}}\n{AIM}", ["batch.global: 16.5"]),
        (
            f"sampler: grid\nkeys: {{optim.lr: {{low: 0.1, high: 0.2}}}}\n{AIM}",
            ["needs a list, or a range with a step"],
        ),
        (f"sampler: tpr\nkey: {{optim.lr: [1]}}\n{AIM}", ["'tpr' is not one of grid", "did you mean keys?"]),
        ("keys: {optim.lr: [0.1]}\nmetric: eval/accuracy", ["unknown whether a higher eval/accuracy is better"]),
        ("keys: {optim.lr: [0.1]}", ["metric: is missing"]),
        ("keys: {optim.lr: [0.1]}\nmetric: [eval/accuracy]", ["metric: ['eval/accuracy'] is not a name"]),
        (f"keys: {{seed: [0, 1], train.epochs: [3]}}\n{AIM}", ["train.epochs: the command line also sets it"]),
        (f"keys: {{train.eval_every_epochs: [1, 0]}}\n{AIM}", ["never evaluates"]),
        (f"keys: {{log.writers: [[text_log]]}}\n{AIM}", ["no metrics.jsonl"]),
    ],
)
def test_what_is_wrong_is_refused(tmp_path, text, faults):
    with pytest.raises(UsageError) as error:
        read(tmp_path, text, ["train.epochs=2"])
    for fault in faults:
        assert fault in str(error.value)


def test_keys_of_a_class_of_ones_own_are_checked_by_the_class(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lockstep import Task\n\n\nclass Mine(Task):\n    def __init__(self, width=8):\n        pass\n"
        + "".join(f"\n    def {name}(self, *_):\n        pass\n" for name in ("model", "train_data", "loss"))
    )
    text = "keys: {task.widht: [8]}\nmetric: eval/loss\ndirection: min"
    with pytest.raises(UsageError, match="widht"):
        read(tmp_path, text, ["train.eval_every_epochs=1", "train.epochs=1"], f"{tmp_path}/mine.py:Mine")
