"""`lockstep look`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug, Force, Overrides
from lockstep.cli.reporting import FAULT, reporting, write_file
from lockstep.core.errors import LockstepError, UsageError, number_of
from lockstep.core.user_files import check_replaceable


def look(
    target: Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml", help="Recipe whose data to look at.")],
    overrides: Overrides = None,
    all: Annotated[bool, typer.Option("--all", help="Open all samples. Default: up to 1,000 of each split.")] = False,
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("look.html"),
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Name what is silently wrong in a data set, file by file. Exit code 3: there is an error.

    Writes one HTML page with the worst examples as images.
    """
    with reporting(debug):
        from lockstep.configs import config_file, registry
        from lockstep_recipes.look import look as looks
        from lockstep_recipes.look import page
        from lockstep_recipes.look.finding import ALL, SAMPLE, Lookable, of_error

        config = config_file.load(target, overrides or [])
        check_replaceable(out, force=force, mark=page.MARK)
        data, extent = config.data, ALL if all else SAMPLE
        evaluation = next(iter(data.eval_sources.values()))
        task = None
        try:
            task = registry.build_task(config.task, data.train, evaluation, fold=data.fold)
            if not isinstance(task, Lookable):
                what = f"the kind of task {config.task['kind']} has no finders: `lockstep look` cannot judge its data"
                remedy = "give the class `finders` and `data_to_look_at`: lockstep --explain look"
                raise UsageError(what, where=target, remedy=remedy)
            found = looks.look(task, extent)
        except UsageError:
            raise
        except LockstepError as error:
            found = looks.faults([of_error(error)])
        opened = "all samples" if all else f"up to {SAMPLE.samples:,} samples of each split"
        facts = [f"data.train={data.train}", *([f"data.eval={evaluation}"] if evaluation else []), f"opened: {opened}"]
        for line in [*looks.as_read(task), *looks.lines(found)]:
            print(line)
        errors = sum(fault.is_error for fault in found)
        counts = f"{number_of(errors, 'error')}, {number_of(len(found) - errors, 'warning')}"
        print(f"{config.name}: {counts}; opened {opened}")
        write_file(out, page.to_html(config.name, found, facts).removesuffix("\n"))
        print(f"written: {out}")
        if errors:
            raise typer.Exit(FAULT)


COMMAND = JoinedCommand(look, "lockstep look segmentation data.train=cells/ --all")
