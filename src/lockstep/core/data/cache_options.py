"""What the keys `data.cache`, `data.cache_gb` and `data.cache_size` ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheOptions:
    """Limits of a cache of decoded pictures."""

    limit_bytes: int | None = None
    """Largest size of the pixels on disk, for each data set. None: what the disk gives."""
    shorter_side: int | None = None
    """Larger pictures are reduced to this shorter side in pixels. None: pictures are kept as they are."""
