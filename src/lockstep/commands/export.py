"""`lockstep export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.commands.options import Checkpoint, Debug, RunDir
from lockstep.commands.reporting import reporting, tell_first


def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder; with --optimizer a new file.")],
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Write one file for torch.load, with the optimizer's state.")
    ] = False,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights as safetensors, or with --optimizer all its state, for use without Lockstep."""
    with reporting(debug):
        from lockstep import config_file

        settings = config_file.with_kept_task(config_file.read_run(run_dir), run_dir, tell_first)
        from lockstep.trainer import Trainer

        trainer = Trainer(settings, run_dir=run_dir, checkpoint=checkpoint)
        print(trainer.export_training_state(out) if optimizer else trainer.export(out))
