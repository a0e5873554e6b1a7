"""Predictions as arrays: by name, samples along the first dimension, or a refusal that says what does not fit."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.core.errors import UsageError
from lockstep.trainer import predictions


@dataclasses.dataclass
class Found:
    score: torch.Tensor


def row(number):
    """As `predict` makes them, with everything that a task may return."""
    value = torch.tensor([number, 0.5])
    return {
        "sample": number,
        "input": f"file-{number}.png",
        "file": 10 * number,
        "truth": None,
        "output": {
            "logits": value,
            "half": value.bfloat16(),
            "pair": (value.long(), np.array([[number]])),
            "list": [1.5, number],
            "found": Found(value),
            "deep": [{"x": number > 1}],
            "sparse": value.to_sparse(),
        },
    }


EXPECTED = {
    "sample": [0, 1, 2],
    "file": [0, 10, 20],
    "output/logits": [[0, 0.5], [1, 0.5], [2, 0.5]],
    "output/half": [[0, 0.5], [1, 0.5], [2, 0.5]],
    "output/pair/0": [[0, 0], [1, 0], [2, 0]],
    "output/pair/1": [[[0]], [[1]], [[2]]],
    "output/list": [[1.5, 0], [1.5, 1], [1.5, 2]],
    "output/found/score": [[0, 0.5], [1, 0.5], [2, 0.5]],
    "output/deep/0/x": [False, False, True],
    "output/sparse": [[0, 0.5], [1, 0.5], [2, 0.5]],
}


def test_npz_holds_every_value_by_name(tmp_path):
    assert predictions.write(tmp_path / "out.npz", [row(number) for number in range(3)]) == ["truth"]
    with np.load(tmp_path / "out.npz", allow_pickle=False) as found:
        values = dict(found)
    assert values.pop("input").tolist() == ["file-0.png", "file-1.png", "file-2.png"]
    assert {name: value.tolist() for name, value in values.items()} == EXPECTED
    assert (values["output/logits"].dtype, values["output/half"].dtype, values["output/pair/0"].dtype) == (
        np.float32,
        np.float32,
        np.int64,
    )


def test_safetensors_hold_every_number_by_name_in_its_own_format(tmp_path):
    assert predictions.write(tmp_path / "out.safetensors", [row(number) for number in range(3)]) == ["truth", "input"]
    values = load_file(tmp_path / "out.safetensors")
    assert {name: value.tolist() for name, value in values.items()} == EXPECTED
    assert (values["output/logits"].dtype, values["output/half"].dtype, values["output/pair/0"].dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.int64,
    )


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            [torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 3)],
            "output has several shapes: (2, 3), (4, 3)",
        ),
        ([[1, 2], [1], [1, 2]], "output has several shapes: (2,), (1,)"),
        ([[[1], [1, 2]]] * 3, "output holds lists of several lengths"),
        ([1, None, 2], "output is missing in prediction 1"),
        ([{"a": 1}, {"b": 1}, {"a": 1}], "output/a is missing in prediction 1"),
        ([1, "one", 1], "output is neither a number nor a text"),
        ([object()] * 3, "output is neither a number nor a text"),
    ],
    ids=["ragged", "ragged-lists", "ragged-inside", "missing", "other-names", "mixed", "object"],
)
def test_what_is_no_array_is_refused_by_name_and_leaves_the_old_file(tmp_path, suffix, values, named):
    path = tmp_path / f"out{suffix}"
    path.write_text("old")
    with pytest.raises(UsageError) as caught:
        predictions.write(path, [{"sample": number, "output": value} for number, value in enumerate(values)])
    assert named in caught.value.what
    assert caught.value.where == f"--out {path}"
    assert ".jsonl" in caught.value.remedy
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_csv_has_whole_lists_and_text_is_as_whole(tmp_path):
    long = torch.arange(2000)
    predictions.write(tmp_path / "out.csv", [{"output": {"a": long, "b": torch.tensor(2.5), "c": float("nan")}}])
    assert (tmp_path / "out.csv").read_text() == f'output/a,output/b,output/c\n"{list(range(2000))}",2.5,nan\n'
    assert predictions.text({"output": torch.tensor([1.5, float("inf")]).bfloat16()}) == '{"output": [1.5, null]}'


def test_value_that_no_file_can_hold_is_refused(tmp_path):
    for suffix in (".csv", ".jsonl"):
        with pytest.raises(UsageError, match=r"Presenter\.describe: a value of type object cannot be written"):
            predictions.write(tmp_path / f"out{suffix}", [{"output": [object()]}])
