"""How far trainings in bf16 on a mesh, and on one process, end from the same training in float64.

python benchmarks/mesh_bf16.py    # from the root of a checkout
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

STEPS, WIDTH, SEEDS = 20, 64, tuple(range(6))
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ddp, 2 ranks": (2, {"strategy": "ddp"}),
    "1x1x2": (2, {"tensor": 2}),
    "1x2x2": (4, {"strategy": "fsdp", "tensor": 2}),
}


def trained(parallel: dict[str, Any], world: int, seed: int, precision: str, by_tokens: bool) -> tuple[Any, Any]:
    """Weights in float64, and the loss of the last step. AdamW would make much of rounding in small gradients."""
    import torch
    from torch.utils.data import TensorDataset

    from lockstep import Task
    from tests import runs
    from tests.mesh.mesh_cases import BY_TOKENS, PLAN, Model

    dtype = torch.float64 if precision == "float64" else torch.float32

    class Regression(Task):
        def model(self):
            torch.manual_seed(seed)
            return Model(0.0, WIDTH).to(dtype)

        def tensor_plan(self):
            return BY_TOKENS if by_tokens else PLAN

        def train_data(self):
            inputs = torch.randn(256, 10, generator=torch.Generator().manual_seed(seed))
            # The same numbers in each format.
            return TensorDataset(inputs.to(dtype), inputs.unflatten(1, (5, 2)).sum(-1).to(dtype))

        def loss(self, model, batch):
            return (model(batch[0]).to(batch[1].dtype) - batch[1]).square().sum()

    sections = {"batch": {"global": 24, "micro": 24 // (world // parallel.get("tensor", 1))}, "parallel": parallel}
    sections |= {"train": {"steps": STEPS}, "precision": "fp32" if precision == "float64" else precision}
    sections |= {"log": {"every_steps": 1}, "optim": {"name": "SGD", "lr": 0.02, "weight_decay": 0.0, "clip_norm": 1.0}}
    weights, results = runs.fit(Regression(), runs.config(**sections, seed=seed))
    return {name: tensor.double() for name, tensor in weights.items() if name != "calls"}, results["train/loss"]


def main() -> None:
    import mesh_bf16 as bench  # ranks import it by its name

    from tests.ranks import run_ranks

    def far(found, right):
        squares = sum(float((found[0][name] - right[0][name]).square().sum()) for name in right[0])
        return (squares / sum(float(one.square().sum()) for one in right[0].values())) ** 0.5

    def spread(values):
        return f"{statistics.median(values):.1e} ({min(values):.1e} to {max(values):.1e})"

    right = {seed: run_ranks(1, bench.trained, {}, 1, seed, "float64", False)[0] for seed in SEEDS}
    print(f"Distance from float64 after {STEPS} steps: median (least to largest) of {len(SEEDS)} seeds\n")
    print("| ranks | precision | weights | loss |\n|---|---|---:|---:|")
    for precision in ("bf16", "fp32"):
        for name, (world, parallel) in bench.WAYS.items():
            for by_tokens in (False, True)[: parallel.get("tensor", 1)]:
                weights, losses = [], []
                for seed in SEEDS:
                    found = run_ranks(world, bench.trained, parallel, world, seed, precision, by_tokens)[0]
                    weights.append(far(found, right[seed]))
                    losses.append(abs(found[1] / right[seed][1] - 1))
                shown = f"{name}, sequence_parallel" if by_tokens else name
                print(
                    f"| {shown} | {precision} | {spread(weights)} | {spread(losses)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
