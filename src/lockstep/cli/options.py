"""Arguments and options that several commands share, and how they are written on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml|FILE.py:Task", help="Recipe or task to train.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the config, by dotted path.")
]
Nproc = Annotated[
    str | None, typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU. Default: the preset's, or 1.")
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME|FILE.yaml", help="Preset of this machine, see lockstep doctor presets."),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run.")]
Cold = Annotated[
    bool,
    typer.Option("--cold", help="Start each rank as a new interpreter that imports torch itself."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="newest|best|STEP",
        help="Checkpoint to use. Default: the best if the run keeps its best checkpoint, else the newest.",
    ),
]
Nnodes = Annotated[
    str | None,
    typer.Option(
        "--nnodes",
        metavar="N|MIN:MAX",
        envvar="LOCKSTEP_NNODES",
        help="Nodes of the run, each with the same command. MIN:MAX: nodes may join and leave. Default: 1.",
    ),
]
Rendezvous = Annotated[
    str | None,
    typer.Option(
        "--rendezvous",
        metavar="HOST[:PORT]",
        envvar="LOCKSTEP_RENDEZVOUS",
        help="Meeting point of the nodes: the name or address of one of them. Port: 29400.",
    ),
]
RendezvousId = Annotated[
    str | None,
    typer.Option(
        "--rendezvous-id",
        metavar="NAME",
        envvar="LOCKSTEP_RENDEZVOUS_ID",
        help="Name by which the nodes find each other. Default: the run directory's name.",
    ),
]
WaitForNodes = Annotated[
    float,
    typer.Option(
        "--wait-for-nodes",
        metavar="SECONDS",
        envvar="LOCKSTEP_WAIT_FOR_NODES",
        min=1,
        max=31_536_000,
        help="Time to wait for other nodes before giving up.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of all errors.")]


def as_arguments(options: Mapping[str, object]) -> list[str]:
    """The words of a command line that give these options.

    Args:
        options: a value for each name. None and False: the option is not given. True: it has no value. A list: it is
            given once for each entry.
    """
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        each = value if isinstance(value, list) else [value]
        words += [name] if value is True else [word for one in each for word in (name, str(one))]
    return words
