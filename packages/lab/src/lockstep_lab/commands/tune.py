"""`lockstep tune lr` and `lockstep tune batch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import ranks
from lockstep.cli.commands import Command, CommandGroup
from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug, Force, Nproc, Overrides, Preset, Target, as_arguments
from lockstep.cli.reporting import FAILED, is_first, reporting
from lockstep.core.errors import UsageError, number_of
from lockstep.core.user_files import check_replaceable

_Low = Annotated[float, typer.Option("--from", help="The rate of the first step: a value of optim.lr.")]
_High = Annotated[float, typer.Option("--to", help="The rate of the last step.")]
_Steps = Annotated[int, typer.Option("--steps", help="Steps of the test.")]
_Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.svg|FILE.png", help="Chart to write. Default: NAME-lr.svg in this folder."),
]
_Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory that a rank may use, such as 4GB. Required on a CPU."),
]
_Most = Annotated[
    int | None,
    typer.Option(
        "--most", metavar="SAMPLES", min=1, help="The largest micro-batch. Default: a rank's share of batch.global."
    ),
]

tune = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Find a learning rate, or the largest micro-batch.",
    epilog="Example: lockstep tune lr digits",
)


@tune.command(cls=Command, name="lr", epilog="Example: lockstep tune lr digits --nproc 2 --out digits-lr.png")
def learning_rate(
    target: Target,
    overrides: Overrides = None,
    nproc: Nproc = None,
    preset: Preset = None,
    low: _Low = 1e-7,
    high: _High = 10.0,
    steps: _Steps = 100,
    out: _Out = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Train some steps while the learning rate rises, and suggest a rate. Writes a chart, and nothing else."""
    with reporting(debug):
        from lockstep.trainer import foreign
        from lockstep_lab.search import chart, curve

        curve.check(low, high, steps)
        config = foreign.load(target, overrides or [])
        config, nproc = ranks.on_machine(config, preset, nproc, overrides or [])
        path = out or Path(f"{config.name}-lr.svg")
        if path.suffix not in (".svg", ".png"):
            raise UsageError("is not the name of a chart", where=f"--out {path}", remedy="call it lr.svg or lr.png")
        check_replaceable(path, force=force, mark=chart.MARK)
        if ranks.is_launcher(nproc):
            more = {"--preset": preset, "--from": low, "--to": high, "--steps": steps, "--out": out, "--debug": debug}
            more |= {"--force": force}
            ranks.launch(["tune", "lr", target, *(overrides or []), *as_arguments(more)], nproc, config)
            return
        from lockstep_lab.search import learning_rate, show_rates

        found = learning_rate.range_test(config, low=low, high=high, steps=steps)
        if not is_first():
            return
        print(show_rates.text(found))
        if found.losses:
            show_rates.chart(found, config.name).write(path)
            print(f"written: {path}")


@tune.command(cls=Command, name="batch", epilog="Example: lockstep tune batch imagenet --memory 16GB --nproc 2")
def batch(
    target: Target,
    overrides: Overrides = None,
    nproc: Nproc = None,
    preset: Preset = None,
    memory: _Memory = None,
    most: _Most = None,
    debug: Debug = False,
) -> None:
    """Find the largest micro-batch that fits into memory. It trains a few steps of each size, and prints how
    fast they are.
    """
    with reporting(debug):
        from lockstep import sizes
        from lockstep.cli import config_preset
        from lockstep.trainer import foreign, local_ranks
        from lockstep_lab.search import batch_size

        keys = overrides or []
        config = foreign.load(target, keys)
        if preset is not None:
            chosen = config_preset.read(preset).keys_beside(config, keys)
            keys = [*(f"{key}={json.dumps(value)}" for key, value in chosen.items()), *keys]
        config, nproc = ranks.on_machine(config, preset, nproc, overrides or [])
        limit = sizes.bytes_of(memory, "--memory") if memory is not None else None
        count = local_ranks.ranks_of(nproc)
        on_gpu = config.device == "cuda"
        if config.device == "auto":
            from lockstep.core import devices

            on_gpu = devices.gpus() > 0
        batch_size.check(config, limit, on_gpu=on_gpu)
        given = config.batch.resolve(count).global_ or 1
        largest = most or -(-given // count)
        attempt = batch_size.attempt_of(target, keys, ranks=count, given=given, memory=limit)
        print(f"{'samples':>8}  micro-batches of {largest} at most, {number_of(count, 'rank')}", flush=True)
        tried = batch_size.search(attempt, largest, lambda one: print(batch_size.row(one), flush=True))
        by_rank = config.batch.per_rank is not None
        print(batch_size.text(tried, largest, given=given, ranks=count, memory=limit, by_rank=by_rank))
        if not any(one.fits for one in tried):
            raise typer.Exit(FAILED)


COMMAND = JoinedCommand(tune)
