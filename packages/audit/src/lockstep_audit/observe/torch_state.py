"""Private state of torch.distributed that observers read."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lockstep_audit.observe import torch_internals


def groups() -> list[dict[str, Any]]:
    """The process groups of this process: name, ranks, backend, timeout_s."""
    if not dist.is_initialized():
        return []
    world = dist.distributed_c10d._world
    ranks, backends, named = world.pg_group_ranks, world.pg_map, list(world.pg_names.items())
    told = [{"name": str(name), "ranks": sorted(ranks[one]), "backend": backends[one][0]} for one, name in named]
    return [each | {"timeout_s": _timeout(one)} for each, (one, _) in zip(told, named, strict=True)]


def _timeout(group: dist.ProcessGroup) -> float | None:
    try:
        return max((each.total_seconds() for each in torch_internals.timeouts(group)), default=None)
    except (AttributeError, RuntimeError):
        return None


def name_of(group: dist.ProcessGroup | None) -> str:
    """The name of a group in the flight recorder. None: the group of all ranks."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    return str(getattr(group, "group_name", "0"))


def ranks_of(group: dist.ProcessGroup | None) -> list[int] | None:
    """The ranks of a group."""
    return dist.get_process_group_ranks(group) if group is not None else None


def below(function: Any, output: int = -1) -> Any:
    """The autograd function that gave a function its first input. For an output: the function that made it.

    DDP may pass the outputs of a model through its own function, which is left out.
    """
    if output < 0:
        function, output = next((each for each in function.next_functions if each[0] is not None), (None, 0))
    while type(function).__name__ == "_DDPSinkBackward":
        function, output = function.next_functions[output]
    return function


def has_other_ranks() -> bool:
    """True if there are several ranks."""
    group = dist.GroupMember.WORLD if dist.is_available() else None
    return group is not None and group.size() > 1
