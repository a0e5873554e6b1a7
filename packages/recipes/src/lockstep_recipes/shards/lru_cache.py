"""LRU cache of blocks, limited in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class LruCache:
    """Thread-safe cache of values by key.

    Args:
        limit: bytes of all values together.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, load: Callable[[], tuple[Any, int]]) -> Any:
        """The value of a key. If it is not in the cache, `load` returns it with its size in bytes.

        Threads that need the same value at the same time may each load it: no thread waits for the network access of
        another.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value, size = load()
        with self._lock:
            if key not in self._values:
                self._values[key] = value, size
                self.bytes += size
                while self.bytes > self.limit and len(self._values) > 1:
                    self.bytes -= self._values.popitem(last=False)[1][1]
        return value
