"""Who differs: judges the reports of all ranks. Nothing here computes on a device or communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.core.errors import number_of
from lockstep.launch.device_check.run import DeviceReport, Tally
from lockstep.launch.preflight.judgement import Level, PreflightFinding

_REMEDY = (
    "take this device out of the training and run lockstep doctor check-device --seconds 600 only on it; if its "
    "results are wrong again, it is defective: run the vendor's diagnostics (NVIDIA: dcgmi diag -r 4) and replace it"
)
_REMEDY_EXCHANGE = (
    "check the cables, the switch and the memory of both ends; if messages between all other ranks are correct, "
    "remove the node that all wrong messages have in common"
)
_REMEDY_BITS = (
    "the same model and libraries compute different bits: compare clocks, firmware and driver; run --seconds 600 on "
    "each; a device that differs from all others is suspect, even if its results are within the bound"
)


def findings(reports: Sequence[DeviceReport]) -> list[PreflightFinding]:
    """A finding for each case, in order, and one for each rank with wrong results."""
    found = []
    for label in dict.fromkeys(label for report in reports for label in report.tallies):
        tallies = {report.rank: report.tallies[label] for report in reports if label in report.tallies}
        found += _of_case(label, tallies, reports)
    return found


def _of_case(label: str, tallies: dict[int, Tally], reports: Sequence[DeviceReport]) -> list[PreflightFinding]:
    ran = {rank: tally for rank, tally in tallies.items() if not tally.skipped}
    if not ran:
        return [PreflightFinding(label, Level.SKIPPED, next(iter(tallies.values())).skipped)]
    found = []
    is_exchange = label.startswith(("sum over", "copy to", "shares of", "messages"))
    for rank, tally in ran.items():
        if tally.wrong:
            what = f"{named(reports[rank])}: {tally.wrong} of {tally.runs} results are wrong; {tally.first}"
            found.append(PreflightFinding(label, Level.FAULT, what, _REMEDY_EXCHANGE if is_exchange else _REMEDY))
    if found:
        return found
    if others := _other_bits({rank: tally.digest for rank, tally in ran.items()}, reports):
        return [PreflightFinding(label, Level.FAULT, others, _REMEDY_BITS)]
    runs = sum(tally.runs for tally in ran.values())
    return [PreflightFinding(label, Level.OK, f"{number_of(runs, 'result')} on {_ranks(len(ran))}")]


def _other_bits(digests: dict[int, str], reports: Sequence[DeviceReport]) -> str:
    """Which ranks have different bits than the others of their kind, in words; empty if none has."""
    for kind in dict.fromkeys(reports[rank].kind for rank in digests):
        of_kind = {rank: digest for rank, digest in digests.items() if reports[rank].kind == kind}
        usual, count = Counter(of_kind.values()).most_common(1)[0]
        if count == len(of_kind):
            continue
        others = [rank for rank, digest in of_kind.items() if digest != usual]
        if 2 * count > len(of_kind):
            shown = ", ".join(named(reports[rank]) for rank in others)
            return f"{shown}: different bits than {_ranks(count)} of the same kind ({kind})"
        shown = ", ".join(f"{named(reports[rank])}: {digest}" for rank, digest in of_kind.items())
        return f"ranks of the same kind have different bits, and there is no majority ({shown})"
    return ""


def named(report: DeviceReport) -> str:
    """A rank with its node and its device."""
    return f"rank {report.rank} (node {report.node}, {report.device})"


def _ranks(count: int) -> str:
    return f"{number_of(count, 'rank')}"


def table(reports: Sequence[DeviceReport]) -> str:
    """A line for each rank: how many results were compared, and how many were wrong."""
    rows = [("rank", "node", "device", "results", "wrong")]
    rows += [(str(one.rank), one.node, one.device, str(one.runs), str(one.wrong)) for one in reports]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, (str.rjust, str.ljust, str.ljust, str.rjust, str.rjust), strict=True)
        lines.append("  ".join(justify(cell, width) for cell, width, justify in cells).rstrip())
    return "\n".join(lines)
