"""Numbers for the script's objects, and what is known about each, as long as the object lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """What is known about objects, by identity. An object that dies is forgotten."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], T]] = {}
        self.puts = 0
        """How often something was remembered."""

    def get(self, thing: Any) -> T | None:
        """What is known about an object. None: nothing."""
        found = self._known.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def put(self, thing: Any, known: T) -> T:
        """Remember something about an object."""
        key = id(thing)
        self.puts += 1

        def forget(reference: weakref.ref[Any]) -> None:
            if key in self._known and self._known[key][0] is reference:
                del self._known[key]

        self._known[key] = (weakref.ref(thing, forget), known)
        return known

    def get_or_put(self, thing: Any, make: Callable[[], T]) -> T:
        """What is known about an object, created at the first call."""
        found = self.get(thing)
        return self.put(thing, make()) if found is None else found

    def items(self) -> Iterator[tuple[Any, T]]:
        """The live objects, and what is known about each."""
        for reference, known in list(self._known.values()):
            thing = reference()
            if thing is not None:
                yield thing, known


class Numbers:
    """Numbers objects in order of appearance."""

    def __init__(self) -> None:
        self._known: Registry[int] = Registry()
        self._next = 0

    def of(self, thing: Any) -> int:
        """The number of an object."""
        return self._known.get_or_put(thing, self._new)

    def _new(self) -> int:
        self._next += 1
        return self._next - 1
