"""The place of a shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ShardLocation:
    """A shard, as it was found."""

    url: str
    """A local path, or an address with a scheme, such as `s3://`."""
    size: int
    """Bytes."""
    tag: str = ""
    """Changes with the content: the modification time, or the server's ETag. Empty: unknown."""
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What an index records about the shard, if its format needs it."""


def scheme(url: str) -> str:
    """The part of an address before `://`. Empty: a local path."""
    return url.partition("://")[0] if "://" in url else ""
