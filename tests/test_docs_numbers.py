"""Numbers that stand on several pages are those of their home: benchmarks/RESULTS.md, or a file."""

import re

import pytest

from tests.processes import ROOT

RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
README = (ROOT / "README.md").read_text()


def row_of(text, name):
    line = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_steps_of_the_readme_are_those_that_were_measured():
    steps = row_of(RESULTS, "`steps`")
    assert row_of(README, "a step of a very small network") == steps
    contract = " ".join((ROOT / "docs" / "contract.md").read_text().split())
    assert f"{steps[1]} instead of {steps[0]}" in contract


def test_rows_of_the_readme_have_the_numbers_of_the_table_of_all_figures():
    table = RESULTS.partition("## Compared with other trainers")[2]
    shares = [float(cell) for cell in row_of(table, "`exact`")]
    shown = [float(cell.rstrip("%")) / 100 for cell in row_of(README, "error of the update")]
    assert shown == pytest.approx(shares, rel=0.15)
    assert row_of(README, "stopped within an epoch and resumed") == row_of(table, "`resume`")


def test_ratios_of_the_contract_are_those_that_were_measured():
    contract = " ".join((ROOT / "docs" / "contract.md").read_text().split())
    one, one_ms, two, two_ms = re.search(
        r"longer: ([\d.]+) times as long for a step of ([\d.]+) ms on one rank, ([\d.]+) times for ([\d.]+) ms on two",
        contract,
    ).groups()
    for ranks, ratio, ms in ((1, one, one_ms), (2, two, two_ms)):
        measured, _, found = row_of(RESULTS, f"{ranks} |")[:3]
        assert f"{float(measured.split()[0]):.1f}" == ms
        assert found.startswith(f"{ratio} (")


def test_lengths_of_files_are_counted():
    said = re.search(r"writes a first task of (\d+) lines", (ROOT / "docs" / "tasks.md").read_text())[1]
    skeleton = ROOT / "src" / "lockstep" / "migration" / "task_skeleton.py.txt"
    assert int(said) == len(skeleton.read_text().splitlines())


def test_the_way_of_a_batch_names_folders_that_exist():
    way = (ROOT / "docs" / "step.md").read_text().split("\n\n")[1].strip().split(" -> ")
    assert way[0] == "cli"
    for name in way:
        if name not in ("your loss", "optimizer.step"):
            place = ROOT / "src" / "lockstep" / name
            assert place.is_dir() or place.with_suffix(".py").is_file(), name
