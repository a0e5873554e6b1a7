"""How often `lockstep compare --evaluate` calls a training better than itself with another seed.

    python benchmarks/compare.py [--runs 60] [--pairs 200] [--epochs 4]

It trains `digits` with as many seeds, and another training with a lower learning rate. Then it draws pairs: one run
against one, and three against three, from the same training (each verdict is false) and from both (a verdict is true).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from lockstep import Trainer
from lockstep.configs import config_file
from lockstep_lab.report import left_out
from lockstep_lab.report.intervals import differences, verdicts

TRAININGS = {"usual": [], "lower learning rate": ["optim.lr=0.001"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    found = {name: [] for name in TRAININGS}
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in TRAININGS.items():
            for seed in range(given.runs if not changes else given.runs // 3):
                config = config_file.load("digits", [*changes, f"seed={seed}", f"train.epochs={given.epochs}"])
                run_dir = Path(folder) / name / str(seed)
                Trainer(config, run_dir=run_dir, quiet=True).fit()
                found[name].append(left_out.of_run(run_dir))
    draw, usual, lower = random.Random(0), found["usual"], found["lower learning rate"]
    print(f"{'':34}" + "".join(f"{name:>24}" for name in usual[0].full))
    for count in (1, 3):
        for title, others in (("the same training", usual), ("a lower learning rate", lower)):
            said = dict.fromkeys(usual[0].full, 0)
            for _ in range(given.pairs):
                first = draw.sample(usual, count)
                other = draw.sample([run for run in others if run not in first], count)
                changes = differences(first, other)
                for name in said:
                    said[name] += name in verdicts(changes, name)
            shares = "".join(f"{said[name] / given.pairs:>24.1%}" for name in said)
            print(f"{count} against {count}, {title:22}{shares}", flush=True)


if __name__ == "__main__":
    main()
