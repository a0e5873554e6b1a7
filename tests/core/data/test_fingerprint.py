"""A data set is told from another by its length and a few samples, and is itself in every process."""

import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from lockstep.core.data.fingerprint import fingerprint
from tests.ranks import run_ranks

Pair = namedtuple("Pair", "inputs target")


@dataclass
class Sample:
    inputs: object
    target: int


def image(value):
    return Image.fromarray(np.full((4, 5, 3), value, dtype=np.uint8))


MAKERS = {
    "tensor": lambda value: torch.tensor([1.5, float(value)]),
    "bfloat16": lambda value: torch.tensor([1.5, float(value)]).bfloat16(),
    "bool": lambda value: torch.tensor([True, bool(value % 2)]),
    "complex": lambda value: torch.tensor([1.5 + value * 1j]),
    "view": lambda value: torch.arange(12.0).reshape(3, 4).t()[1:] + value,
    "scalar tensor": lambda value: torch.tensor(value),
    "array": lambda value: np.array([[1, value]]),
    "array view": lambda value: (np.arange(12).reshape(3, 4) + value)[:, ::2],
    "numpy number": lambda value: np.float32(value),
    "text": lambda value: f"sample {value}",
    "bytes": lambda value: bytes([1, value]),
    "int": lambda value: value,
    "float": lambda value: 1 + value * 1e-15,
    "none": lambda value: None if value % 2 else 0,
    "dict": lambda value: {"image": torch.ones(2), "label": value},
    "dict key": lambda value: {f"label {value}": 1},
    "tuple": lambda value: (torch.ones(2), value),
    "named tuple": lambda value: Pair(torch.ones(2), value),
    "nested": lambda value: [{"boxes": [(1, 2), (3, value)]}],
    "dataclass": lambda value: Sample(torch.ones(2), value),
    "image": image,
    "image in dict": lambda value: {"image": image(value), "label": 3},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
@pytest.mark.parametrize("length", [1, 3, 4, 11])
def test_first_middle_and_last_sample_count(make, length):
    data = [make(1)] * length
    whole = fingerprint(data)
    assert whole == fingerprint([make(1) for _ in range(length)])
    assert whole["samples"] == length
    for at in {0, (length - 1) // 2, length - 1}:
        other = fingerprint([*data[:at], make(2), *data[at + 1 :]])
        assert other["samples"] == length
        assert other["digest"] != whole["digest"]


def test_last_of_two_counts():
    assert fingerprint([1, 1]) != fingerprint([1, 2])


def test_length_counts():
    digests = {fingerprint([7] * length)["digest"] for length in range(6)}
    assert len(digests) == 6
    assert fingerprint([])["samples"] == 0


def test_type_shape_and_dtype_count():
    zeros = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, dtype=torch.float32).numpy(),
        np.zeros((2, 2), dtype=np.float32),
        np.zeros(4, dtype=np.int32),
        [0, 0, 0, 0],
        (0, 0, 0, 0),
        0,
        0.0,
        False,
        "0",
        b"0",
        None,
        {},
        image(0),
        image(0).resize((4, 5)),
    ]
    assert len({fingerprint([zero])["digest"] for zero in zeros}) == len(zeros)


def test_only_three_samples_are_read():
    class Noting(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    read = []
    fingerprint(Noting(range(1001)))
    assert read == [0, 500, 1000]


def test_tensor_data_sets_are_told_apart():
    inputs = torch.randn(9, 4)
    assert fingerprint(TensorDataset(inputs, torch.zeros(9))) == fingerprint(
        TensorDataset(inputs.clone(), torch.zeros(9))
    )
    assert fingerprint(TensorDataset(inputs, torch.zeros(9))) != fingerprint(TensorDataset(inputs, torch.ones(9)))


class Drawing:
    """Draws as it reads, from whichever generator."""

    def __init__(self, draw, length=5):
        self.draw, self.length = draw, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, self.draw()


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(3), random.random, lambda: np.random.rand(2)], ids=["torch", "random", "numpy"]
)
def test_random_numbers_are_the_same_each_time(draw):
    first = fingerprint(Drawing(draw))
    draw()
    assert fingerprint(Drawing(draw)) == first
    assert fingerprint(Drawing(lambda: (draw(), draw()))) != first  # they are looked at


def test_global_generators_are_left_seeded():
    """Known: whoever calls it seeds torch afterwards, and needs no other."""
    random.seed(5)
    before = random.getstate()
    fingerprint([1, 2, 3])
    assert random.getstate() != before
    assert torch.initial_seed() == 2


def test_unreadable_sample_is_no_error_and_counts():
    class Broken(list):
        def __getitem__(self, index):
            if index in broken:
                raise OSError("truncated file")
            return super().__getitem__(index)

    found = {}
    for broken in ((), (0,), (2,), (4,), (0, 2, 4), (1, 3)):
        found[broken] = fingerprint(Broken([7] * 5))["digest"]
    assert found[1, 3] == found[()]  # not looked at
    assert len(set(found.values())) == 5


def test_it_is_the_same_in_another_process():
    data = [{"a": torch.arange(3), "b": ["text", {"x": 1, "y": (2.5, None, b"z")}], "c": np.ones(2)}] * 3
    assert run_ranks(1, fingerprint, data) == [fingerprint(data)]


def test_array_of_objects_is_the_same_when_made_again():
    def row():
        return np.array([f"text {1 + 1}", 1000 + len("x")], dtype=object)

    assert fingerprint([row()] * 3) == fingerprint([row()] * 3)


def test_content_of_other_types_counts():
    import datetime
    from pathlib import Path

    pairs = [
        (Path("a"), Path("b")),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        ({1}, {2}),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    ]
    assert [number for number, (one, other) in enumerate(pairs) if fingerprint([one]) == fingerprint([other])] == []
