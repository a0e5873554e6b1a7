"""Volumes on ranks: phases of unfreezing, kept features and chunks, with DDP and FSDP."""

import itertools

import pytest
import torch

from tests import runs, volume_cases
from tests.ranks import run_ranks

PHASES = [
    {"match": ["backbone.network.layers.1.*", "backbone.network.layernorm.*"], "epoch": 2},
    {"match": ["backbone.*"], "epoch": 3},
]


def settings(strategy="single", optimizer="AdamW"):
    return runs.config(
        batch={"global": 4, "micro": 2},
        train={"steps": 11, "unfreeze": PHASES},  # 3 steps are an epoch; the last has two samples
        optim={"name": optimizer, "groups": [{"name": "backbone", "match": ["backbone.*"], "lr": 1e-3}]},
        parallel={"strategy": strategy},
    )


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.exhaustive), 3])
def test_the_phases_are_the_same_on_any_ranks(chunk):
    # The gradient of a key's bias is zero but for rounding, which AdamW would make as large as any other gradient.
    options = {"chunk": chunk}
    alone, _ = volume_cases.train({}, settings(optimizer="SGD"))
    first = volume_cases.make_model().named_parameters()
    assert [name for name, value in first if torch.equal(value, alone[name])] == []
    for world, strategy in ((2, "ddp"), (2, "fsdp"), (3, "fsdp")):
        for weights, _ in run_ranks(world, volume_cases.train, options, settings(strategy, "SGD")):
            for name, value in weights.items():
                assert torch.allclose(value, alone[name], rtol=1e-10, atol=1e-12), (world, strategy, name)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_kept_features_change_no_bit_on_ranks(strategy, tmp_path):
    options = {"dtype": torch.float32, "dropout": 0.2, "chunk": 3}
    plain = run_ranks(2, volume_cases.train, options, settings(strategy))
    options |= {"keep": 2, "root": str(tmp_path)}
    (one, read), (other, read_too) = run_ranks(2, volume_cases.train, options, settings(strategy))
    for weights in (one, other):
        assert all(torch.equal(weights[name], plain[0][0][name]) for name in weights)
    assert sum(read) + sum(read_too) < sum(itertools.chain(*(slices for _, slices in plain)))


def test_only_gradients_of_trainable_parameters_are_reduced():
    for reduced in run_ranks(2, volume_cases.reduced_elements, {"dtype": torch.float32}, settings("ddp")):
        by_phase = {}
        for _, elements, trainable in reduced:
            by_phase.setdefault(trainable, []).append(elements)
        assert len(by_phase) == 3
        steps = (6, 3, 2)
        for (trainable, elements), count in zip(sorted(by_phase.items()), steps, strict=True):
            assert sum(elements) == count * trainable
