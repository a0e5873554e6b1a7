"""How values are written for people."""

import math

import pytest

from lockstep.parts.ending import duration
from lockstep_lab.report.page import number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (3, "3"),
        (12345.0, "12,345"),
        (1234.56, "1,234.6"),
        (0.123456, "0.1235"),
        (1e-7, "1e-07"),
        (1e20, "1e+20"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ("text", "text"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_numbers(value, text):
    assert number_text(value) == text


def test_a_huge_whole_number_is_cut():
    assert len(number_text(10**400)) <= 40


@pytest.mark.parametrize(("seconds", "text"), [(0.5, "0.5 s"), (75, "1 min 15 s"), (3725, "1 h 02 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text
