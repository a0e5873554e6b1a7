"""Seconds from the command to the end of the first step, each in its own processes, against a hand-written plain loop.

    python benchmarks/startup.py [--rounds 7]

The plain loop runs as `python` on one rank and under `torchrun` on two; Lockstep as `lockstep train`. The two
alternate; what counts is the median of ratios. Also: `lockstep --help`, and `import lockstep`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def first_step(command, folder):
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    begun = time.time()
    subprocess.run(
        command,
        check=True,
        env=os.environ | {"MARK": str(mark), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return float(mark.read_text()) - begun


def seconds(command):
    begun = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.time() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    lockstep = str(Path(sys.executable).parent / "lockstep")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks in (1, 2):
            plain = [sys.executable, str(HERE / "startup_plain.py")]
            if ranks > 1:
                plain = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *plain[1:]]
            ours = [
                lockstep,
                "train",
                f"{HERE / 'startup_task.py'}:Marked",
                "device=cpu",
                "train.steps=2",
                "--nproc",
                str(ranks),
                "--run-dir",
                str(folder / "run"),
                "--fresh",
            ]
            pairs = [(first_step(plain, folder), first_step(ours, folder)) for _ in range(rounds + 1)][1:]
            ratio = statistics.median(o / p for p, o in pairs)
            spread = f"{min(o / p for p, o in pairs):.2f} to {max(o / p for p, o in pairs):.2f}"
            print(
                f"{ranks} ranks: plain {statistics.median(p for p, _ in pairs):.2f} s, ratio {ratio:.3f} ({spread})",
                flush=True,
            )
    helps = [seconds([lockstep, "--help"]) for _ in range(rounds)]
    imports = [seconds([sys.executable, "-c", "import lockstep"]) for _ in range(rounds)]
    print(f"lockstep --help: {statistics.median(helps):.3f} s; import lockstep: {statistics.median(imports):.3f} s")


if __name__ == "__main__":
    main()
