"""The environment variables that determine a rank's identity, and how it computes and communicates."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.core.parallel.world import World

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_OTHERS = re.compile(
    r"(TORCH|PYTORCH|NCCL|GLOO|CUDA|CUBLAS|CUDNN|HIP|ROCR|OMP|MKL|KMP|LOCKSTEP|HF|SLURM|TOKENIZERS)_|TMPDIR$|PYTHONHASHSEED$"
)
_SECRET = re.compile(r"TOKEN$|SECRET|PASSWORD|KEY$|CREDENTIAL")


def of_process() -> dict[str, str | None]:
    """The variables of this process by name. None: an unset variable that launchers set. Secrets are not shown."""
    names = sorted(name for name in os.environ if _OTHERS.match(name))
    shown = {name: "(not shown)" if _SECRET.search(name) else os.environ[name] for name in names}
    return {**{name: os.environ.get(name) for name in _OF_RANKS}, **shown}


def of_ranks(world: World) -> list[dict[str, str | None]]:
    """The variables of each rank, in order. Empty except on rank 0. A collective."""
    return world.gather(of_process()) or []


def table(ranks: Sequence[Mapping[str, str | None]]) -> str:
    """A line for each variable that is the same on all ranks, and a line per rank for the others."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    width = max(map(len, names), default=0)
    lines = []
    for name in names:
        values = [_text(rank.get(name)) for rank in ranks]
        if len(set(values)) == 1:
            where = f"all {len(ranks)} ranks" if len(ranks) > 1 else "rank 0"
            lines.append(f"{name:<{width}}  {where:<12}  {values[0]}")
        else:
            lines += [f"{name:<{width}}  {f'rank {rank}':<12}  {value}" for rank, value in enumerate(values)]
    return "\n".join(lines)


def _text(value: str | None) -> str:
    return "(not set)" if value is None else value
