"""The report of `make test-gpu` and the page of the benchmark, without a GPU."""

import importlib.util
import sys
from argparse import Namespace

import pytest
import torch

from tests.gpu import report

CASE = {"model": "gpt125m", "precision": "bf16", "compile": False, "batch": 16, "side": 1024, "flops": 1e13}
FIGURES = {"plain_s": 0.1, "ours_s": 0.102, "ratio": 1.02, "least": 1.0, "largest": 1.1, "skipped": 2, "tf32": False}
SAVES = {mode: {"blocked": 0.25, "written": 2.0, "bytes": 1.5e9} for mode in ("async", "sync")}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(report.ROOT / "benchmarks"))  # it imports the harness next to it
    spec = importlib.util.spec_from_file_location("benchmark_gpu", report.ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("made", ["report", "benchmark"])
def test_without_a_gpu_it_says_so_and_ends_without_an_error(made, benchmark, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [made, "--output", str(tmp_path / "page.md")])
    assert {"report": report, "benchmark": benchmark}[made].main() == 0
    assert "no GPU with torch's CUDA interface is visible" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_page_has_a_row_for_each_case_and_names_those_that_failed(benchmark):
    peaks = {"plain": 2**31, "ours": 2**30}
    cases = [CASE | FIGURES | {"peaks": peaks, "saves": SAVES}, CASE | {"error": "OutOfMemoryError: a | b"}]
    arguments = Namespace(device="cpu", gpus=1, small=False, rounds=7, steps=20, workers=4)
    lines = benchmark.page(cases, arguments, "the command")
    assert any(line.startswith("`the command`: 7 rounds of 20 steps") for line in lines)
    row = next(line for line in lines if "1.020 (1.000 to 1.100)" in line)
    cells = ["gpt125m", "bf16", "no", "16", "100.0 ms", "102.0 ms", "1.020 (1.000 to 1.100)", "157", "160,627"]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *cells,
        "unknown",
        "unknown",
        "2.00 GiB",
        "1.00 GiB",
    ]
    assert any("OutOfMemoryError: a / b" in line and line.count("|") == row.count("|") for line in lines)
    assert "| gpt125m | 1.50 GB | 0.250 s | 2.00 s | 0.25 s |" in lines
    assert any("2 steps overflowed" in line for line in lines)


def test_report_has_the_results_of_tests_and_their_reasons(monkeypatch):
    def write(command, **_):
        file = next(word.partition("=")[2] for word in command if word.startswith("--junitxml="))
        body = '<testcase classname="tests.gpu.test_a" name="good"/>'
        body += '<testcase classname="tests.gpu.test_a" name="bad"><failure message="assert 1\n == 2"/></testcase>'
        body += '<testcase classname="tests.gpu.test_b" name="left"><skipped message="needs two GPUs"/></testcase>'
        with open(file, "w") as opened:
            opened.write(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
        return Namespace(returncode=1)

    monkeypatch.setattr(report.subprocess, "run", write)
    lines, code = report.run_tests("cpu", [])
    assert code == 1
    assert lines[0] == "1 tests passed, 1 failed, 1 were skipped."
    assert "- **failed** `test_a::bad`: assert 1 == 2" in lines
    assert "- skipped `test_b::left`: needs two GPUs" in lines
