"""`lockstep evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli import ranks
from lockstep.cli.options import Checkpoint, Cold, Debug, Nproc, Preset, RunDir, as_arguments
from lockstep.cli.reporting import is_first, reporting, tell_first

EVALUATION_KEYS = (
    "data.eval",
    "data.eval_limit",
    "data.workers",
    "data.prefetch",
    "data.start_method",
    "data.on_error",
    "batch.micro",
    "device",
    "precision",
    "parallel",
    "compute",
)
"""Keys of a run's config that may be changed for an evaluation."""


def evaluate(
    run_dir: RunDir,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Changes to the run's config, such as data.eval=other.csv or batch.micro=8."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    nproc: Nproc = None,
    preset: Preset = None,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Evaluate a checkpoint of a run. Prints one JSON object, and adds it to evaluations.jsonl of the run."""
    with reporting(debug):
        from lockstep.configs import config_file

        settings = config_file.read_run(run_dir, overrides or (), EVALUATION_KEYS)
        settings = config_file.with_kept_task(settings, run_dir, tell_first)
        settings, nproc = ranks.on_machine(settings, preset, nproc, overrides or ())
        if ranks.is_launcher(nproc):
            options = as_arguments({"--preset": preset, "--debug": debug, "--checkpoint": checkpoint})
            ranks.launch(["evaluate", str(run_dir), *(overrides or []), *options], nproc, settings, cold=cold)
        else:
            from lockstep.parts import evaluations_file
            from lockstep.trainer import predictions
            from lockstep.trainer.trainer import Trainer

            trainer = Trainer(settings, run_dir=run_dir, checkpoint=checkpoint)
            results = {f"eval/{name}": value for name, value in trainer.evaluate().items()}
            if is_first():
                print(predictions.text(results))
                assert trainer.loaded_step is not None
                evaluations_file.note(run_dir, trainer.loaded_step, overrides or (), results)
