"""Can the CPUs load samples as fast as the GPUs train? Measured on a few samples of the data, on this machine."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

from lockstep.core.errors import DataError
from lockstep_lab.plan.estimate import Estimate
from lockstep_lab.plan.inputs import Decoding, Reading

_SAMPLES = 8


def decoding_of(data: Any) -> Decoding | None:
    """The measurement for a data set of images that have no cache. None: it is another data set."""
    decoded = getattr(data, "decoded", None)
    if not callable(decoded) or getattr(data, "cache", None) is not None or not len(data):
        return None
    sizes, seconds = list[int](), 0.0
    for number in range(_SAMPLES):
        begun = time.process_time()
        with contextlib.suppress(DataError):  # a training decides what a damaged image means
            sizes.append(decoded(number * len(data) // _SAMPLES).nbytes)
            seconds += time.process_time() - begun
    return Decoding(seconds / len(sizes), sum(sizes) / len(sizes)) if sizes else None


def lines(reading: Reading | None, found: Estimate) -> list[str]:
    """What loading needs in the time of a step, if that is more than a core for each GPU."""
    gpus = found.setting.world.gpus
    if reading is None or not found.step_seconds or reading.seconds <= 0:
        return []
    wished = found.effective_batch / found.step_seconds
    cores = wished * reading.seconds
    if cores <= gpus:
        return []
    made = [
        f"loading: {wished:,.0f} samples/s are needed, and a core of this machine loads {1 / reading.seconds:,.0f}/s: "
        f"{math.ceil(cores)} cores keep up, {math.ceil(cores / gpus)} for each GPU (data.workers)"
    ]
    if reading.decoding is not None:
        rest = max(reading.seconds - reading.decoding.seconds, 0.1 * reading.seconds)
        gigabytes = (found.samples_per_epoch or 0) * reading.decoding.bytes / 1e9
        made.append(
            f"  with data.cache=decoded, {math.ceil(wished * rest)} cores from the second epoch on, and "
            f"{gigabytes:,.3g} GB on the disk of each machine (data.cache_gb; data.cache_size=N keeps smaller images)"
        )
    return made
