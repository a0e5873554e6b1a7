"""The random generators that data sets, tasks and models hold, or that their code names: found once, then seeded."""

from __future__ import annotations

import dis
import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from lockstep.core.code_files import is_own_code
from lockstep.core.data import dataset, reachable
from lockstep.core.data.randomness import OWN_GENERATORS, SeededGenerator

_OBJECTS = 20_000
"""The most objects that are examined in a data set, a task or a model."""
_ITEMS = 200
"""The most items of a container that are examined."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), ModuleType, np.ndarray)
_LEAVES = frozenset((*_PLAIN, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size))
_OF_MODULES = frozenset(f".{name}" for name in vars(torch.nn.Module()) if name != "_modules")
_MAKERS = frozenset(["__init__", "train_data", "eval_data", "model"])
"""Functions that make the data and the model, and that no sample calls. Their generators may split the data."""
_ORDER = frozenset([".order"])
"""It chooses the samples of an epoch; see `OptionalMembers`."""
_SETTERS = ("set_random_seed", "set_random_state")
"""Methods that seed an object: of albumentations and of MONAI."""
_MULTIPLIER = 0x9E3779B97F4A7C15F39CC0605CEDC835


def find(**owners: object) -> list[SeededGenerator]:
    """The generators of objects, each once.

    They are in attributes, containers, closures, bound methods, classes, and global variables that the user's own
    functions name. Generators of samplers, orders and streams are left out, as are the global generators.

    Args:
        owners: by their names in messages. The first that has a generator gives it a name.
    """
    found: dict[str, SeededGenerator] = {}
    seen = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}
    for name, owner in owners.items():
        for place, value in walk(owner, name, seen, enters_streams=name == "data"):
            if isinstance(value, OWN_GENERATORS) or _seeds_itself(value):
                text = reachable.text_of(place)
                text = f"{text} ({len(found)})" if text in found else text
                if not isinstance(value, random.SystemRandom):  # nothing can seed it
                    found[text] = _seeded(text, value)
    return list(found.values())


def on_host(**owners: object) -> list[SeededGenerator]:
    """Those that loader workers may use; see `find`."""
    return [generator for generator in find(**owners) if generator.is_on_host]


def walk(
    owner: object, name: str, seen: set[int], *, enters_streams: bool = True
) -> Iterator[tuple[reachable.Place, Any]]:
    """The objects that can be reached from an object, also through code; see `reachable.walk`.

    Args:
        enters_streams: whether an `IterableDataset` is entered: data sets with samples by index may hold one, and a
            task keeps the source of a stream, which belongs to no sample.
    """

    def parts(value: Any) -> Iterator[tuple[str, Any]]:
        is_left = isinstance(value, OWN_GENERATORS) or (not enters_streams and _is_iterable_data(value))
        if not is_left:
            yield from ((place, item) for place, item in _parts(value) if type(item) not in _LEAVES)

    return reachable.walk(owner, name, parts, seen, _OBJECTS)


def _is_iterable_data(value: Any) -> bool:
    return any(one.__name__ == "IterableDataset" for one in type(value).__mro__)  # torch's, or that of datasets


def kept_for(function: Any) -> str | None:
    """A generator that a function or a method uses, and that its object keeps, such as `Texts.rng`.

    The object is that of the method, or one in the closure of the function.
    """
    function = getattr(function, "func", function)
    code = getattr(function, "__func__", function)
    cells = reachable.closure(code) if isinstance(code, FunctionType) else ()
    for owner in (getattr(function, "__self__", None), *(item for _, item in cells)):
        held = {} if isinstance(owner, type) else getattr(owner, "__dict__", {})
        for name in sorted(_named(code, type(owner)) & held.keys()):
            if found := find(**{f"{type(owner).__name__}.{name}": held[name]}):
                return found[0].place
    return None


def _named(function: Any, kind: type) -> set[str]:
    """The names in the code of a function, and in that of the methods of a class that it names or calls."""
    names, calls = set[str](), [vars(cls)["__call__"] for cls in kind.__mro__ if "__call__" in vars(cls)]
    left = [function, *calls]
    while left:
        code = getattr(left.pop(), "__code__", None)
        new = {name for one in (codes_of(code) if code else ()) for name in one.co_names} - names
        left += [vars(cls)[name] for cls in kind.__mro__ for name in new & vars(cls).keys()]
        names |= new
    return names


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and where."""
    if dataset.forward(type(value)):  # its generators shuffle a pass, and do not belong to a sample
        return
    if isinstance(value, dict):
        named = reachable.items(value, _ITEMS)
        yield from ((f"[{key!r}]" if isinstance(key, str) else "[]", item) for key, item in named)
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", item) for number, item in enumerate(islice(value, _ITEMS)))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield from (("", getattr(value, name, None)) for name in ("__self__", "__func__"))
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, staticmethod | classmethod | property | partial):
        held = ("__func__", "fget", "func", "args", "keywords")
        yield from (("", getattr(value, name)) for name in held if hasattr(value, name))
    elif isinstance(value, type):
        is_own = _is_own(value)
        kinds = OWN_GENERATORS if not is_own else object
        yield from ((f".{name}", item) for name, item in list(vars(value).items()) if isinstance(item, kinds))
    elif isinstance(value, DataLoader):
        yield from ((f".{name}", getattr(value, name)) for name in ("dataset", "collate_fn"))
    elif not isinstance(value, Sampler | ModuleType):
        yield from _parts_of_object(value)


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    left_out = _OF_MODULES if isinstance(value, torch.nn.Module) else _ORDER
    yield from ((place, item) for place, item in reachable.attributes(value) if place not in left_out)
    yield from ((f":{cls.__name__}", cls) for cls in type(value).__mro__)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    yield from (("", item) for _, item in reachable.closure(function))
    yield from (("", held) for held in (function.__defaults__, function.__kwdefaults__, vars(function)) if held)
    if function.__name__ in _MAKERS or not is_own_code(function.__code__.co_filename):
        return
    variables = function.__globals__
    for code in codes_of(function.__code__):
        if variables.keys().isdisjoint(code.co_names):
            continue
        for name in sorted(
            {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"} & variables.keys()
        ):
            item = variables[name]
            if not isinstance(item, ModuleType):
                yield f":{name}", item
            elif is_own_code(getattr(item, "__file__", None) or "<frozen >"):
                yield from ((f":{name}.{one}", vars(item)[one]) for one in code.co_names if one in vars(item))


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions within."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_of(inner)


def _is_own(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or "<string>"  # of a notebook
    return cls.__module__ not in sys.builtin_module_names and is_own_code(file)


def _seeds_itself(value: Any) -> bool:
    """True if an object can be seeded, and holds no generator that could be seeded in less time."""
    if isinstance(value, type) or not any(callable(getattr(type(value), name, None)) for name in _SETTERS):
        return False
    return not any(isinstance(item, OWN_GENERATORS) for _, item in walk(value, "", set()))


def _seeded(place: str, value: Any) -> SeededGenerator:
    """A generator, or an object that seeds its own."""
    salt = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "big")  # no two draw the same numbers
    if not isinstance(value, OWN_GENERATORS):
        return SeededGenerator(partial(_by_method, value, salt), None, place)
    bits: Any = value if isinstance(value, np.random.BitGenerator) else getattr(value, "_bit_generator", None)
    bits = value.bit_generator if isinstance(value, np.random.Generator) else bits
    if isinstance(value, random.Random):
        seed: Callable[[int], None] = partial(_seed_python, value, salt)
    elif isinstance(value, torch.Generator):
        seed = partial(_seed_torch, value, salt)
    elif isinstance(value, np.random.RandomState) and type(bits) is np.random.MT19937:
        seed = partial(_seed_legacy, value, salt)
    else:
        seed = partial(_seed_bits, bits, salt)
    return SeededGenerator(seed, None, place, value)


def _seed_python(generator: random.Random, salt: int, seed: int) -> None:
    generator.seed(seed ^ salt)


def _seed_torch(generator: torch.Generator, salt: int, seed: int) -> None:
    generator.manual_seed(seed ^ salt)


def _seed_legacy(generator: np.random.RandomState, salt: int, seed: int) -> None:
    generator.seed((seed ^ salt) & 0xFFFFFFFF)


def _seed_bits(bits: Any, salt: int, seed: int) -> None:
    """A generator of NumPy. For PCG64, the usual one, this takes a sixth of the time of making another."""
    if type(bits) is np.random.PCG64:
        state: Any = {"state": (seed ^ salt) * _MULTIPLIER % (1 << 128), "inc": salt << 1 | 1}
        bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
    else:
        bits.state = type(bits)(seed ^ salt).state


def _by_method(value: Any, salt: int, seed: int) -> None:
    setter = next(getattr(value, name) for name in _SETTERS if hasattr(value, name))
    setter(seed=(seed ^ salt) & 0xFFFFFFFF)
