"""What the keys `data.cache`, `data.cache_gb` and `data.cache_size` ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheOptions:
    """Limits of a cache of decoded images."""

    limit_bytes: int | None = None
    """Largest size of the pixels on disk, for each data set. None: what the disk gives."""
    shorter_side: int | None = None
    """Larger images are reduced to this shorter side in pixels. None: images are kept as they are."""
