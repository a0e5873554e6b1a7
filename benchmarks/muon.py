"""Muon for matrices and AdamW for the rest, against AdamW alone, at equal steps.

    python benchmarks/muon.py [--recipe docstrings] [--steps 150] [--seeds 3]

Each way trains with each of four learning rates, on the same batches. A row has the mean over seeds of the loss of the
evaluation after the last step, its range, and the mean accuracy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile

from lockstep import Trainer
from lockstep.recipes import config_file

# Muon is for hidden matrices: embeddings and the head stay with AdamW.
KEPT = ["*embeddings*", "*classifier*", "*pooler*"]
RATES = {"AdamW": (5e-4, 1e-3, 2e-3, 4e-3), "Muon and AdamW": (3e-3, 1e-2, 2e-2, 4e-2)}


def result(recipe, steps, seed, way, rate):
    keys = [f"seed={seed}", f"train.steps={steps}", "train.epochs=null", "train.eval_every_epochs=null"]
    keys += [f"train.eval_every_steps={steps}", "log.writers=[]", "log.pictures=0", "log.flops=false"]
    if way == "AdamW":
        keys += [f"optim.lr={rate}"]
    else:
        rest = {"name": "rest", "match": KEPT}
        muon = {"name": "matrices", "match": ["*"], "ndim": 2, "optimizer": "Muon", "lr": rate}
        keys += [f"optim.groups={json.dumps([rest, muon])}"]
    with tempfile.TemporaryDirectory() as folder:
        found = Trainer(config_file.load(recipe, keys), run_dir=f"{folder}/run", quiet=True).fit()
    return found["eval/loss"], found["eval/accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="docstrings")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print("| optimizer | learning rate | evaluation loss (range) | accuracy |\n|---|---|---|---|")
    for way, rates in RATES.items():
        rows = {}
        for rate in rates:
            rows[rate] = [result(options.recipe, options.steps, seed, way, rate) for seed in range(options.seeds)]
        for rate in rates:
            losses, accuracies = zip(*rows[rate], strict=True)
            shown = f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
            print(f"| {way} | {rate:g} | {shown} | {statistics.mean(accuracies):.4f} |", flush=True)


if __name__ == "__main__":
    main()
