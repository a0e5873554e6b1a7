"""The global random number generators of torch, NumPy and Python, and how generators are seeded for each sample."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.core import devices

_SHOWN = 4
_ANY = torch.empty((), dtype=torch.int64)


class SeededGenerator(NamedTuple):
    """A generator that Lockstep seeds: a global one, or one of `private_generators`."""

    seed: Callable[[int], object]
    """Seeds it with 64 bits."""
    draw: Callable[[], int | float] | None
    """Returns its next number, of at least 53 random bits. None: it is seeded for each sample in any case."""
    place: str
    """Where it is, for messages."""
    generator: Any = None
    """One of `OWN_GENERATORS`. None: it is a global one, or nobody but its owner knows it."""

    @property
    def is_on_host(self) -> bool:
        """False: it belongs to a device, which loader workers must not use."""
        return not isinstance(self.generator, torch.Generator) or self.generator.device.type == "cpu"


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` does the same, 100 times slower


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)


def _seed_python(seed: int) -> None:
    random.seed(seed)


def _draw_torch() -> int:
    return int(_ANY.random_())


def _draw_numpy() -> float:
    return float(np.random.random_sample())


def _draw_python() -> int:
    return random.getrandbits(64)


# Named functions of modules: loader workers that are not forked get them by pickle.
GENERATORS = (
    SeededGenerator(_seed_torch, _draw_torch, "torch"),
    SeededGenerator(_seed_numpy, _draw_numpy, "numpy.random"),
    SeededGenerator(_seed_python, _draw_python, "random"),
)


def seed_all(seed: int, private: Iterable[SeededGenerator] = ()) -> None:
    """Seed the global generators of torch (on the CPU), NumPy and Python, and private ones."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    for generator in private:
        generator.seed(seed)


def seed_forward(seed: int, device: torch.device, private: Iterable[SeededGenerator] = ()) -> None:
    """Seed the generators that a forward pass may draw from, such as for dropout: of the CPU and of `device`.

    Args:
        private: generators of the task and the model, see `Forward.private`.
    """
    seed_all(seed, private)
    if device.type != "cpu":
        devices.of(device).seed(seed)


@contextlib.contextmanager
def restored_generators(device: torch.device) -> Generator[None, None, None]:
    """At the end, the global generators of torch (on the CPU and on `device`), NumPy and Python are as before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with devices.of(device).restored_generators():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


OWN_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
"""The classes of generators that code may make for itself."""


def own_generators(owners: Iterable[object]) -> list[Any]:
    """The generators that objects keep as attributes, each once. Those of the system have no state."""
    values = (value for owner in owners for value in list(getattr(owner, "__dict__", {}).values()))
    found = {id(value): value for value in values if isinstance(value, OWN_GENERATORS)}
    return [value for value in found.values() if not isinstance(value, random.SystemRandom)]


def state_of(generator: Any) -> Any:
    """The state of one of `OWN_GENERATORS`: a tensor, or what NumPy or Python return."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else _bits(generator).state


@contextlib.contextmanager
def restored_own_generators(owners: Iterable[object]) -> Generator[None, None, None]:
    """At the end, the generators that objects keep as attributes are as before."""
    with restored(own_generators(owners)):
        yield


@contextlib.contextmanager
def restored(generators: Iterable[Any]) -> Generator[None, None, None]:
    """At the end, these generators, all of them `OWN_GENERATORS`, are as before."""
    with contextlib.ExitStack() as undo:
        for generator in generators:
            undo.callback(partial(_set_state, generator, state_of(generator)))
        yield


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = state


def _bits(generator: np.random.Generator | np.random.BitGenerator) -> np.random.BitGenerator:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


class SampleSeeding:
    """Gives every sample its own random numbers, at little cost for samples that draw none.

    torch's generator and private ones are seeded for each sample: code may draw from a copy of one, as MONAI's
    `CacheDataset` does, which leaves no trace. The global generators of NumPy and Python are seeded only after a sample
    was seen to draw from them. Before a micro-batch is read, `begin` puts the generators from which no sample has drawn
    so far into a known state. Afterwards `found_more` says whether a generator left that state. If so, the caller reads
    the micro-batch again, and from then on `seed` seeds this generator too. So a sample that draws is always read under
    its own seed, and a sample that draws nothing is the same under any seed.

    Args:
        lazily: treat all global generators like these two. For data sets that read many samples at once.
        private: generators of the data and the task.
    """

    def __init__(self, lazily: bool = False, private: Iterable[SeededGenerator] = ()) -> None:
        self.private = tuple(private)
        self._all = (*GENERATORS, *self.private)
        self.drawn = (*(() if lazily else GENERATORS[:1]), *self.private)
        """Samples draw from these generators."""
        self._others = tuple(generator for generator in self._all if generator not in self.drawn)
        self._seed: int | None = None
        self._first: tuple[int | float | None, ...] = ()  # the first number of each of `_others` after `_seed`

    def notes(self) -> list[str]:
        """A line for the log on private generators that are seeded."""
        places = [generator.place for generator in self.private]
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        return (
            [f"random generators that are seeded for each sample: {', '.join(places[:_SHOWN])}{more}"] if places else []
        )

    def begin(self, seed: int) -> None:
        """Prepare for reading a micro-batch. A seed that rarely changes, such as one per epoch, costs less."""
        if seed != self._seed:
            self._seed = seed
            self._first = tuple((generator.seed(seed), _next(generator))[1] for generator in self._others)
        for generator in self._others:
            generator.seed(seed)

    def seed(self, seed: int) -> None:
        """Prepare for reading a sample: seed the generators that samples draw from."""
        for generator in self.drawn:
            generator.seed(seed)

    def seed_all(self, seed: int) -> None:
        """Seed all generators, whether or not samples draw from them."""
        seed_all(seed, self.private)

    def seeders(self) -> list[Callable[[int], object]]:
        """The functions that prepare for reading a sample, as `seed` does: for many samples."""
        # The method of torch's generator takes no frame of Python. It cannot be pickled, so it is not kept.
        quick: dict[object, Callable[[int], object]] = {_seed_torch: torch.default_generator.manual_seed}
        return [quick.get(generator.seed, generator.seed) for generator in self.drawn]

    def found_more(self) -> bool:
        """True if the samples drew from a generator for the first time: then read the micro-batch again."""
        pairs = zip(self._others, self._first, strict=True)
        newly_drawn = [generator for generator, first in pairs if _next(generator) != first]
        if newly_drawn:
            drawn = (GENERATORS[0], *self.drawn, *newly_drawn)
            self.drawn = tuple(generator for generator in self._all if generator in drawn)
            self._others = tuple(generator for generator in self._all if generator not in drawn)
            self._seed = None
        return bool(newly_drawn)


def _next(generator: SeededGenerator) -> int | float | None:
    assert generator.draw is not None
    return generator.draw()
