"""Nested values of `get_extra_state` come back from JSON as they were, and equal values have equal texts."""

import collections
import http
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.core.checkpoint.nested import NotSavedError, decode, encode


def through_json(value):
    return decode(json.loads(json.dumps(encode(value))), torch.device("cpu"))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": {1: [0.1, None, True, "text"], (2, "b"): (1, 2)}, "nested": [], "float": {"tensor": 3}},
        [math.inf, -math.inf, math.nan, -0.0, 10**30],
        math.nan,
        b"\0\xff",
        {3, 1, 2},
        collections.OrderedDict(b=1, a=2),
        {"t": [torch.arange(6).reshape(2, 3), torch.tensor(0.5), torch.empty(0, 4), torch.tensor([True, False])]},
        [
            torch.randn(2, 3).t(),
            torch.ones(2, dtype=torch.bfloat16),
            torch.tensor([1 + 2j]),
            nn.Parameter(torch.ones(1)).data,
        ],
    ],
)
def test_values_come_back(value):
    assert same(value, through_json(value))


def test_equal_values_have_the_same_text():
    first = {"a": "same", "b": {"a": {"x", "y", "z"}}, "t": torch.ones(2)}
    second = {"a": "".join(["sa", "me"]), "b": {"a": {"z", "y", "x"}}, "t": torch.ones(3)[:2]}
    assert json.dumps(encode(first)) == json.dumps(encode(second))


class Color(collections.namedtuple("Color", "red")):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [object()]}, r"\['a'\]\[0\] is a builtins\.object"),
        (np.ones(2), "it is a numpy.ndarray"),
        ([Color(1)], r"\[0\] is a .*Color"),
        ({"a": torch.eye(2).to_sparse()}, "torch.Tensor"),
        ({"a": torch.empty(2, device="meta")}, "has no values"),
    ],
)
def test_what_cannot_be_saved_is_named(value, words):
    with pytest.raises(NotSavedError, match=words):
        encode(value)


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(NotSavedError, match="contains itself"):
        encode(value)


@pytest.mark.parametrize("value", [np.float64(0.5), http.HTTPStatus.OK, [np.float64(0.5)], {"a": http.HTTPStatus.OK}])
def test_a_subclass_that_would_come_back_as_another_type_is_refused(value):
    with pytest.raises(NotSavedError):
        encode(value)
