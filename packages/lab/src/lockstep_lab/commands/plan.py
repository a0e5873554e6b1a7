"""`lockstep plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import ranks
from lockstep.cli.commands import takes_keys
from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug, Force, Overrides, as_arguments
from lockstep.cli.reporting import reporting, write_file
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig
    from lockstep_lab.commands.plan_keys import PlanKeys
    from lockstep_lab.plan.command import MadeUp
    from lockstep_lab.plan.inputs import PrecisionName
    from lockstep_lab.plan.search import PlanResult
    from lockstep_lab.plan.show import GpuRates


_Target = Annotated[
    str | None,
    typer.Argument(metavar="[RECIPE|FILE.yaml|FILE.py:Task]", help="Recipe or task to plan for. Not with --advise."),
]
_Gpus = Annotated[int, typer.Option("--gpus", help="GPUs of the training.", min=1)]
_GpuMemory = Annotated[str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of a GPU, such as 80GB.")]
_Gpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="A GPU of the table, such as H100 or 'A100 80GB'.")
]
_JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write the plan as JSON; -: to the terminal.")
]
_Chart = Annotated[
    Path | None,
    typer.Option("--chart", metavar="FILE.svg", help="Draw the memory of each option against the limit."),
]
_Measure = Annotated[
    bool,
    typer.Option("--measure", help="Train a few real steps here, and report how far the estimate is off."),
]
_Nproc = Annotated[
    str | None, typer.Option("--nproc", help="Ranks on this machine, or auto, with --measure. Default: 1.")
]
_Advise = Annotated[
    Path | None,
    typer.Option(
        "--advise",
        metavar="RUN_DIR",
        help="Report from the log of a run what limits it, and which keys to change.",
    ),
]


@takes_keys("plan", "lockstep_lab.commands.plan_keys:PlanKeys")
def plan(
    target: _Target = None,
    overrides: Overrides = None,
    gpus: _Gpus = 1,
    gpu_memory: _GpuMemory = None,
    gpu: _Gpu = None,
    json_file: _JsonFile = None,
    chart: _Chart = None,
    force: Force = False,
    measure: _Measure = False,
    nproc: _Nproc = None,
    advise: _Advise = None,
    debug: Debug = False,
) -> None:
    """Estimate what fits on GPUs, how fast it is, and what to set. No GPU is needed.

    The task's model is made without memory, and its step runs on tensors without values.

    Example: lockstep plan --advise runs/digits

    Example: lockstep plan digits --measure --nproc 2
    """
    with reporting(debug):
        from lockstep.cli import command_keys
        from lockstep_lab.commands.plan_keys import PlanKeys

        config_keys, keys = command_keys.split(overrides or (), "plan", PlanKeys)
        of_plan = {
            "--gpu": gpu,
            "--gpu-memory": gpu_memory,
            "--chart": chart,
            "--gpus": gpus if gpus > 1 else None,
            **dict.fromkeys(command_keys.given("plan", keys), True),
        }
        for path in (chart, _json_path(json_file)):
            check_replaceable(path, force=force)
        if advise is not None:
            _advise(advise, target, json_file, others={**of_plan, "--measure": measure or None, "--nproc": nproc})
            return
        target = _checked(target, measure=measure, nproc=nproc, chart=chart, of_plan=of_plan)
        from lockstep.trainer import foreign
        from lockstep_lab.plan import inputs, show

        config = foreign.load(target, config_keys)
        if measure:
            options = {"--json": json_file or None, "--debug": debug, "--measure": True, "--force": force}
            arguments = ["plan", target, *(overrides or []), *as_arguments(options)]
            _measure(config, nproc or "1", arguments, utilisation=keys.utilisation, json_file=json_file)
            return
        rates = show.GpuRates(keys.watts, keys.price_per_gpu_hour)
        rates.check()
        world = inputs.world(
            gpus,
            gpus_per_node=keys.gpus_per_node,
            gpu_memory=gpu_memory,
            gpu_name=gpu,
            link_bandwidth=keys.link_bandwidth,
            network_bandwidth=keys.network_bandwidth,
            utilisation=keys.utilisation,
            fp32_as_tf32=config.compute.matmul_precision in ("high", "medium"),
        )
        from lockstep_lab.plan import command

        found = command.plan_of(
            config,
            world,
            precisions=_named_precision(config, config_keys),
            reserve=keys.reserve,
            failures_per_gpu_year=keys.failures_per_gpu_year,
            save_seconds=keys.save_seconds,
            made_up=_made_up(config_keys, keys),
        )
        _show_plan(found, rates, chart, json_file)


def _checked(
    target: str | None, *, measure: bool, nproc: str | None, chart: Path | None, of_plan: Mapping[str, object]
) -> str:
    """The target, if the options go together.

    Args:
        of_plan: options and keys that belong to a plan; None: it is not given.

    Raises:
        UsageError: they do not go together, or there is no target.
    """
    if target is None:
        raise UsageError(
            "says neither what would be trained nor which run to look at",
            where="lockstep plan",
            remedy="give a recipe or FILE.py:Task, or --advise RUN_DIR",
        )
    given = [one for one, value in of_plan.items() if value is not None and one != "plan.utilisation"]
    if measure and given:
        what, remedy = "measures on this machine", "leave it out, or leave --measure out"
        raise UsageError(what, where=f"--measure with {given[0]}", remedy=remedy)
    if nproc is not None and not measure:
        remedy = "give --gpus for a plan, or add --measure"
        raise UsageError("has no meaning without --measure", where="--nproc", remedy=remedy)
    if chart is not None and chart.suffix != ".svg":
        raise UsageError("is not the name of an SVG file", where=f"--chart {chart}", remedy="call it plan.svg")
    return target


def _made_up(overrides: Sequence[str], keys: PlanKeys) -> MadeUp | None:
    """The facts that are known of data that need not be here. None: the command line names the data.

    Raises:
        UsageError: the command line names the data, and also says what is known without them.
    """
    from lockstep_lab.plan.command import MadeUp

    if not any(each.startswith("data.train=") for each in overrides):
        return MadeUp(keys.classes, keys.samples)
    for path, value in (("plan.classes", keys.classes), ("plan.samples", keys.samples)):
        if value is not None:
            remedy = "leave this key out, or data.train"
            raise UsageError(
                "is only for data that are not on this machine, but data.train names data", where=path, remedy=remedy
            )
    return None


def _named_precision(config: RunConfig, overrides: Sequence[str]) -> list[PrecisionName] | None:
    """The precision that the command line gives as a key. None: the plan tries several."""
    return [config.precision] if any(each.startswith("precision=") for each in overrides) else None


def _advise(folder: Path, target: str | None, json_file: str | None, *, others: Mapping[str, object]) -> None:
    """Show what limits a run.

    Args:
        others: options that do not belong to advice; None: the option is not given.
    """
    if target is not None:
        raise UsageError(
            "reads a run, and takes no target",
            where="--advise",
            remedy=f"leave {target} out: lockstep plan --advise {folder}",
        )
    given = [option for option, value in others.items() if value is not None]
    if given:
        what, remedy = "reads the log of a run, and makes no plan", "leave it out, or leave --advise out"
        raise UsageError(what, where=f"--advise with {given[0]}", remedy=remedy)
    from lockstep_lab.plan import advise

    advised = advise.advise(folder)
    _show(advise.text(advised), advise.as_json(advised), json_file)


def _measure(config: RunConfig, nproc: str, arguments: list[str], *, utilisation: float, json_file: str | None) -> None:
    """Start the ranks that run `lockstep ARGUMENTS`, or be one of them. Rank 0 shows what was measured."""
    if ranks.is_launcher(nproc):
        ranks.launch(arguments, nproc, config)
        return
    from lockstep_lab.plan import measure

    found = measure.measure(config)
    if found is None:  # another rank than 0
        return
    setting, rows = measure.compare(config, found, utilisation)
    _show(measure.text(rows, found, setting.world.peak_flops), measure.as_json(rows, found), json_file)


def _show_plan(found: PlanResult, rates: GpuRates, chart: Path | None, json_file: str | None) -> None:
    """Show a plan, with what it costs where that is asked for. Draw its chart, if there is a place for it."""
    from lockstep_lab.plan import show

    text = show.text(found, rates).removesuffix("\n")
    if chart is not None:
        from lockstep_lab.plan import chart as charts

        write_file(chart, charts.of_plan(found))
        text += f"\nwritten: {chart}"
    _show(text, show.as_json(found, rates), json_file)


def _show(text: str, values: Any, json_file: str | None) -> None:
    """Print the text, and write the values into a file, if there is one; or print them alone, as JSON."""
    written = json.dumps(values, indent=1)
    if json_file == "-":
        print(written)
        return
    print(text)
    if json_file is not None:
        write_file(Path(json_file), written)
        print(f"written: {json_file}")


def _json_path(json_file: str | None) -> Path | None:
    """The file of --json. None: there is none, or it is the terminal."""
    return Path(json_file) if json_file not in (None, "-") else None


COMMAND = JoinedCommand(plan, "lockstep plan imagenet --gpus 8 --gpu 'A100 80GB'")
