"""The command line. Only the commands that need torch import it."""

from __future__ import annotations

import contextlib
import enum
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep import local_ranks
from lockstep.commands import config as config_commands
from lockstep.commands import init as init_commands
from lockstep.commands import launch as launch_commands
from lockstep.commands import plan as plan_commands
from lockstep.commands import preflight as preflight_commands
from lockstep.commands import report as report_commands
from lockstep.errors import LockstepError, Preempted, UsageError, exits_are_failures, short_traceback

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.distributed.node_address import Several
    from lockstep.trainer import Trainer

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Distributed PyTorch training whose result does not depend on how it was run.",
)

Target = Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml|FILE.py:Task", help="What to train.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the config, by dotted path.")
]
Nproc = Annotated[
    str | None, typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU. Default: the preset's, or 1.")
]
Machine = Annotated[
    str | None, typer.Option("--preset", metavar="NAME|FILE.yaml", help="How this machine runs it: lockstep presets.")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run.")]
Cold = Annotated[
    bool,
    typer.Option("--cold", help="Start each rank as a new interpreter that imports torch itself."),
]
Which = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="newest|best|STEP",
        help="Default: the best where the run keeps its best checkpoint, else the newest.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of all errors.")]


class OnError(enum.StrEnum):
    """What happens if an input cannot be read."""

    RAISE = "raise"
    SKIP = "skip"


_POLICY: dict[OnError | None, Literal["raise", "skip"] | None] = {
    None: None,
    OnError.RAISE: "raise",
    OnError.SKIP: "skip",
}
_OF_EVALUATION = (
    "data.eval",
    "data.workers",
    "data.on_error",
    "batch.micro",
    "device",
    "precision",
    "parallel",
    "compute",
)
"""Keys of a run's config that may be changed for an evaluation."""
_NAMED = 10  # inputs that could not be read are named up to this number


def _show_version(wanted: bool) -> None:
    if wanted:
        import lockstep

        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit


@app.callback()
def _application(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: lockstep recipes")
def recipes() -> None:
    """List the recipes: the shipped ones, and those of installed packages."""
    from lockstep import config_file

    known = config_file.recipes()
    wide = max(map(len, known))
    for name, about in known.items():
        print(f"{name:<{wide}}  {about}")


@app.command(epilog="Example: lockstep presets")
def presets() -> None:
    """List the presets: how kinds of machines run a training, for --preset."""
    from lockstep import config_preset

    known = config_preset.presets()
    wide = max(map(len, known))
    for name, about in known.items():
        print(f"{name:<{wide}}  {about}")


@app.command(epilog="Example: lockstep train digits --nproc 2 optim.lr=1e-3")
def train(
    target: Target,
    overrides: Overrides = None,
    nproc: Nproc = None,
    preset: Machine = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/NAME.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete what an earlier run left in the run directory.")
    ] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-change", metavar="KEY", help="Continue the run although this key differs from the run's."
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How often killed or crashed ranks are started again. Default: 3; for a single rank: 0.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="STEPS", help="Profile steps, such as 5-10, or 6 steps after the first."),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            "--nnodes",
            metavar="N|MIN:MAX",
            envvar="LOCKSTEP_NNODES",
            help="Nodes of the run, each with the same command. MIN:MAX: nodes may join and leave. Default: 1.",
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            metavar="HOST[:PORT]",
            envvar="LOCKSTEP_RENDEZVOUS",
            help="Where the nodes meet: the name or address of one of them. Port: 29400.",
        ),
    ] = None,
    rendezvous_id: Annotated[
        str | None,
        typer.Option(
            "--rendezvous-id",
            metavar="NAME",
            envvar="LOCKSTEP_RENDEZVOUS_ID",
            help="Default: the run directory's name.",
        ),
    ] = None,
    wait_for_nodes: Annotated[
        float,
        typer.Option(
            "--wait-for-nodes",
            metavar="SECONDS",
            envvar="LOCKSTEP_WAIT_FOR_NODES",
            min=1,
            max=31_536_000,
            help="Then the run ends.",
        ),
    ] = 600,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Train a recipe or a task. The same command again resumes the run.

    On several machines: the same command on each, with --nnodes 2 --rendezvous node0:29400.
    """
    with _reporting(debug):
        from lockstep.distributed import signals

        with signals.listening():  # before anything that takes time: the config 0.3 s, torch 3 s
            from lockstep import config_file
            from lockstep.distributed import node_address

            if profile is not None:
                from lockstep.observe import profile as profiling

                profiling.parse(profile)
            settings = config_file.load(target, overrides or [])
            settings, nproc = _on_machine(settings, preset, nproc, overrides or [])
            shared = [*(["--run-dir", str(run_dir)] if run_dir else []), *(["--preset", preset] if preset else [])]
            several = node_address.several(nnodes, rendezvous) if "RANK" not in os.environ else None
            if several is None and not _is_launcher(nproc, max_restarts):
                from lockstep.trainer import Trainer

                trainer = Trainer(
                    settings, run_dir=run_dir, fresh=fresh, allow_change=allow_change or (), profile=profile
                )
                trainer.fit()
                _invite_to_verify(trainer, target, overrides or [], shared)
                return
        options = [*shared, *(["--fresh"] if fresh else []), *(["--debug"] if debug else [])]
        options += ["--profile", profile] if profile else []
        options += [part for key in allow_change or [] for part in ("--allow-change", key)]
        restarts = 3 if max_restarts is None else max_restarts
        arguments = ["train", target, *(overrides or []), *options]
        if several is None:
            _launch(arguments, nproc, settings, max_restarts=restarts, cold=cold)
        else:
            run_id = rendezvous_id or (run_dir or Path("runs", settings.name)).resolve().name
            ranks = _prepare(nproc, settings, cold=cold)
            _launch_on_nodes(
                arguments, ranks, several, settings, run_id=run_id, wait_s=wait_for_nodes, max_restarts=restarts
            )


def _invite_to_verify(trainer: Trainer, target: str, overrides: Sequence[str], options: Sequence[str]) -> None:
    """Print the command that checks this training, to be pasted into a shell, unless the training was checked already.

    Args:
        options: those of the command line that `verify` takes, so that it writes into the same folder.
    """
    from lockstep import run_directory

    if not _is_first() or run_directory.is_verified(trainer.run_dir, trainer.config):
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nproc = ["--nproc", str(ranks)] if ranks > 2 else []  # 2 is the default
    device = ["device=cpu"] if trainer.config.device == "mps" else []  # which verify does not take
    command = ["lockstep", "verify", target, *overrides, *device, *nproc, *options]
    print(f"Check this training: {shlex.join(command)}", flush=True)


@app.command(epilog="Example: lockstep evaluate runs/digits --nproc 2 --checkpoint best")
def evaluate(
    run_dir: RunDir,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Changes to the run's config, such as data.eval=other.csv or batch.micro=8."
        ),
    ] = None,
    checkpoint: Which = None,
    nproc: Nproc = None,
    preset: Machine = None,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Evaluate a checkpoint of a run; prints one JSON object."""
    with _reporting(debug):
        from lockstep import config_file

        settings = config_file.read_run(run_dir, overrides or (), _OF_EVALUATION)
        settings = config_file.with_kept_task(settings, run_dir, _tell_first)
        settings, nproc = _on_machine(settings, preset, nproc, overrides or ())
        if _is_launcher(nproc):
            options = [*(["--preset", preset] if preset else []), *(["--debug"] if debug else [])]
            options += ["--checkpoint", checkpoint] if checkpoint else []
            _launch(["evaluate", str(run_dir), *(overrides or []), *options], nproc, settings, cold=cold)
        else:
            from lockstep.observe import predictions
            from lockstep.trainer import Trainer

            results = Trainer(settings, run_dir=run_dir, checkpoint=checkpoint).evaluate()
            if _is_first():
                print(predictions.text({f"eval/{name}": value for name, value in results.items()}))


@app.command(epilog="Example: lockstep predict runs/mine 'photos/**/*.jpg' --out predictions.csv")
def predict(
    run_dir: RunDir,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="For images: files, folders and patterns such as 'photos/**/*.jpg'. For text: files, texts, and - for "
            "standard input. Without INPUT: samples of the evaluation data.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="How many evaluation samples, without INPUT.", min=1)] = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write a file instead: .csv, .json, .jsonl, .npz or .safetensors; or into a folder, also the files of "
            "each prediction, such as masks."
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="The config's task.top_k, for this prediction.")] = None,
    on_error: Annotated[
        OnError | None,
        typer.Option(help="What happens if an input cannot be read. Default: as the run's data.on_error."),
    ] = None,
    checkpoint: Which = None,
    nproc: Nproc = None,
    preset: Machine = None,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Predict with a checkpoint of a run; prints one JSON object per sample, in the order of the inputs."""
    with _reporting(debug):
        from lockstep import config_file
        from lockstep.observe import predictions

        settings = config_file.with_kept_task(config_file.read_run(run_dir), run_dir, _tell_first)
        if top_k is not None:
            settings = config_file.with_task_option(settings, "top_k", top_k, where="--top-k")
        if out is not None:
            predictions.check(out, skips=on_error == "skip")  # before anything is computed
        settings, nproc = _on_machine(settings, preset, nproc)
        if _is_launcher(nproc):
            given = {"--out": out, "--top-k": top_k, "--on-error": on_error, "--preset": preset, "--samples": samples}
            given |= {"--checkpoint": checkpoint}
            options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
            arguments = ["predict", *options, *(["--debug"] if debug else []), "--", str(run_dir), *(inputs or [])]
            _launch(arguments, nproc, settings, cold=cold)
            return
        from lockstep.trainer import Trainer

        _predict(Trainer(settings, run_dir=run_dir, checkpoint=checkpoint), inputs or [], samples, out, on_error)


def _predict(trainer: Trainer, inputs: list[str], samples: int, out: Path | None, on_error: OnError | None) -> None:
    """Predict, write each prediction as it comes, and say on stderr what was written and what could not be read."""
    from lockstep.observe import predictions, progress

    unreadable: list[str] = []
    count = 0
    # Where the predictions themselves go to the terminal, they show the progress.
    has_bar = _is_first() and sys.stderr.isatty() and not (out is None and sys.stdout.isatty())
    with contextlib.ExitStack() as stack:
        # Other ranks pass no predictions on.
        rows = stack.enter_context(predictions.opened(out)) if _is_first() else None
        bar = stack.enter_context(progress.bar("predicting", shown=has_bar))

        def add(of_sample: list[dict[str, Any]], readable: bool) -> None:
            nonlocal count
            count += readable
            if not readable:
                unreadable.append(of_sample[0]["error"])
            if rows is not None:
                for row in of_sample:
                    rows.add(row, readable)
            bar.advance()

        trainer.predict_rows(
            add,
            inputs,
            samples,
            on_error=_POLICY[on_error],
            begin=bar.begin,
            by_row=predictions.takes_rows(out),
            folder=out if predictions.is_folder(out) else None,
        )
    if rows is not None and out is not None:
        lacking = f"; left out: {', '.join(rows.left_out)}" if rows.left_out else ""
        print(f"{count} predictions: {out}{lacking}", file=sys.stderr)
    if unreadable:
        more = f"\n  and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
        listed = "\n  ".join(unreadable[:_NAMED])
        print(
            f"warning: {len(unreadable)} input{'s' * (len(unreadable) > 1)} could not be read:\n  {listed}{more}",
            file=sys.stderr,
        )


@app.command(epilog="Example: lockstep checkpoints runs/digits --check")
def checkpoints(
    run_dir: RunDir,
    check: Annotated[bool, typer.Option("--check", help="Read every file and compare it with its checksum.")] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Delete checkpoints that the run's config does not keep, but never the newest valid checkpoint.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """List a run's checkpoints. With --check, the exit code is 3 if a checkpoint is damaged."""
    with _reporting(debug):
        from lockstep import config_file

        settings = config_file.read_run(run_dir)
        from lockstep import run_directory
        from lockstep.checkpoint import inventory

        if not inventory.show(run_dir / "checkpoints", run_directory.retention(settings), check, prune):
            raise typer.Exit(3)


@app.command(epilog="Example: lockstep export runs/digits weights")
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    checkpoint: Which = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights as safetensors, for use without Lockstep."""
    with _reporting(debug):
        from lockstep import config_file

        settings = config_file.with_kept_task(config_file.read_run(run_dir), run_dir, _tell_first)
        from lockstep.trainer import Trainer

        print(Trainer(settings, run_dir=run_dir, checkpoint=checkpoint).export(out))


@app.command(epilog="Example: lockstep verify my_task.py:MyTask --nproc 2 --quick")
def verify(
    target: Target,
    overrides: Overrides = None,
    nproc: Annotated[
        str | None,
        typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU. Default: the preset's, or 2."),
    ] = None,
    preset: Machine = None,
    checks: Annotated[str, typer.Option(metavar="A,B,C", help="Which checks; default: all.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Shorter trials.")] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of each comparison. Default: 12, with --quick 8.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where verify.json and verify.html go. Default: runs/NAME.")
    ] = None,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Check that a training is right, on its own model and data. Exit code 3: a fault; 1: nothing could be shown."""
    with _reporting(debug):
        from lockstep import config_file

        settings = config_file.load(target, overrides or [])
        if "RANK" in os.environ:
            raise UsageError(
                "verify starts its own ranks",
                where="environment variable RANK",
                remedy="call it without torchrun, with --nproc",
            )
        settings, nproc = _on_machine(settings, preset, nproc, overrides or [], default="2")
        count = local_ranks.ranks_of(nproc)
        settings = settings.model_copy(update={"batch": settings.batch.resolve(count)})
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: ranks and their files are cleaned up
        if not cold:
            from lockstep.distributed import warm_process

            # Otherwise libraries start threads while they are imported, and ranks slow each other down.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            warm_process.start(local_ranks.modules_of(settings))
        from lockstep import run_directory
        from lockstep.verify import command, report

        names = [name.strip() for name in checks.split(",") if name.strip()]
        folder = run_dir or Path("runs", settings.name)

        def tell(holder: str) -> None:
            print(f"waiting for {holder}, which verifies in {folder}", file=sys.stderr, flush=True)

        with run_directory.locked(folder, ".verify-lock", tell):  # a second verification would overwrite the same files
            config = settings.model_dump(by_alias=True)
            result = command.verify(config, count, folder, checks=names, quick=quick, steps=steps)
        print(report.summary(result))
        print(f"written: {folder}/verify.json, {folder}/verify.html")
        if result.faults:
            raise typer.Exit(3)
        if result.shows_nothing:
            raise typer.Exit(1)


def _on_machine(
    settings: RunConfig, preset: str | None, nproc: str | None, overrides: Sequence[str] = (), default: str = "1"
) -> tuple[RunConfig, str]:
    """The config with the keys of a preset, and the number of ranks as text.

    Args:
        nproc: of the command line. It takes precedence over the preset's.
        default: the number of ranks where neither the command line nor the preset gives a number.

    Raises:
        UsageError: there is no such preset, it has errors, or this machine has too few GPUs for it.
    """
    from lockstep.distributed import allocator

    if preset is None:
        allocator.use_expandable_segments(settings.device)
        return settings, nproc or default
    from lockstep import config_preset
    from lockstep.distributed.signals import LAUNCHED

    chosen = config_preset.read(preset)
    changed = chosen.apply(settings, overrides)
    allocator.use_expandable_segments(changed.device)
    nproc = nproc or chosen.nproc or default
    local_ranks.check_nproc(nproc)
    if changed.device == "cuda" and "RANK" not in os.environ:
        from lockstep import devices

        ranks = None if nproc == "auto" else int(nproc)
        chosen.check_fits(changed, ranks, gpus=devices.gpus())
    if _is_first() and LAUNCHED not in os.environ:
        for line in chosen.notes(settings, changed):
            print(line, file=sys.stderr, flush=True)
    return changed, nproc


def _load(target: str, overrides: Sequence[str], preset: str | None) -> RunConfig:
    """The config of a training on other machines: with a preset, but without looking at this machine."""
    from lockstep import config_file, config_preset

    settings = config_file.load(target, overrides)
    return settings if preset is None else config_preset.read(preset).apply(settings, overrides)


def _is_launcher(nproc: str, max_restarts: int | None = None) -> bool:
    """Whether this process must start ranks, and is not a rank itself."""
    local_ranks.check_nproc(nproc)
    return "RANK" not in os.environ and (nproc != "1" or bool(max_restarts))


def _launch(arguments: list[str], nproc: str, settings: RunConfig, *, max_restarts: int = 0, cold: bool) -> None:
    from lockstep.distributed import launch

    ranks = _prepare(nproc, settings, cold=cold)
    launch.launch(arguments, ranks, max_restarts)


def _launch_on_nodes(
    arguments: list[str],
    ranks: int,
    several: Several,
    settings: RunConfig,
    *,
    run_id: str,
    wait_s: float,
    max_restarts: int,
) -> None:
    from lockstep import config_file
    from lockstep.distributed import launch, node_launch
    from lockstep.distributed.node_session import Nodes

    keys = config_file.training_keys(settings)
    nodes = Nodes(several.least, several.most, several.endpoint, run_id=run_id, wait_s=wait_s, keys=keys)
    node_launch.launch(arguments, ranks, nodes, max_restarts, main=launch.run_command)


def _prepare(nproc: str, settings: RunConfig, *, cold: bool) -> int:
    """Start the process from which ranks are forked, and give the number of ranks."""
    from lockstep.distributed import launch

    ranks = local_ranks.ranks_of(nproc)
    offloads = settings.parallel.cpu_offload
    launch.prepare(ranks, cold=cold, modules=local_ranks.modules_of(settings), host_computes=offloads)
    return ranks


def _launched(
    arguments: list[str],
    target: str,
    overrides: list[str],
    *,
    nproc: str | None,
    preset: str | None,
    run_dir: Path | None,
    nodes: tuple[str | None, str | None, str | None, float],
) -> RunConfig | None:
    """The config, where this process is a rank. Otherwise start the ranks, wait for their end, and return None.

    Args:
        nodes: `--nnodes`, `--rendezvous`, `--rendezvous-id` and `--wait-for-nodes`.
    """
    from lockstep import config_file

    settings = config_file.load(target, overrides)
    settings, nproc = _on_machine(settings, preset, nproc, overrides)
    nnodes, rendezvous, run_id, wait_s = nodes
    from lockstep.distributed import node_address

    several = node_address.several(nnodes, rendezvous) if "RANK" not in os.environ else None
    if several is not None:
        run_id = f"{run_id or (run_dir or Path('runs', settings.name)).resolve().name}-{arguments[0]}"
        ranks = _prepare(nproc, settings, cold=False)
        _launch_on_nodes(arguments, ranks, several, settings, run_id=run_id, wait_s=wait_s, max_restarts=0)
        return None
    if _is_launcher(nproc):
        _launch(arguments, nproc, settings, cold=False)
        return None
    return settings


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _tell_first(text: str) -> None:
    """Write a line to stderr, on the first rank."""
    if _is_first():
        _tell(text)


def _tell(text: str) -> None:
    """Write a last line to stderr. Where it cannot be written (the terminal was closed), the exit code stays."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _reporting(debug: bool) -> Iterator[None]:
    """Turn exceptions into messages and exit codes.

    If a launcher started this rank, the launcher prints the message.
    """
    try:
        with exits_are_failures():
            yield
    except typer.Exit:
        raise
    except Preempted as stopped:
        from lockstep.distributed import launch

        launch.report_failure(stopped, str(stopped))
        if "RANK" not in os.environ and sys.argv[1:2] != ["train"]:
            _tell("stopped; the same command begins anew")
        elif "RANK" not in os.environ:  # if a checkpoint was saved, the run has said so
            _tell(f"{'' if 'saved' in str(stopped) else f'{stopped}; '}the same command goes on from there")
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        known = isinstance(error, LockstepError)
        text = traceback.format_exc() if debug else str(error) if known else short_traceback(error)
        from lockstep.distributed import launch, signals

        launch.report_failure(error, text)
        if signals.LAUNCHED not in os.environ or "RANK" not in os.environ:
            rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
            _tell(f"{rank}error: {text}")
        raise typer.Exit(error.exit_code if isinstance(error, LockstepError) else 1) from None


config_commands.add_to(app, reporting=_reporting)
report_commands.add_to(app, reporting=_reporting)
init_commands.add_to(app, reporting=_reporting)
plan_commands.add_to(app, reporting=_reporting)
preflight_commands.add_to(app, reporting=_reporting, launched=_launched)
launch_commands.add_to(app, reporting=_reporting, load=_load)


def main() -> Any:
    """The `lockstep` command."""
    app(prog_name="lockstep")
