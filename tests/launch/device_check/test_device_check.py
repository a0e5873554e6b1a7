"""Known answers: right on this machine, and whoever lies is named."""

import json
from dataclasses import replace

import pytest
import torch

from lockstep.cli import application as cli
from lockstep.cli.preflight import table
from lockstep.core.parallel.world import World
from lockstep.launch.device_check import cases, exchanges, judgement, memory, run
from lockstep.launch.device_check.run import DeviceReport, Tally
from tests.launch.device_check import faulty
from tests.ranks import run_ranks
from tests.selection import mainly

CASES = {case.label: case for case in cases.cases(64)}


@pytest.mark.parametrize("label", CASES)
def test_a_right_result_is_right_and_a_flipped_bit_is_wrong(label):
    case = CASES[label]
    result = case.compute(*case.inputs)
    assert cases.first_wrong(case, result) is None
    wrong = result.clone()
    faulty.flip(wrong, -2)  # the highest bit of the exponent
    assert "should be" in cases.first_wrong(case, wrong)
    wrong.flatten()[-1] = float("nan")
    assert "nan" in cases.first_wrong(case, wrong)


@pytest.mark.parametrize("label", [label for label, case in CASES.items() if case.bound is None])
def test_an_exact_case_has_whole_numbers_that_the_format_has(label):
    case = CASES[label]
    result = case.compute(*case.inputs)
    assert torch.equal(result.double(), case.right)
    assert torch.equal(case.right, case.right.round())
    wrong = result.clone()
    faulty.flip(wrong, 0)  # the lowest bit
    assert "bit 0 of" in cases.first_wrong(case, wrong) or "right is 0.0" in cases.first_wrong(case, wrong)


@pytest.mark.parametrize("format_", mainly(["bf16"], ["bf16", "fp16"]))
def test_sums_of_exact_products_stay_where_16_bits_have_all_whole_numbers(format_):
    """Also the sums of parts, which a kernel may round to 16 bits, at the size that GPUs get."""
    case = cases._exact_product(format_, cases.FORMATS[format_], 2048)
    parts = [left.double() @ right.double() for left, right in zip(*_halves(case), strict=True)]
    largest = max(float(part.abs().max()) for part in [*parts, case.right])
    assert largest <= 256


def _halves(case):
    left, right = case.inputs
    return left.chunk(2, 1), right.chunk(2, 0)


def test_products_are_within_their_bound_for_every_order_of_additions():
    """The bound is one of mathematics: sums from the right, from the left and in pairs are within it."""
    case = CASES["products fp32"]
    left, right = case.inputs
    forwards = sum(left[:, [place]] * right[[place]] for place in range(len(right)))
    backwards = sum(left[:, [place]] * right[[place]] for place in reversed(range(len(right))))
    assert not torch.equal(forwards, backwards)
    assert cases.first_wrong(case, forwards) is None
    assert cases.first_wrong(case, backwards) is None


def wrong_labels(reports):
    return {(report.rank, label) for report in reports for label, tally in report.tallies.items() if tally.wrong}


@pytest.mark.exhaustive  # below, of three ranks the two right ones have none
def test_a_device_without_faults_has_none_on_three_ranks():
    reports = run_ranks(3, faulty.check, None, "")[0]
    assert wrong_labels(reports) == set()
    assert {finding.level for finding in judgement.findings(reports)} == {"ok"}
    assert all(tally.runs >= 2 for label, tally in reports[0].tallies.items() if label in CASES)


@pytest.mark.parametrize(
    ("operation", "bit", "says"),
    mainly(
        [("aten.mm", -2, "whole products")],
        [
            ("aten.mm", -2, "whole products"),  # each product of a rank is wrong
            ("aten.convolution.default", -2, "convolution"),
            ("aten.sort", -3, "sort"),
            ("all_reduce", 0, "sum over ranks bf16"),
            ("memory", 0, "memory, zeros"),
        ],
    ),
)
def test_the_rank_that_lies_is_named(operation, bit, says):
    reports = run_ranks(3, faulty.check, 1, operation, bit)[0]
    assert {rank for rank, _ in wrong_labels(reports)} == {1}
    assert any(label.startswith(says) for _, label in wrong_labels(reports))
    faults = [finding for finding in judgement.findings(reports) if finding.level == "fault"]
    assert any("rank 1 (node" in fault.what and fault.check.startswith(says) for fault in faults)


@pytest.mark.exhaustive
def test_a_fault_that_comes_later_is_a_difference_from_the_first_run():
    """A low bit is within the bound: only the repetition shows it."""
    reports = run_ranks(1, faulty.check, 0, "aten.mm", 0, 4, 3)[0]
    wrong = [tally for tally in reports[0].tallies.values() if tally.wrong]
    assert any("different bits than the first run" in tally.first for tally in wrong)


@pytest.mark.exhaustive
def test_a_low_bit_that_is_always_wrong_shows_in_the_comparison_of_ranks():
    reports = run_ranks(3, faulty.check, 2, "aten.mm", 0)[0]
    found = {finding.check: finding for finding in judgement.findings(reports) if finding.level == "fault"}
    assert "rank 2 (node" in found["products fp32"].what
    assert "different bits than 2 ranks of the same kind" in found["products fp32"].what


def report(rank, kind="a", **tallies):
    return DeviceReport(rank, f"node{rank}", "cpu", kind, tallies)


def test_devices_of_another_kind_may_have_other_bits():
    reports = [report(0, one=Tally(2, digest="1")), report(1, "b", one=Tally(2, digest="2"))]
    assert [finding.level for finding in judgement.findings(reports)] == ["ok"]
    two = judgement.findings([reports[0], replace(reports[1], kind="a")])
    assert "there is no majority" in two[0].what


def test_a_case_that_a_device_lacks_is_skipped_with_the_reason():
    found = judgement.findings([report(0, one=Tally(skipped="not implemented for 'Half'"))])
    assert (found[0].level, found[0].what) == ("skipped", "not implemented for 'Half'")


def test_memory_whose_bit_sticks_is_found():
    blocks = [torch.zeros(memory._BLOCK, dtype=torch.int64)]
    assert memory._first_wrong(blocks, 0) is None
    blocks[0][100] = 1 << 3
    assert memory._first_wrong(blocks, 0) == "1 wrong word of 8 bytes: byte 800 and the next 7 differ in 1 bit"


def messages(_):
    from lockstep.core.parallel.world import join_world

    with join_world("cpu") as world:
        return list(exchanges.check(world))


def test_messages_go_to_ranks_at_distances_of_powers_of_two():
    found = run_ranks(4, messages, None)
    assert [label for label, _ in found[0] if "distance" in label] == [
        "messages at distance 1",
        "messages at distance 2",
    ]
    assert all(wrong is None for of_rank in found for _, wrong in of_rank)


def test_the_command_prints_a_table_and_writes_the_reports(tmp_path, monkeypatch, capsys):
    file = tmp_path / "reports.json"
    monkeypatch.setattr("sys.argv", ["lockstep", "doctor", "check-device", "--seconds", "0", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "whole products fp32" in printed
    assert json.loads(file.read_text())[0]["tallies"]["sort fp32"]["wrong"] == 0


@pytest.mark.exhaustive
def test_the_command_ends_with_3_where_a_device_lies(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lockstep", "doctor", "check-device", "--seconds", "0"])
    with faulty.Flips("aten.sort"), pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    assert "FAULT" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_preflight_makes_the_check_if_asked(monkeypatch):
    world = World(0, 1, 0, torch.device("cpu"))
    reports = run.check(world, seconds=0)
    shown = table(judgement.findings(reports))
    assert "ok       whole products fp64" in shown
    assert judgement.table(reports).splitlines()[0].split() == ["rank", "node", "device", "results", "wrong"]
