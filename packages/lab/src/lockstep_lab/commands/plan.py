"""`lockstep plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import ranks
from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug, Force, Overrides, as_arguments
from lockstep.cli.reporting import reporting, write_file
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig
    from lockstep_lab.plan.command import MadeUp
    from lockstep_lab.plan.inputs import PrecisionName
    from lockstep_lab.plan.search import PlanResult
    from lockstep_lab.plan.show import GpuRates


_Target = Annotated[
    str | None,
    typer.Argument(metavar="[RECIPE|FILE.yaml|FILE.py:Task]", help="Recipe or task to plan for. Not with --advise."),
]
_Gpus = Annotated[int, typer.Option("--gpus", help="GPUs of the training.", min=1)]
_GpusPerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", help="GPUs of a machine. Default: 8, or --gpus.", min=1)
]
_GpuMemory = Annotated[str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of a GPU, such as 80GB.")]
_Gpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="A GPU of the table, such as H100 or 'A100 80GB'.")
]
_LinkBandwidth = Annotated[
    str | None,
    typer.Option(
        "--link-bandwidth",
        metavar="RATE",
        help="Rate between GPUs of a machine, one GPU in one direction: 50GB/s or 400Gbit/s. Default: the table's.",
    ),
]
_NetworkBandwidth = Annotated[
    str | None,
    typer.Option(
        "--network-bandwidth",
        metavar="RATE",
        help="Rate between machines, one GPU in one direction. Default: --link-bandwidth, if it is given.",
    ),
]
_Utilisation = Annotated[
    float, typer.Option("--utilisation", help="Share of the GPU's peak that the training reaches.")
]
_Reserve = Annotated[float, typer.Option("--reserve", help="Share of the memory that stays free.", min=0, max=0.9)]
_Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        help="Size of the training set, if the data is not on this machine. The plan then names epochs.",
        min=1,
    ),
]
_Classes = Annotated[
    int | None,
    typer.Option("--classes", help="Number of classes, if the data is not on this machine. Default: 10.", min=1),
]
_FailuresPerGpuYear = Annotated[
    float | None,
    typer.Option("--failures-per-gpu-year", help="Failures of a GPU in a year: the plan then says how often to save."),
]
_SaveSeconds = Annotated[
    float | None, typer.Option("--save-seconds", help="Seconds that training pauses for each checkpoint.")
]
_JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write the plan as JSON; -: to the terminal.")
]
_Chart = Annotated[
    Path | None,
    typer.Option("--chart", metavar="FILE.svg", help="Draw the memory of each option against the limit."),
]
_Watts = Annotated[
    float | None,
    typer.Option("--watts", help="Power of a GPU with its share of the machine: the plan then names the energy."),
]
_Price = Annotated[
    float | None, typer.Option("--price-per-gpu-hour", help="Price in any currency: the plan then names the cost.")
]
_Measure = Annotated[
    bool,
    typer.Option("--measure", help="Train a few real steps here, and say how far the estimate is off."),
]
_Nproc = Annotated[
    str | None, typer.Option("--nproc", help="Ranks on this machine, or auto, with --measure. Default: 1.")
]
_Advise = Annotated[
    Path | None,
    typer.Option(
        "--advise",
        metavar="RUN_DIR",
        help="Say from the log of a run what limits it, and which keys to change.",
    ),
]


def plan(
    target: _Target = None,
    overrides: Overrides = None,
    gpus: _Gpus = 1,
    gpus_per_node: _GpusPerNode = None,
    gpu_memory: _GpuMemory = None,
    gpu: _Gpu = None,
    link_bandwidth: _LinkBandwidth = None,
    network_bandwidth: _NetworkBandwidth = None,
    utilisation: _Utilisation = 0.4,
    reserve: _Reserve = 0.1,
    samples: _Samples = None,
    classes: _Classes = None,
    failures_per_gpu_year: _FailuresPerGpuYear = None,
    save_seconds: _SaveSeconds = None,
    json_file: _JsonFile = None,
    chart: _Chart = None,
    force: Force = False,
    watts: _Watts = None,
    price: _Price = None,
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
        of_plan = {
            "--gpu": gpu,
            "--gpu-memory": gpu_memory,
            "--chart": chart,
            "--watts": watts,
            "--price-per-gpu-hour": price,
            "--gpus": gpus if gpus > 1 else None,
            "--gpus-per-node": gpus_per_node,
            "--failures-per-gpu-year": failures_per_gpu_year,
            "--save-seconds": save_seconds,
            "--link-bandwidth": link_bandwidth,
            "--network-bandwidth": network_bandwidth,
            "--samples": samples,
            "--classes": classes,
        }
        for path in (chart, _json_path(json_file)):
            check_replaceable(path, force=force)
        if advise is not None:
            _advise(advise, target, json_file, others={**of_plan, "--measure": measure or None, "--nproc": nproc})
            return
        target = _checked(target, measure=measure, nproc=nproc, chart=chart, of_plan=of_plan)
        from lockstep.trainer import foreign
        from lockstep_lab.plan import inputs, show

        config = foreign.load(target, overrides or [])
        if measure:
            options = {"--utilisation": utilisation, "--json": json_file or None, "--debug": debug, "--measure": True}
            options |= {"--force": force}
            arguments = ["plan", target, *(overrides or []), *as_arguments(options)]
            _measure(config, nproc or "1", arguments, utilisation=utilisation, json_file=json_file)
            return
        rates = show.GpuRates(watts, price)
        rates.check()
        world = inputs.world(
            gpus,
            gpus_per_node=gpus_per_node,
            gpu_memory=gpu_memory,
            gpu_name=gpu,
            link_bandwidth=link_bandwidth,
            network_bandwidth=network_bandwidth,
            utilisation=utilisation,
            fp32_as_tf32=config.compute.matmul_precision in ("high", "medium"),
        )
        from lockstep_lab.plan import command

        found = command.plan_of(
            config,
            world,
            precisions=_named_precision(config, overrides or ()),
            reserve=reserve,
            failures_per_gpu_year=failures_per_gpu_year,
            save_seconds=save_seconds,
            made_up=_made_up(overrides or (), classes, samples),
        )
        _show_plan(found, rates, chart, json_file)


def _checked(
    target: str | None, *, measure: bool, nproc: str | None, chart: Path | None, of_plan: Mapping[str, object]
) -> str:
    """The target, if the options go together.

    Args:
        of_plan: options that belong to a plan; None: the option is not given.

    Raises:
        UsageError: they do not go together, or there is no target.
    """
    if target is None:
        raise UsageError(
            "says neither what would be trained nor which run to look at",
            where="lockstep plan",
            remedy="give a recipe or FILE.py:Task, or --advise RUN_DIR",
        )
    given = [option for option, value in of_plan.items() if value is not None]
    if measure and given:
        what, remedy = "measures on this machine", "leave this option out, or leave --measure out"
        raise UsageError(what, where=f"--measure with {given[0]}", remedy=remedy)
    if nproc is not None and not measure:
        remedy = "give --gpus for a plan, or add --measure"
        raise UsageError("has no meaning without --measure", where="--nproc", remedy=remedy)
    if chart is not None and chart.suffix != ".svg":
        raise UsageError("is not the name of an SVG file", where=f"--chart {chart}", remedy="call it plan.svg")
    return target


def _made_up(overrides: Sequence[str], classes: int | None, samples: int | None) -> MadeUp | None:
    """The facts that are known of data that need not be here. None: the command line names the data.

    Raises:
        UsageError: the command line names the data, and also says what is known without them.
    """
    from lockstep_lab.plan.command import MadeUp

    if not any(each.startswith("data.train=") for each in overrides):
        return MadeUp(classes, samples)
    for option, value in (("--classes", classes), ("--samples", samples)):
        if value is not None:
            remedy = "leave this option out, or data.train"
            raise UsageError(
                "is only for data that are not on this machine, but data.train names data", where=option, remedy=remedy
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
        what, remedy = "reads the log of a run, and makes no plan", "leave this option out, or leave --advise out"
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
