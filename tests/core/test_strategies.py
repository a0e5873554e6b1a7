"""The strategy changes nothing: single, DDP, FSDP and hybrid against plain torch."""

import pytest
import torch

from tests import own_tasks, runs
from tests.ranks import run_ranks

# Ranks and `parallel` section.
STRATEGIES = {
    "single": (1, {"strategy": "single"}),
    "ddp 2": (2, {"strategy": "ddp"}),
    "fsdp 2": (2, {"strategy": "fsdp"}),
    "fsdp 3": (3, {"strategy": "fsdp"}),
    "hybrid 2x2": (4, {"strategy": "fsdp", "shard_ranks": 2}),
}


STEPS = 12  # more than the 10 of an epoch


def settings_for(world, parallel, accumulate=1, **sections):
    return runs.config(batch={"micro": -(-24 // (world * accumulate))}, parallel=parallel, **sections)


def combinations():
    """Without accumulation and clipping, tests/core/checkpoint/test_portability.py trains each strategy too.

    tests/core/parallel/test_sharding.py clips with that of four ranks.
    """
    for name in STRATEGIES:
        for accumulate, clip_norm in ((1, None), (1, 0.5), (3, None), (3, 0.5)):
            tested = (accumulate, clip_norm) == (3, 0.5) and name in ("ddp 2", "fsdp 2")
            yield pytest.param(name, accumulate, clip_norm, marks=() if tested else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "accumulate", "clip_norm"), list(combinations()))
def test_weights_and_norms_after_20_steps_are_those_of_plain_torch(name, accumulate, clip_norm):
    world, parallel = STRATEGIES[name]
    expected, norms = runs.by_hand(own_tasks.Deep(), clip_norm=clip_norm)
    settings = settings_for(world, parallel, accumulate, optim={"clip_norm": clip_norm})
    for weights, results in run_ranks(world, runs.fit_kind, "Deep", {}, settings):
        calls = weights.pop("calls")
        assert calls == 20 * accumulate
        assert runs.difference(weights, {name: tensor for name, tensor in expected.items() if name != "calls"}) < 1e-10
        assert results["train/grad_norm"] == pytest.approx(norms[-1], rel=1e-10)


@pytest.mark.exhaustive  # the test above, in float64
@pytest.mark.parametrize("name", STRATEGIES)
def test_float32_agrees_to_rounding(name):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    world, parallel = STRATEGIES[name]
    expected, _ = runs.by_hand(own_tasks.Deep(dtype=torch.float32), STEPS, optimizer=sgd)
    settings = settings_for(world, parallel, 3, train={"steps": STEPS})
    settings["optim"] = {"name": "SGD", "lr": 0.01, "args": {"momentum": 0.9}}
    for weights, _ in run_ranks(world, runs.fit_kind, "Deep", {"dtype": torch.float32}, settings):
        weights.pop("calls"), expected.pop("calls", None)
        assert runs.difference(weights, expected) < 1e-6
