"""The largest micro-batch that fits into memory, and the speed of each size. Each size runs in its own processes.

On a GPU, a size fits if its steps run. On a CPU, a process that uses too much memory is killed without an error, so the
measured peak is compared with a limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core import shortages
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import TrainingError, UsageError

_SHORTAGES = ("out of memory", "can't allocate memory", "killed by SIGKILL")
_SMALLEST_SHARE = 64  # the first size is a power of two of at least 1 / 64 of the largest
_PRECISE = 8  # between two powers of two, the size is found to within 1 / 8
_MARGIN = 0.9  # of the largest size that ran on a GPU: other batches may have longer samples
_FASTER = 1.03  # smaller differences may be noise


@dataclass(frozen=True)
class BatchSizeResult:
    """A micro-batch of `size` samples."""

    size: int
    fits: bool
    samples_per_s: float = 0.0
    """Of all ranks. 0: not measured."""
    peak_bytes: int = 0
    """Of the rank that needs the most. 0: not measured."""


def search(
    attempt: Callable[[int], BatchSizeResult], most: int, tell: Callable[[BatchSizeResult], None] = lambda _: None
) -> list[BatchSizeResult]:
    """Try powers of two up to `most`, then sizes between the largest that fits and the smallest that does not.

    Returns:
        what was tried, by size.
    """
    done: dict[int, BatchSizeResult] = {}

    def fits(size: int) -> bool:
        done[size] = attempt(size)
        tell(done[size])
        return done[size].fits

    # BatchNorm cannot train on a single sample, so that size is tried last.
    size = min(most, max(2, 1 << max(0, (most // _SMALLEST_SHARE).bit_length() - 1)))
    while not fits(size) and size > 1:
        size //= 2
    if not done[size].fits:
        return [done[size]]
    low, high = size, next((one for one in sorted(done) if not done[one].fits), most + 1)
    while high > most and low < most:
        size = min(2 * low, most)
        low, high = (size, high) if fits(size) else (low, size)
    while high <= most and high - low > max(1, low // _PRECISE):
        size = (low + high) // 2
        low, high = (size, high) if fits(size) else (low, size)
    return [done[size] for size in sorted(done)]


def check(config: RunConfig, memory: int | None, *, on_gpu: bool) -> None:
    """Check that it is possible to decide whether a size fits.

    Raises:
        UsageError: it is not possible.
    """
    if memory is None and not on_gpu:
        raise UsageError(
            "on a CPU, a training with too little memory is killed without warning",
            where="lockstep tune batch",
            remedy="set the memory that a rank may use, such as --memory 4GB",
        )
    if isinstance(config.batch.micro, dict):
        what, remedy = "has sizes for several epochs", "give the sizes of one epoch: batch.micro=null"
        raise UsageError(what, where="batch.micro", remedy=remedy)


def attempt_of(
    target: str, overrides: Sequence[str], *, ranks: int, given: int, memory: int | None
) -> Callable[[int], BatchSizeResult]:
    """A function that tries a size: it trains a few steps with `lockstep plan --measure` in separate processes.

    Args:
        given: the global batch of the config, in samples. A larger micro-batch has a larger global batch.
        memory: bytes that a rank may use. None: no limit.
    """

    def attempt(size: int) -> BatchSizeResult:
        samples = max(given, size * ranks)
        keys = [*overrides, *keys_of(size, samples)]
        with shortages.temporary_folder("lockstep-tune-") as folder:
            file = folder / "measured.json"
            command = [sys.executable, "-m", "lockstep", "plan", target, *keys, "--measure"]
            done = subprocess.run(
                [*command, "--nproc", str(ranks), "--json", str(file)], capture_output=True, text=True, errors="replace"
            )
            return _judged(size, samples, done, file, memory)

    return attempt


def keys_of(size: int, samples: int) -> list[str]:
    """The keys of a micro-batch of `size` of `samples` in the global batch."""
    return ["batch.per_rank=null", "batch.accumulate=null", f"batch.global={samples}", f"batch.micro={size}"]


def _judged(
    size: int, samples: int, done: subprocess.CompletedProcess[str], file: Path, memory: int | None
) -> BatchSizeResult:
    """The result of an attempt.

    Raises:
        TrainingError: it failed for a reason other than memory.
    """
    if done.returncode in (-9, 137) or (done.returncode and any(text in done.stderr for text in _SHORTAGES)):
        return BatchSizeResult(size, fits=False)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise TrainingError(f"the steps with micro-batches of {size} failed:\n{last}", where="lockstep tune batch")
    measured = json.loads(file.read_text())["measured"]
    peak = int(measured["peak_bytes"])
    return BatchSizeResult(
        size,
        fits=memory is None or peak <= memory,
        samples_per_s=samples / measured["step_seconds"],
        peak_bytes=peak,
    )


def text(
    tried: Sequence[BatchSizeResult], most: int, *, given: int, ranks: int, memory: int | None, by_rank: bool = False
) -> str:
    """The largest size with the keys to set, and whether a smaller size is as fast.

    Args:
        given: the global batch of the config, in samples.
        by_rank: the config sets `batch.per_rank`, which excludes `batch.micro`.
    """
    fitting = [one for one in tried if one.fits]
    if not fitting:
        remedy = "parallel.strategy=fsdp with more ranks, compute.activation_checkpointing=true or precision=bf16"
        return f"not even a micro-batch of 1 sample fits: use {remedy}"
    largest = fitting[-1]
    best, lines = largest.size, [f"the largest micro-batch that fits: {largest.size}"]
    if largest.size >= most:
        is_share = largest.size == -(-given // ranks)
        lines[0] += ", the rank's whole share of the global batch" if is_share else ", the limit of --most"
    elif memory is None:
        best = max(1, int(largest.size * _MARGIN))
        lines.append(f"with a margin, because other batches may have larger samples: {best}")
    quick = max(one.samples_per_s for one in fitting)
    least = next(one for one in fitting if one.samples_per_s * _FASTER >= quick)
    if least.size < best:
        lines.append(
            f"larger is not faster: {least.size} has {least.samples_per_s:,.0f} samples/s, "
            f"{largest.size} has {largest.samples_per_s:,.0f}"
        )
    keys = keys_of(best, max(given, best * ranks))[0 if by_rank else 2 if best * ranks > given else 3 :]
    if best * ranks > given:
        lines.append(
            f"a global batch of {best * ranks} instead of {given} is a different training with its own learning rate; "
            "find it with lockstep tune lr"
        )
    return "\n".join([*lines, f"keys: {' '.join(keys)}"])


def row(tried: BatchSizeResult) -> str:
    """A line on an attempt."""
    if not tried.samples_per_s:
        return f"{tried.size:>8}  out of memory"
    verdict = "" if tried.fits else "  above --memory"
    return f"{tried.size:>8}  {tried.samples_per_s:>12,.0f} samples/s  {tried.peak_bytes / 1e9:>9.3f} GB{verdict}"
