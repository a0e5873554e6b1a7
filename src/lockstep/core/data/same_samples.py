"""Before the first step, ranks compare a few samples: each rank must have all samples, and the same as the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.core.data import difference, unseeded
from lockstep.core.data.fingerprint import digest_of
from lockstep.core.data.loader import Loader, MicroBatch
from lockstep.core.errors import UsageError
from lockstep.core.parallel.world import World

DIFFERENT = "the ranks have different"
"""The beginning of every error about data that are not the same on all ranks."""
REMEDY = (
    "make the same data on every rank: without RANK, and with seeded generators (numpy.random.default_rng(0)). Each "
    "rank needs all samples, since Lockstep gives the samples of a batch to the ranks"
)


def check(
    digests: Sequence[str],
    indices: Sequence[int],
    read: Callable[[int], Any],
    *,
    what: str,
    where: str,
    world: World,
    made_by: Mapping[str, object],
) -> list[str]:
    """Compare samples over the ranks. A collective.

    Args:
        digests: of the samples `indices`, as this rank has read them; an empty text if a sample cannot be read.
        read: reads a sample again, under the seeds with which it was read before.
        what: kind of the data.
        where: what makes the data.
        made_by: the objects that make the samples, by their names.

    Returns:
        a warning, if a sample changes each time it is read, and else nothing.

    Raises:
        UsageError: ranks have different samples. Names them, the ranks and the first difference.
    """
    gathered = world.gather(list(digests))
    found = world.on_rank0(lambda: _differing(gathered or []))
    if not found:
        return []
    place, rank = found[0], found[1]
    record, changes = _again(lambda: read(indices[place]), digests[place])
    records = world.gather((record, changes) if world.rank in (0, rank) else None)

    def judged() -> list[str]:
        assert records is not None  # on rank 0
        assert gathered is not None
        first, other = records[0], records[rank]
        index = indices[place]
        if first[1] or other[1]:
            return [
                f"WARNING: sample {index} of the {what} data is different each time it is read: it depends on "
                "something that no seed reaches, such as the time, or a generator that is made for each sample. The "
                "run cannot be repeated, and a resumed run may take the data for different data.\n  remedy: draw from "
                "the global generator of torch, NumPy or Python, or from one that the data set keeps: Lockstep seeds "
                f"these for each sample. {unseeded.causes(**made_by)}".rstrip()
            ]
        ranks = [number for number, found in enumerate(gathered) if found[place] not in ("", gathered[0][place])]
        places = [at for at, index in enumerate(indices) if len({found[at] for found in gathered} - {""}) > 1]
        names = ("rank 0", f"rank {rank}")
        raise UsageError(
            f"{DIFFERENT} {what} data: sample {index} of rank{'s' * (len(ranks) > 1)} "
            f"{', '.join(map(str, ranks))} is not that of rank 0 ({difference.first(first[0], other[0], names)}). "
            f"Samples that were compared: {_listed(indices)}; different: {_listed([indices[at] for at in places])}",
            where=where,
            remedy=". ".join(filter(None, [REMEDY, unseeded.causes(**made_by)])),
        )

    return world.on_rank0(judged)


def check_batch(micro_batch: MicroBatch, loader: Loader, *, what: str, where: str, world: World) -> list[str]:
    """Compare a micro-batch that all ranks have read with the same indices. A collective; see `check`."""
    if world.size == 1:
        return []
    own = "" if micro_batch.bad or micro_batch.filler else digest_of(micro_batch.collated)
    gathered = world.gather([own])
    if not world.on_rank0(lambda: bool(_differing(gathered or []))):
        return []

    def read(index: int) -> Any:
        return loader.read_apart([(index, micro_batch.epoch)]).get((index, micro_batch.epoch), (None, None))[1]

    indices = world.broadcast(micro_batch.indices)
    made_by = {"data": loader.micro_batches.data, "Task": loader.micro_batches.task}
    samples = [read(index) for index in indices]
    digests = ["" if sample is None else digest_of(sample) for sample in samples]
    return check(digests, indices, read, what=what, where=where, world=world, made_by=made_by) or [
        f"WARNING: Task.collate makes different batches of the same {what} samples on different ranks: it draws from a "
        "generator that no seed reaches, or depends on the rank. The run cannot be repeated with other ranks. "
        f"{unseeded.causes(**{'Task.collate': loader.micro_batches.task.collate})}".rstrip()
    ]


def _differing(gathered: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """The place and rank of the first digest that is not that of rank 0. Samples without a digest count as equal."""
    for place, usual in enumerate(gathered[0]):
        for rank, found in enumerate(gathered):
            if usual and found[place] and found[place] != usual:
                return place, rank
    return None


def _again(read: Callable[[], Any], before: str) -> tuple[list[difference.Leaf], bool]:
    """A record of a sample, and whether the sample changes each time it is read."""
    try:
        sample = read()
        changes = len({before, digest_of(sample), digest_of(read())}) > 1
    except Exception:
        return [], True
    return difference.record(sample), changes


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
