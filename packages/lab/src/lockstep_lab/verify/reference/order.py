"""The samples of each step, and the seed of each sample, in plain integers. `docs/step.md` defines both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_WORD = 1 << 64
_ROUNDS = 8


def _mixed(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return word ^ (word >> 31)


def seed_of(*numbers: int) -> int:
    """The seed of (seed of the run, epoch, index): 64 bits."""
    seed = 0
    for number in numbers:
        seed = _mixed((seed + number + 0x9E3779B97F4A7C15) % _WORD)
    return seed


def index_at(position: int, *, length: int, seed: int, epoch: int) -> int:
    """The index of the sample at `position` of an epoch: a keyed permutation of `range(length)`.

    The position is a cell of a table of about sqrt(length) rows and columns. Eight rounds move the cell along its
    column and its row in turn, by distances that its other coordinate and a key determine (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"). A cell outside `range(length)` is moved again.
    """
    rows = math.isqrt(length)
    rows += rows * rows < length
    columns = (length + rows - 1) // rows
    while True:
        row, column = position // columns, position % columns
        for number in range(_ROUNDS):
            key = seed_of(seed, epoch, number)
            if number % 2:
                column = (column + _distance(row ^ key, columns)) % columns
            else:
                row = (row + _distance(column ^ key, rows)) % rows
        position = row * columns + column
        if position < length:
            return position


def _distance(word: int, size: int) -> int:
    """A number below `size`, from the upper 32 bits of the mixed word."""
    return (_mixed(word) >> 32) * size >> 32


def steps_per_epoch(length: int, global_batch: int, *, drop_last: bool) -> int:
    """The number of steps of an epoch. Without `drop_last`, the last one may have fewer samples."""
    whole, rest = divmod(length, global_batch)
    return max(whole, 1) if drop_last or not rest else whole + 1


def samples_of_step(
    step: int,
    *,
    length: int,
    global_batch: int,
    seed: int,
    drop_last: bool = False,
    group_by_length: int | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[list[int], int]:
    """The indices of the samples of a step, in order, and the epoch, if an epoch has each sample once.

    See `positions_of_step`.
    """

    def index(place: int, epoch: int) -> int:
        return index_at(place, length=length, seed=seed, epoch=epoch)

    sizes = {"length": length, "global_batch": global_batch, "seed": seed}
    positions, epoch = positions_of_step(
        step, **sizes, drop_last=drop_last, group_by_length=group_by_length, lengths=lengths, index=index
    )
    return [index(place, epoch) for place in positions], epoch


def positions_of_step(
    step: int,
    *,
    length: int,
    global_batch: int,
    seed: int,
    drop_last: bool,
    group_by_length: int | None,
    lengths: Sequence[int] | None,
    index: Callable[[int, int], int],
) -> tuple[list[int], int]:
    """The positions of the samples of a step in their epoch, in order, and the epoch.

    Args:
        step: counted from 0.
        length: number of samples of an epoch.
        global_batch: samples of a step, over all ranks.
        seed: of the run.
        drop_last: whether samples that do not fill a global batch are dropped.
        group_by_length: number of global batches of a window whose samples are sorted by length.
        lengths: length of each training sample, if they are sorted.
        index: the index of the sample at a position of an epoch.
    """
    epoch, within = divmod(step, steps_per_epoch(length, global_batch, drop_last=drop_last))
    whole_batches = length // global_batch
    if group_by_length and lengths is not None and within < whole_batches:
        window = within // group_by_length
        first = window * group_by_length
        count = min(group_by_length, whole_batches - first)  # batches of this window
        positions = range(first * global_batch, (first + count) * global_batch)
        length_of = {position: int(lengths[index(position, epoch)]) for position in positions}
        by_length = sorted(positions, key=length_of.__getitem__)
        batch = index_at(within - first, length=count, seed=seed_of(seed, epoch), epoch=window)
        return by_length[batch * global_batch : (batch + 1) * global_batch], epoch
    return list(range(within * global_batch, min((within + 1) * global_batch, length))), epoch
