"""`lockstep predict`."""

from __future__ import annotations

import contextlib
import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import ranks
from lockstep.cli.options import Checkpoint, Cold, Debug, Force, Nproc, Preset, RunDir, as_arguments
from lockstep.cli.reporting import is_first, reporting, tell_first
from lockstep.core import this_process
from lockstep.core.errors import UsageError, number_of
from lockstep.core.user_files import check_replaceable

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


class OnError(enum.StrEnum):
    """The reaction to an input that cannot be read."""

    RAISE = "raise"
    SKIP = "skip"


_NAMED = 10  # inputs that could not be read are named up to this number


def predict(
    run_dir: RunDir,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="Images: files, folders and patterns such as 'photos/**/*.jpg'; for a detection also a COCO file "
            "that names images. For text: files, texts or prompts, and - "
            "for standard input. Without INPUT: samples of the evaluation data.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of evaluation samples, without INPUT.", min=1)] = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the predictions to a file (.csv, .json, .jsonl, .npz, .safetensors), or a folder with the "
            "files of each prediction, such as masks."
        ),
    ] = None,
    force: Force = False,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Value of task.top_k for this prediction.")] = None,
    on_error: Annotated[
        OnError | None,
        typer.Option(help="Reaction to an input that cannot be read. Default: the run's data.on_error."),
    ] = None,
    checkpoint: Checkpoint = None,
    nproc: Nproc = None,
    preset: Preset = None,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Predict with a checkpoint of a run. Prints one JSON object per sample, in the order of the inputs."""
    with reporting(debug):
        from lockstep.configs import config_file
        from lockstep.trainer import predictions

        settings = config_file.with_kept_task(config_file.read_run(run_dir), run_dir, tell_first)
        if top_k is not None:
            settings = config_file.with_task_option(settings, "top_k", top_k, where="--top-k")
        if out is not None:
            predictions.check(out, skips=on_error == "skip")  # before anything is computed
            _check_is_no_source(out, run_dir, inputs or [])
            if (file := predictions.file_of(out)).exists():
                check_replaceable(file, force=force)
        settings, nproc = ranks.on_machine(settings, preset, nproc)
        if ranks.is_launcher(nproc):
            options = {"--out": out, "--top-k": top_k, "--on-error": on_error, "--preset": preset, "--samples": samples}
            options |= {"--checkpoint": checkpoint, "--debug": debug, "--force": force}
            arguments = ["predict", *as_arguments(options), "--", str(run_dir), *(inputs or [])]
            ranks.launch(arguments, nproc, settings, cold=cold)
            return
        from lockstep.trainer.trainer import Trainer

        _predict(Trainer(settings, run_dir=run_dir, checkpoint=checkpoint), inputs or [], samples, out, on_error)


def _check_is_no_source(out: Path, run_dir: Path, inputs: list[str]) -> None:
    """Check that `out` is neither an input nor a file of the run.

    Raises:
        UsageError: it is.
    """
    remedy = "choose another place"
    if out.exists() and any(Path(name).exists() and out.samefile(name) for name in inputs):
        raise UsageError(f"{out} is an input, and would be replaced", where="--out", remedy=remedy)
    if out.is_file() and out.resolve().is_relative_to(run_dir.resolve()):
        raise UsageError(f"{out} is a file of the run, and would be replaced", where="--out", remedy=remedy)


def _predict(trainer: Trainer, inputs: list[str], samples: int, out: Path | None, on_error: OnError | None) -> None:
    """Predict, write each prediction as it comes, and say on stderr what was written and what could not be read."""
    from lockstep.cli import progress
    from lockstep.core import task_checks
    from lockstep.trainer import predictions

    unreadable: list[str] = []
    count = 0
    task = trainer.task()
    to_terminal = out is None and this_process.ranks() == 1 and sys.stdout.isatty()
    streams = to_terminal and task_checks.presenter(task).stream(inputs)
    # If the predictions themselves go to the terminal, they show the progress.
    has_bar = is_first() and sys.stderr.isatty() and not (out is None and sys.stdout.isatty())
    with contextlib.ExitStack() as stack:
        # Other ranks pass no predictions on.
        rows = stack.enter_context(predictions.opened(out)) if is_first() else None
        bar = stack.enter_context(progress.bar("predicting", shown=has_bar))

        def add(of_sample: list[dict[str, Any]], readable: bool) -> None:
            nonlocal count
            count += readable
            if not readable:
                unreadable.append(of_sample[0]["error"])
            if rows is not None and not (streams and readable):
                for row in of_sample:
                    rows.add(row, readable)
            bar.advance()

        how: Any = {"on_error": on_error and on_error.value, "by_row": predictions.takes_rows(out)}
        folder = out if predictions.is_folder(out) else None
        trainer.predict_rows(add, inputs, samples, task, begin=bar.begin, folder=folder, **how)
    if rows is not None and out is not None:
        lacking = f"; left out: {', '.join(rows.left_out)}" if rows.left_out else ""
        print(f"{number_of(count, 'prediction')}: {out}{lacking}", file=sys.stderr)
    if unreadable:
        more = f"\n  and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
        listed = "\n  ".join(unreadable[:_NAMED])
        what = f"warning: {number_of(len(unreadable), 'input')} could not be read"
        print(f"{what}:\n  {listed}{more}", file=sys.stderr)
