"""Samples of every kind: data sets, the shapes of what they hold, and the random numbers that they draw."""

from __future__ import annotations

import random
import zlib
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep.core.errors import DataError
from tests.fuzz_case import Case, Draws

FEATURES = 4  # the last one is the sample's index / 100: whoever has a sample knows which it is
MOST_SAMPLES = 128


# ---- random numbers


def numbers(source: str, gauss: bool) -> float:
    """One random number, or the sum of one of each of the three generators."""
    drawn = {
        "torch": lambda: float(torch.randn(()) if gauss else torch.rand(())),
        "numpy": lambda: float(np.random.normal() if gauss else np.random.rand()),
        "random": lambda: random.gauss(0, 1) if gauss else random.random(),
    }
    return sum(one() for one in drawn.values()) if source == "all" else drawn[source]()


def seed_all(seed: int) -> None:
    """All three generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def drawn_for(draws: Draws | None, where: str, index: int) -> float:
    """What sample `index` draws in `data` or in `prepare`; 0 without drawing where it draws nothing there."""
    if draws is None or draws.where not in (where, "both") or (draws.when == "rarely" and index % 5 != 2):
        return 0.0
    if draws.how == "forked":
        with torch.random.fork_rng(devices=[]):
            return 0.1 * float(torch.rand(()))
    if draws.how == "derived":
        return 0.1 * float(np.random.default_rng(torch.initial_seed() & 0xFFFFFFFF).random())
    return 0.1 * numbers(draws.source, draws.gauss)


# ---- shapes of samples and batches

Triple = namedtuple("Triple", ["x", "y", "valid"])


@dataclass
class Record:
    x: Any
    y: Any
    valid: Any


def pack(shape: str, x: Any, y: Any, valid: Any) -> Any:
    """Inputs, targets and which targets are valid, of a sample or a batch."""
    if shape == "dict":
        return {"x": x, "y": y, "valid": valid}
    if shape == "nested":
        return {"in": {"x": x, "name": "some text"}, "out": [y, (valid, 7)]}
    kinds = {
        "tuple": lambda *parts: parts,
        "list": lambda *parts: list(parts),
        "namedtuple": Triple,
        "dataclass": Record,
    }
    return kinds[shape](x, y, valid)


def unpack(packed: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and which targets are valid."""
    if isinstance(packed, dict):
        return (packed["in"]["x"], packed["out"][0], packed["out"][1][0]) if "in" in packed else tuple(packed.values())
    if isinstance(packed, Record | Triple):
        return packed.x, packed.y, packed.valid
    return tuple(packed)


# ---- data sets


def tensors_of(case: Case, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets, and weights of targets (0: the target is not valid). Each has one column for each head.

    A longer set begins with the samples of a shorter set.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(MOST_SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(MOST_SAMPLES, 4, generator=generator, dtype=torch.float64)
    chance = torch.rand(MOST_SAMPLES, 4, generator=generator, dtype=torch.float64)
    x[:, -1] = torch.arange(MOST_SAMPLES) / 100
    columns = []
    for number, head in enumerate(case.all_heads):
        valid = (chance[:, number] < head.density).double()
        columns.append(valid * (0.25 + chance[:, number]) if head.units == "fractions" else valid)
    heads = len(columns)
    return x[:length].clone(), y[:length, :heads].clone(), torch.stack(columns, 1)[:length].clone()


class Map(Dataset[Any]):
    """Map-style: reads, draws, and fails where it cannot be read."""

    def __init__(self, case: Case, tensors: tuple[torch.Tensor, ...]) -> None:
        self.case, self.tensors = case, tensors
        if case.lengths is not None:
            lengths = [index * 7 % 5 + 1 for index in range(len(tensors[0]))]
            self.lengths = lengths if case.lengths == "list" else np.asarray(lengths, dtype=case.lengths)
        if case.where:
            self.where = lambda index: f"folder/{index}.png"

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        if not 0 <= index < len(self):
            raise IndexError(index)
        case = self.case
        if case.draws is not None and case.draws.reseeds:
            seed_all(index)
        noise = drawn_for(case.draws, "data", index)
        x, y, valid = (tensor[index] for tensor in self.tensors)
        x = x + noise * (torch.arange(FEATURES) < FEATURES - 1)
        if case.broken_in == "data":
            fail(case, index)
        parts = (part.numpy() for part in (x, y, valid)) if case.leaf == "numpy" else (x, y, valid)
        return pack(case.shape, *parts)


class Items(Map):
    """As DataLoader reads several samples at once, where a data set can."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Duck:
    """A map-style data set that is no torch `Dataset`."""

    def __init__(self, inner: Map) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Scaled(TensorDataset):
    """A `TensorDataset` whose samples are not its tensors' rows."""

    def __getitem__(self, index: int) -> Any:
        x, *others = super().__getitem__(index)
        return (x * torch.tensor([1.5, 1.5, 1.5, 1.0], dtype=torch.float64), *others)


def fail(case: Case, index: int) -> None:
    """Raise, where sample `index` cannot be read."""
    if index in case.broken:
        raise (
            OSError("truncated"),
            ValueError("no image"),
            EOFError("short"),
            DataError("bad label"),
            zlib.error("damaged"),
        )[index % 5]


def data_set(case: Case, length: int, seed: int) -> Any:
    """The data set of the case's kind, with `length` samples."""
    tensors = tensors_of(case, length, seed)
    more = tensors_of(case, length + 5, seed)
    makers = {
        "tensors": lambda: TensorDataset(*tensors),
        "scaled": lambda: Scaled(*tensors),
        "list": lambda: [pack(case.shape, *row) for row in zip(*tensors, strict=True)],
        "map": lambda: Map(case, tensors),
        "items": lambda: Items(case, tensors),
        "duck": lambda: Duck(Map(case, tensors)),
        "subset": lambda: Subset(Map(case, more), range(length)),
        "subset of tensors": lambda: Subset(TensorDataset(*more), list(range(length))),
        "concatenated": lambda: ConcatDataset(
            [Subset(Items(case, tensors), range(length // 2)), Subset(Items(case, tensors), range(length // 2, length))]
        ),
    }
    return makers[case.data]()
