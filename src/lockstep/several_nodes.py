"""A training on several nodes, as the command line asks for it. Importing this module loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.distributed.node_address import Endpoint


class Several(NamedTuple):
    """How many nodes, and where they meet."""

    least: int
    most: int
    endpoint: Endpoint


def of(nnodes: str, rendezvous: str | None) -> Several | None:
    """What `--nnodes` and `--rendezvous` say. None: there is one node.

    Raises:
        UsageError: a text is wrong, or there is no place to meet.
    """
    from lockstep.distributed import node_address

    least, most = node_address.parse_nnodes(nnodes)
    if most == 1:
        return None
    if rendezvous is None:
        raise UsageError(
            f"{nnodes} nodes, and no place where they meet",
            where="--rendezvous",
            remedy="give --rendezvous HOST:PORT on all nodes: the name or the address of one of them, "
            f"such as node0:{node_address.DEFAULT_PORT}",
        )
    return Several(least, most, node_address.parse_endpoint(rendezvous))


def launch(
    arguments: Sequence[str],
    nproc: int,
    several: Several,
    settings: RunConfig,
    *,
    run_id: str,
    wait_s: float,
    max_restarts: int,
) -> None:
    """Run `lockstep ARGUMENTS` as `nproc` ranks on this node, together with the other nodes.

    Args:
        settings: of which all nodes must have the same training keys.
        run_id: the same on all nodes, and another for each run that meets at the same place.
        wait_s: how long to wait for other nodes, in seconds.

    Raises:
        LockstepError, Preempted: see `node_launch.launch`.
    """
    from lockstep.config import training_keys
    from lockstep.distributed import node_launch
    from lockstep.distributed.launch import run_command
    from lockstep.distributed.node_session import Nodes

    nodes = Nodes(
        several.least, several.most, several.endpoint, run_id=run_id, wait_s=wait_s, keys=training_keys(settings)
    )
    node_launch.launch(arguments, nproc, nodes, max_restarts, main=run_command)
