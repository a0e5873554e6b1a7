"""Whatever a task returns comes out whole as JSON, or is refused by its type."""

import collections
import dataclasses
import datetime
import enum
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.parts.plain import dumps, plain

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=20)
Pair = collections.namedtuple("Pair", "a b")


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Boxes:
    corners: torch.Tensor
    names: list


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        ("text", "text"),
        (0.5, 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([True]), [True]),
        (torch.tensor([0.1], dtype=torch.float64), [0.1]),
        (torch.tensor([0.5, -3.0], dtype=torch.bfloat16), [0.5, -3.0]),
        (torch.tensor([0.5], dtype=torch.float16), [0.5]),
        (torch.tensor([0.5]).to(torch.float8_e4m3fn), [0.5]),
        (torch.tensor([1 + 2j]), [[1.0, 2.0]]),
        (torch.tensor([1 + 2j]).conj(), [[1.0, -2.0]]),
        (torch.ones(2, requires_grad=True) * 2, [2.0, 2.0]),
        (torch.tensor([0.0, 7.0]).to_sparse(), [0.0, 7.0]),
        (torch.zeros(0, 3), []),
        (np.arange(3), [0, 1, 2]),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array("x"), "x"),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (Path("a/b"), "a/b"),
        (Colour.RED, "red"),
        ({"a": torch.tensor([1]), 2: (None, [np.int8(1)])}, {"a": [1], "2": [None, [1]]}),
        (Pair(torch.tensor(1), 2), [1, 2]),
        ({3}, [3]),
        (Boxes(torch.zeros(1, 2), ["x"]), {"corners": [[0.0, 0.0]], "names": ["x"]}),
        (collections.OrderedDict(a=torch.tensor([1.0])), {"a": [1.0]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_become_what_json_knows(value, expected):
    assert plain(value) == expected
    assert json.loads(dumps({"value": value})) == {"value": expected}


def test_output_of_a_hugging_face_model_is_a_mapping_of_what_it_holds():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    assert plain(outputs.SequenceClassifierOutput(logits=torch.tensor([[1.0]]))) == {"logits": [[1.0]]}


def test_nothing_is_left_out_of_a_large_tensor():
    assert plain(torch.arange(100_000)) == list(range(100_000))


@pytest.mark.parametrize("value", [object(), [b"x"], {"a": (1, lambda: 1)}], ids=["object", "bytes", "function"])
def test_what_json_does_not_know_is_refused_by_its_type(value):
    with pytest.raises(TypeError, match=r"object|bytes|function"):
        plain(value)


def no_constant(text):
    raise AssertionError(f"{text} is not JSON")


@FIXED
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_numbers_that_are_not_finite_are_null_and_all_else_is_kept(value):
    def expected(value):
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {key: expected(item) for key, item in value.items()}
        return [expected(item) for item in value] if isinstance(value, list) else value

    assert json.loads(dumps(value), parse_constant=no_constant) == expected(value)
