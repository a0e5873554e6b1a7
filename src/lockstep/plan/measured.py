"""What was measured in real steps, beside an estimate of the same setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.plan.chart import gb
from lockstep.plan.estimate import Estimate

_EXPLAINED = 0.05  # differences from this share on are explained


@dataclass(frozen=True)
class Measured:
    """Figures of the rank with the largest peak."""

    world: int
    device: str
    on_gpu: bool
    """Whether the device has memory of its own."""
    strategy: str
    precision: str
    micro_batch: int
    accumulate: int
    recompute: bool
    parameters_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    optimizer_bytes: int
    averages_bytes: int
    activations_bytes: int
    """Bytes at the end of a forward pass that were not there before: what the backward pass needs. With shards, also
    the gathered parameters outside of the blocks."""
    batch_bytes: int
    peak_bytes: int
    flops_per_sample: float | None
    """Forward and backward pass. None: they could not be counted."""
    step_seconds: float
    """Median of a few steps."""


@dataclass(frozen=True)
class Difference:
    """A part of an estimate beside its measurement."""

    part: str
    estimated: float | None
    """None: the estimate does not know it."""
    measured: float | None
    unit: str
    """`bytes`, `flops` or `seconds`."""

    @property
    def off(self) -> float | None:
        """(estimated - measured) / measured. None: one of them is not known, or nothing was measured."""
        if self.estimated is None or not self.measured:
            return None
        return self.estimated / self.measured - 1


def differences(estimated: Estimate, measured: Measured, activations: int | None) -> list[Difference]:
    """The parts of an estimate, beside what was measured in the same setting.

    Args:
        activations: bytes that the estimate gives for `Measured.activations_bytes`. None: it does not know them.
    """
    memory = estimated.memory
    states = sum(
        (measured.parameters_bytes, measured.gradients_bytes, measured.optimizer_bytes, measured.averages_bytes)
    )
    peak = None if memory.activations_bytes is None else memory.peak_bytes
    rows = [
        Difference("parameters", memory.parameters_bytes, measured.parameters_bytes, "bytes"),
        Difference("gradients", memory.gradients_bytes, measured.gradients_bytes, "bytes"),
        Difference("optimizer", memory.optimizer_bytes, measured.optimizer_bytes, "bytes"),
        Difference("averages", memory.averages_bytes, measured.averages_bytes, "bytes"),
        Difference("all states", memory.states_bytes, states, "bytes"),
        Difference("kept by a forward pass", activations, measured.activations_bytes, "bytes"),
        Difference("peak", peak, measured.peak_bytes, "bytes"),
        Difference("operations of a sample", estimated.flops_per_sample, measured.flops_per_sample, "flops"),
        Difference("time of a step", estimated.step_seconds, measured.step_seconds, "seconds"),
    ]
    return [row for row in rows if row.estimated or row.measured]


def text(rows: Sequence[Difference], measured: Measured, peak_flops: float | None = None) -> str:
    """The differences as a table for people.

    Args:
        peak_flops: most operations of a rank's device in a second. None: not known.
    """
    about = f"{measured.world} rank{'s' * (measured.world > 1)} on {measured.device}, {measured.strategy}, "
    about += f"{measured.precision}, micro-batch of {measured.micro_batch}"
    about += f" x {measured.accumulate}" if measured.accumulate > 1 else ""
    about += ", activations computed again" if measured.recompute else ""
    cells = [("", "estimated", "measured", "off")]
    for row in rows:
        off = "" if row.off is None else f"{row.off:+.1%}"
        cells.append((row.part, _shown(row.estimated, row.unit), _shown(row.measured, row.unit), off))
    by = "max_memory_allocated" if measured.on_gpu else "bytes of tensors"
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"measured in real steps: {about}; memory by {by}"]
    for first, *others in cells:
        rest = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *rest)).rstrip())
    lines += _explained({row.part: row.off for row in rows})
    rate = flops_per_second(measured)
    if rate is not None:
        lines.append(f"a rank computes {rate / 1e12:.3g} x 10^12 operations in a second")
        if peak_flops:
            lines[-1] += f", {rate / peak_flops:.0%} of its peak: --utilisation {rate / peak_flops:.2g}"
    return "\n".join(lines)


def _explained(off: Mapping[str, float | None]) -> list[str]:
    """Why parts of an estimate are off, where the reason is known."""
    lines = []
    if (off.get("operations of a sample") or 0.0) > _EXPLAINED:
        lines.append("the estimate is for the longest samples of the data, and the measured samples were shorter")
    if (off.get("peak") or 0.0) < -_EXPLAINED:
        lines.append(
            "the measured peak has buffers inside of operators, such as convolutions, and on a CPU the copies that "
            "gloo makes of what it sends: torch tells neither before they run, and the estimate leaves them out"
        )
    return lines


def flops_per_second(measured: Measured) -> float | None:
    """Operations of a rank in a second. None: they could not be counted."""
    if measured.flops_per_sample is None:
        return None
    return measured.flops_per_sample * measured.micro_batch * measured.accumulate / measured.step_seconds


def as_json(rows: Sequence[Difference], measured: Measured) -> dict[str, Any]:
    """For `json.dumps`."""
    return {"measured": asdict(measured), "differences": [asdict(row) | {"off": row.off} for row in rows]}


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    if unit == "bytes":
        return gb(value)
    return f"{value:.3g} s" if unit == "seconds" else f"{value / 1e9:.4g} x 10^9"
