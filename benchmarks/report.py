"""The page of a run with many log entries: seconds to make it, its size, and seconds until a browser has drawn it.

    python benchmarks/report.py [--entries 1000000] [--browser chromium-headless-shell]

It trains `digits` for three epochs, and writes the first entry of the training and of an evaluation many times into the
log of that run, with other steps and losses. The time of the browser includes its start. The browser opens the page
from the disk, at the width of a desktop and of a phone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTHS = {"desktop": 1280, "phone": 390}


def write_log(path: Path, entries: int) -> None:
    """Make the log of a short run one of `entries` training entries, and an evaluation after each 10,000 of them."""
    known = [json.loads(line) for line in path.read_text().splitlines()]
    training = next(entry for entry in known if "train/loss" in entry)
    evaluation = next(entry for entry in known if "eval/accuracy" in entry)
    draw = random.Random(0)
    with path.open("w") as file:
        for step in range(1, entries + 1):
            loss = 2 / math.sqrt(step) + 0.1 * draw.random()
            file.write(json.dumps({**training, "step": step, "time_s": step / 10, "train/loss": loss}) + "\n")
            if step % 10_000 == 0:
                file.write(json.dumps({**evaluation, "step": step, "time_s": step / 10}) + "\n")


def seconds_of(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--browser", default="chromium-headless-shell")
    options = parser.parse_args()
    lockstep = [sys.executable, "-m", "lockstep"]
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        seconds_of([*lockstep, "train", "digits", "train.epochs=3", "--run-dir", str(run)])
        write_log(run / "metrics.jsonl", options.entries)
        made = seconds_of([*lockstep, "report", str(run)])
        page = run / "report.html"
        print(f"{options.entries} entries: made in {made:.1f} s, {page.stat().st_size / 1e6:.2f} MB")
        if not shutil.which(options.browser):
            print(f"{options.browser} is not installed: the time to open the page was not measured")
            return
        for kind, width in WIDTHS.items():
            flags = ["--no-sandbox", "--disable-gpu", f"--window-size={width},2600", "--dump-dom", page.as_uri()]
            opened = statistics.median(seconds_of([options.browser, *flags]) for _ in range(5))
            print(f"opened and drawn, {kind}: {opened:.2f} s (median of 5)")


if __name__ == "__main__":
    main()
