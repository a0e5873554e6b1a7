"""The global random number generators of torch, NumPy and Python, and seeding them for samples only where samples draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

_ANY = torch.empty((), dtype=torch.int64)


class _Generator(NamedTuple):
    """One global generator. seed: takes 64 bits. draw: the next number, with at least 53 random bits."""

    seed: Callable[[int], object]
    draw: Callable[[], int | float]


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` does the same, 100 times slower


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)


GENERATORS = (
    _Generator(_seed_torch, lambda: int(_ANY.random_())),
    _Generator(_seed_numpy, lambda: float(np.random.random_sample())),
    _Generator(random.seed, lambda: random.getrandbits(64)),
)


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (on the CPU), NumPy and Python."""
    for generator in GENERATORS:
        generator.seed(seed)


def seed_forward(seed: int, device: torch.device) -> None:
    """Seed what a model or a loss may draw in one micro-batch, such as dropout, also on its device."""
    seed_all(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


class SampleSeeding:
    """Gives every sample random numbers of its own, and costs little where samples draw none.

    torch's generator is seeded for each sample. NumPy's and Python's, which take longer, are seeded once a sample was seen to
    draw from them: before a micro-batch is read, `begin` puts the generators that nobody has drawn from so far into a known
    state, and afterwards `found_more` tells whether some left it. Then the micro-batch is to be read again, and from then on
    `seed` seeds these generators too. So a sample that draws is always read under its own seed, and a sample that draws nothing
    is the same under any.

    Args:
        lazily: look for draws from torch's generator too, instead of seeding it: where samples are not read one by one.
    """

    def __init__(self, lazily: bool = False) -> None:
        self.drawn: tuple[_Generator, ...] = () if lazily else GENERATORS[:1]  # from these, samples draw
        self._others = tuple(one for one in GENERATORS if one not in self.drawn)
        self._seed: int | None = None
        self._first: tuple[int | float, ...] = ()  # what the others draw first after `_seed`

    def begin(self, seed: int) -> None:
        """Before a micro-batch is read. A seed that changes seldom, such as one of the epoch, costs less."""
        if seed != self._seed:
            self._seed = seed
            self._first = tuple((one.seed(seed), one.draw())[1] for one in self._others)
        for generator in self._others:
            generator.seed(seed)

    def seed(self, seed: int) -> None:
        """Before a sample is read: seed the generators that samples draw from."""
        for generator in self.drawn:
            generator.seed(seed)

    def found_more(self) -> bool:
        """After a micro-batch was read: whether samples drew from generators that were not known to be drawn from."""
        found = [one for one, number in zip(self._others, self._first, strict=True) if one.draw() != number]
        if found:
            self.drawn = tuple(one for one in GENERATORS if one in (GENERATORS[0], *self.drawn, *found))
            self._others = tuple(one for one in GENERATORS if one not in self.drawn)
            self._seed = None
        return bool(found)
