"""A plan as a table for the terminal and as JSON, with energy and price on request."""

from __future__ import annotations

import dataclasses
import io
from typing import Any, NamedTuple

from lockstep.core.errors import UsageError, number_of
from lockstep_lab.plan import reading
from lockstep_lab.plan.estimate import Estimate
from lockstep_lab.plan.search import LARGEST, Option, PlanResult, gigabytes

_HOST_BOUND_S = 0.02  # forward and backward pass of a micro-batch: thousands of kernels, of some microseconds each
_STATES = ("parameters", "gradients", "optimizer", "averages")


class GpuRates(NamedTuple):
    """The rates of a GPU, for the energy and price of a training. None: that figure is not computed."""

    watts: float | None = None
    """Power of one GPU with its share of the machine and of the cooling."""
    price_per_gpu_hour: float | None = None
    """In any currency."""

    def check(self) -> None:
        """Raises:
        UsageError: a rate is not above 0.
        """
        for key, value in (("plan.watts", self.watts), ("plan.price_per_gpu_hour", self.price_per_gpu_hour)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{value:g} is not above 0", where=key, remedy="give a number such as 700 or 2.5")


NO_RATES = GpuRates()


def text(plan: PlanResult, rates: GpuRates = NO_RATES, width: int = 125) -> str:
    """The plan for people."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None, emoji=False, markup=False)
    for line in _header(plan):
        console.print(line)
    table = _table(plan)
    console.width = max(width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)  # uncut: a truncated figure is lost
    console.width = width
    for option in plan.options:
        if option.estimate is None or (option.fits is False and option.reason):
            console.print(f"{option.name}: {option.reason}")
    console.print()
    if plan.recommended is not None:
        console.print(f"Recommended: {plan.reason}.")
        console.print(f"  keys: {' '.join(plan.keys)}")
        for line in _details(plan, plan.recommended):
            console.print(f"  {line}")
    else:
        console.print(f"Recommended: nothing. {plan.reason[:1].upper()}{plan.reason[1:]}.")
    for note in plan.facts.notes:
        console.print(f"note: {note}")
    for line in _costs_of_options(plan, rates) if any(rates) else ():
        console.print(line, soft_wrap=True)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _header(plan: PlanResult) -> list[str]:
    facts, world = plan.facts, plan.world
    memory = "unknown memory" if world.memory_bytes is None else gigabytes(world.memory_bytes)
    where = _count(world.gpus) + (f" on {world.nodes} nodes" if world.nodes > 1 else "")
    flops = "unknown" if facts.flops_per_sample is None else f"{facts.flops_per_sample:.4g}"
    part = " on each GPU of a tensor group" if any(p.cut_over > 1 for p in facts.parameters) else ""
    samples = "" if facts.samples is None else f", {number_of(facts.samples, 'sample')} in an epoch"
    return [
        f"{facts.name}: {facts.elements:,} parameters in {number_of(len(facts.blocks), 'block')} and a root, "
        f"{facts.optimizer.name}",
        f"batch of {facts.global_batch}{samples}; {flops} floating-point operations for a sample{part}; {facts.data}",
        f"{where} of {memory}{f' ({world.gpu_name})' if world.gpu_name else ''}, {plan.reserve:.0%} reserved",
    ]


def _count(gpus: int) -> str:
    return f"{gpus} GPUs" if gpus > 1 else "1 GPU"


def _table(plan: PlanResult) -> Any:
    from rich import box
    from rich.table import Table

    found_all = [option.estimate for option in plan.options if option.estimate is not None]
    unit, factor = ("GB", 1e9) if any(found.memory.peak_bytes >= 1e9 for found in found_all) else ("MB", 1e6)
    timed = any(found.step_seconds is not None for found in found_all)
    title = f"{unit} of one GPU at the peak. micro: samples of a pass; max: the largest micro-batch that fits"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("option", no_wrap=True)
    times = ("step, s",) if timed else ()
    for name in ("micro", "accum.", "states", "activ.", "gathered", "peak", "fits", "max", f"sent, {unit}", *times):
        table.add_column(name, justify="right", no_wrap=True)
    for option in plan.options:
        found = option.estimate
        if found is None:
            continue
        at_peak, known = found.memory.at_peak, found.memory.activations_bytes is not None
        states = sum(at_peak.get(part, 0) for part in _STATES)
        seconds = (found.step_seconds,) if timed else ()
        table.add_row(
            f"{'*' if option is plan.recommended else ' '} {option.name}",
            str(found.setting.micro_batch),
            str(found.setting.accumulate),
            _number(states / factor),
            _number((at_peak["activations"] + at_peak["batch"]) / factor) if known else "?",
            _number(at_peak["communication"] / factor),
            f"{'' if known else '>'}{_number(found.memory.peak_bytes / factor)}",
            {True: "yes", False: "no", None: "?"}[option.fits],
            _largest(option.largest_micro_batch),
            _number(found.communication.total_bytes / factor),
            *("?" if value is None else f"{value:.3g}" for value in seconds),
        )
    return table


def _largest(micro_batch: int | None) -> str:
    return "" if micro_batch is None else f"{LARGEST}+" if micro_batch >= LARGEST else str(micro_batch)


def _number(value: float) -> str:
    return "0" if not value else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def _details(plan: PlanResult, option: Option) -> list[str]:
    found: Estimate | None = option.estimate
    assert found is not None
    setting = found.setting
    full = setting.micro_batch * setting.accumulate * setting.data_ranks == found.effective_batch
    ranks = _count(plan.world.gpus) if setting.tensor == 1 else f"{setting.data_ranks} tensor groups"
    lines = [
        f"batch: {number_of(found.effective_batch, 'sample')} = micro-batches of "
        f"{'' if full else 'up to '}{setting.micro_batch} x "
        f"{setting.accumulate} on {ranks}; learning rate {found.learning_rate:.4g} "
        f"(lr_scaling {plan.facts.lr_scaling})"
    ]
    if found.steps_per_epoch is not None:
        epoch = "" if found.epoch_seconds is None else f", {_time(found.epoch_seconds)}"
        lines.append(
            f"epoch: {number_of(found.samples_per_epoch or 0, 'sample')}, "
            f"{number_of(found.steps_per_epoch, 'step')}{epoch}"
        )
    if found.training_seconds is not None:
        lines.append(f"training: {_time(found.training_seconds)} at {plan.world.utilisation:.0%} of the GPU's peak")
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in found.memory.at_peak.items() if size)
    lines.append(f"at the peak, in the {found.memory.peak_is_in} pass: {parts}".replace("update pass", "update"))
    if found.step_seconds is not None:
        computing, sending = _time(found.compute_seconds), _time(found.communication.seconds)
        lines.append(
            f"step: {_time(found.step_seconds)}, the longer of computing ({computing}) and sending ({sending})"
        )
        if found.compute_seconds is not None and found.compute_seconds / setting.accumulate < _HOST_BOUND_S:
            lines.append(
                "a step this short may be limited by the host, which launches each kernel: then it takes longer, and "
                "so do training, energy and price"
            )
    lines += reading.lines(plan.facts.reading, found)
    sent = ", ".join(f"{name} {gigabytes(size)}" for name, size in found.communication.sent_bytes.items())
    lines.append(f"each GPU sends in a step: {sent or 'nothing'}")
    for each in found.communication.traffic if setting.tensor > 1 else ():
        where = "in a machine" if each.span <= plan.world.gpus_per_node else "between machines"
        many = f"{each.times or '?'} collective{'s' * (each.times != 1)} {where}"
        lines.append(f"  {each.group:<9}  {each.collective:<14}  {gigabytes(each.sent_bytes):>9} in {many}")
    if found.memory.host_bytes:
        lines.append(f"host memory: {gigabytes(found.memory.host_bytes * plan.world.gpus_per_node)} on each node")
    lines.append(f"checkpoint: {gigabytes(found.checkpoint_bytes)}")
    if plan.save_every_seconds is not None:
        lines.append(
            f"save every {_time(plan.save_every_seconds)} (Young, Daly): "
            f"checkpoint.every_minutes={plan.save_every_seconds / 60:.3g}"
        )
    return lines


def cost(seconds: float | None, gpus: int, rates: GpuRates) -> dict[str, float | None] | None:
    """GPU hours, kWh and price of `gpus` GPUs for a time. None: the time, or the rate of a figure, is unknown."""
    if seconds is None:
        return None
    hours, (watts, price) = seconds / 3600 * gpus, rates
    return {
        "gpu_hours": hours,
        "kilowatt_hours": None if watts is None else hours * watts / 1000,
        "price": None if price is None else hours * price,
    }


def _costs(found: Estimate, rates: GpuRates) -> dict[str, dict[str, float | None] | None]:
    """By time: of an epoch, and of the training."""
    times = {"epoch": found.epoch_seconds, "training": found.training_seconds}
    return {name: cost(seconds, found.setting.world.gpus, rates) for name, seconds in times.items()}


def _costs_of_options(plan: PlanResult, rates: GpuRates) -> list[str]:
    lines, wide = [], max((len(option.name) for option in plan.options), default=0)
    for option in plan.options:
        if option.estimate is None or option.fits is False or option.estimate.epoch_seconds is None:
            continue
        costs = {name: cost_text(found) for name, found in _costs(option.estimate, rates).items() if found}
        whole = f"; the training {costs['training']}" if "training" in costs else ""
        mark = "*" if option is plan.recommended else " "
        lines.append(f"{mark} {option.name:<{wide}}  an epoch {costs['epoch']}{whole}")
    if lines:
        return [f"energy and price, at {plan.world.utilisation:.0%} of the GPU's peak:", *lines]
    return [
        "energy and price are unknown, because the time is. Give --gpu NAME, data with a known length, and "
        "for several GPUs a bandwidth"
    ]


def cost_text(found: dict[str, float | None]) -> str:
    """A cost for people, such as `512 GPU hours, 358 kWh, price 1,280.00`."""
    parts = []
    for value, unit in ((found["gpu_hours"], "GPU hours"), (found["kilowatt_hours"], "kWh")):
        parts += [f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"] if value is not None else []
    return ", ".join([*parts, *([f"price {found['price']:,.2f}"] if found["price"] is not None else [])])


def as_json(plan: PlanResult, rates: GpuRates = NO_RATES) -> dict[str, Any]:
    """The plan as JSON values. The names contain the units: `_bytes`, `_seconds`, `_flops`."""
    facts = plan.facts
    model = ("name", "buffers_bytes", "flops_per_sample", "forward_flops_per_sample", "global_batch", "data", "notes")
    of_plan = ("reserve", "reason", "keys", "save_every_seconds")
    summary = {name: getattr(facts, name) for name in model} | {
        "parameters": facts.elements,
        "trainable_parameters": sum(p.elements * p.cut_over for p in facts.parameters if p.trainable),
        "blocks": list(facts.blocks),
        "optimizer": facts.optimizer.name,
        "samples_per_epoch": facts.samples,
        "is_traced": bool(facts.passes),
    }
    return {
        "model": summary,
        "world": dataclasses.asdict(plan.world) | {"nodes": plan.world.nodes},
        "options": [_option(option, rates) for option in plan.options],
        "recommended": plan.recommended.name if plan.recommended else None,
        **{name: getattr(plan, name) for name in of_plan},
    }


def _option(option: Option, rates: GpuRates) -> dict[str, Any]:
    found = option.estimate
    names = ("name", "fits", "largest_micro_batch", "reason")
    values: dict[str, Any] = {name: getattr(option, name) for name in names} | {"setting": None, "estimate": None}
    if found is not None:
        estimate = dataclasses.asdict(found)
        setting = estimate.pop("setting")
        del setting["world"]
        estimate["memory"]["states_bytes"] = found.memory.states_bytes
        estimate["communication"]["total_bytes"] = found.communication.total_bytes
        estimate["communication"]["sent_bytes"] = found.communication.sent_bytes
        values |= {"setting": {**setting, "shards": found.setting.shards}, "estimate": estimate}
    return values | ({"cost": found and _costs(found, rates)} if any(rates) else {})
