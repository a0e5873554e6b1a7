"""Everything that the GPUs of this machine can show, in one file: the tests on GPUs, and then the benchmark.

    python -m tests.gpu.report [--output gpu-report.md] [--device cpu --small]

Without a GPU with torch's CUDA interface it says so, and ends with exit code 0. `--device cpu --small` tries out the
report itself: the tests run on the CPU, and the benchmark with tiny models.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

import torch

from tests.gpu.place import VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def run_tests(device, selection):
    """Run the tests on a device. Returns lines of the report, and the exit code of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", f"--junitxml={file}", *selection]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | {VARIABLE: device}, check=False).returncode
        if not file.exists():
            return [f"pytest ended with exit code {code} and wrote no results."], code
        cases = list(xml.parse(file).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    lines = [f"{passed} tests passed, {len(failed)} failed, {len(skipped)} were skipped.", ""]
    lines += [f"- **failed** `{_name(case)}`: {_reason(case, 'failure', 'error')}" for case in failed]
    lines += [f"- skipped `{_name(case)}`: {_reason(case, 'skipped')}" for case in skipped]
    return lines, code


def _name(case):
    return f"{case.get('classname', '').removeprefix('tests.gpu.')}::{case.get('name')}"


def _reason(case, *kinds):
    found = next(case.find(kind) for kind in kinds if case.find(kind) is not None)
    return re.sub(r"\s+", " ", found.get("message") or "").strip()[:300]


def run_benchmark(device, small):
    """Run the benchmark. Returns lines of the report, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.md")
        command = [sys.executable, "benchmarks/gpu.py", "--device", device, "--output", str(file)]
        command += ["--small"] if small else []
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        text = file.read_text().replace(f" --output {file}", "") if file.exists() else ""
    return (text.splitlines() or [f"benchmarks/gpu.py ended with exit code {code} and wrote no page."]), code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-report.md")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="the benchmark with tiny models")
    options, selection = parser.parse_known_args()  # the rest is for pytest
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU with torch's CUDA interface is visible: nothing was tested, and nothing was measured")
        return 0
    head = [f"# What {torch.cuda.device_count()} GPUs showed" if options.device == "cuda" else "# Tried out on the CPU"]
    tests, tests_code = run_tests(options.device, selection)
    # The results of the tests are kept where the benchmark fails.
    options.output.write_text("\n".join([*head, "", "## Tests", "", *tests, ""]))
    figures, benchmark_code = run_benchmark(options.device, options.small)
    options.output.write_text("\n".join([*head, "", "## Tests", "", *tests, "", *figures, ""]))
    print(f"written: {options.output}")
    return tests_code or benchmark_code


if __name__ == "__main__":
    sys.exit(main())
