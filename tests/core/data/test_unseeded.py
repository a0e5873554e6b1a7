"""Errors about samples name the lines of the user's code that may be at fault."""

import os
import random
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from lockstep.core.data import unseeded


def entropy(index):
    return os.urandom(index)


def identity(index):
    return uuid.uuid4()


def clock(index):
    return time.time()


def new_generator(index):
    return np.random.default_rng().random()


def files(index):
    return os.listdir(".")[index]


def globbed(index):
    return [path.name for path in Path().glob("*.png")]


def labels(index):
    return {name: number for number, name in enumerate(set("ab"))}


def made_set(names):
    return list({name.lower() for name in names})


def hashed(text):
    return hash(text) % 10


def process(index):
    return os.environ["RANK"], os.getpid()


def harmless(index):
    return sorted([index, random.random(), np.random.rand()]) if index in {1, 2} else None


FOUND = {
    entropy: "`urandom` draws from the system",
    identity: "`uuid4` draws from the system",
    clock: "`time` depends on the time",
    new_generator: "`default_rng` makes a new generator, which is not seeded",
    files: "`listdir` gives files in an order that differs by machine: sort them",
    globbed: "`glob` gives files in an order",
    labels: "a set: the order of texts in it differs by process, unless PYTHONHASHSEED is set",
    made_set: "a set: the order",
    hashed: "`hash` differs by process for texts",
    process: "`environ` differs by rank",
}


@pytest.mark.parametrize("function", FOUND, ids=lambda function: function.__name__)
def test_the_line_and_the_cause_are_named(function):
    line = function.__code__.co_firstlineno + 1
    found = unseeded.causes(data=function)
    assert found.startswith("Look at ")
    assert f"test_unseeded.py:{line}, " in found
    assert FOUND[function] in found


def test_code_that_is_seeded_is_not_named():
    assert unseeded.causes(data=harmless) == ""


def test_a_generator_of_the_system_in_an_attribute_and_methods_of_the_class_are_named():
    class Data:
        def __init__(self):
            self.draw = random.SystemRandom().random

        def __getitem__(self, index):
            return self.draw() + clock(index)

    found = unseeded.causes(data=Data())
    assert "data.draw, which draws from the system" in found
    assert "`time` depends on the time" in found
    assert found.count("test_unseeded.py") == 2  # SystemRandom in __init__, and the clock


def test_three_causes_are_shown():
    found = unseeded.causes(data=list(FOUND))
    assert found.count("test_unseeded.py") == 3
    assert found.endswith("more")
