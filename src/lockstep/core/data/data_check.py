"""The look at the samples of a new run before it trains: ranks share the work, and all ranks raise the same error."""

from __future__ import annotations

import itertools
from typing import Any

from torch.utils.data import Dataset

from lockstep.core.data.dataset import member_of
from lockstep.core.errors import DataError, number_of
from lockstep.core.parallel.world import World

_SHOWN = 8


def check_data(data: Dataset[Any], world: World) -> list[str]:
    """Call `check(index)` of a data set for all samples, each sample on one rank.

    Data are checked if their `check_first` is true; see `OptionalMembers`. A sample is a sign of life, so the check may
    take as long as it needs.

    Returns:
        the first remarks of all ranks, on every rank.

    Raises:
        DataError: samples cannot be used. All ranks raise the same error, which names all samples.
    """
    if not member_of(data, "check_first"):
        return []
    found: list[tuple[int, str | DataError]] = []
    checked: Any = data
    for index in range(world.rank, len(checked), world.size):
        world.heartbeat.beats += 1
        try:
            remark = checked.check(index)
        except DataError as error:
            found.append((index, error))
        else:
            found += [(index, remark)] if remark else []
    gathered = world.gather(found)

    def merged() -> list[str]:
        assert gathered is not None  # on rank 0
        ordered = sorted(itertools.chain(*gathered), key=lambda entry: entry[0])
        faults = [finding for _, finding in ordered if isinstance(finding, DataError)]
        if len(faults) == 1:
            raise faults[0]
        if faults:
            listed = "\n  ".join(f"{fault.where}: {fault.what}" for fault in faults)
            remedy = "repair them, or remove their rows"
            raise DataError(f"{number_of(len(faults), 'sample')} cannot be used:\n  {listed}", remedy=remedy)
        remarks = [finding for _, finding in ordered if isinstance(finding, str)]
        more = [f"and remarks about {number_of(len(remarks) - _SHOWN, 'more sample')}"] if len(remarks) > _SHOWN else []
        return remarks[:_SHOWN] + more

    return world.on_rank0(merged)
