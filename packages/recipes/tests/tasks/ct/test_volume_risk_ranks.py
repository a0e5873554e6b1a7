"""Volumes on ranks: phases of unfreezing, kept features and chunks, with DDP and FSDP."""

import itertools
import operator

import pytest
import torch

from tests import runs, volume_cases
from tests.ranks import run_ranks
from tests.selection import mainly

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


@pytest.mark.parametrize(("world", "strategy"), mainly([(3, "fsdp")], [(2, "ddp"), (3, "fsdp")]))
@pytest.mark.parametrize("chunk", mainly([], [None, 3]))
def test_the_phases_are_the_same_on_any_ranks(chunk, world, strategy):
    # The gradient of a key's bias is zero but for rounding, which AdamW would make as large as any other gradient.
    options = {"chunk": chunk}
    alone, _ = volume_cases.train({}, settings(optimizer="SGD"))
    first = volume_cases.make_model().named_parameters()
    assert [name for name, value in first if torch.equal(value, alone[name])] == []
    for weights, _ in run_ranks(world, volume_cases.train, options, settings(strategy, "SGD")):
        for name, value in weights.items():
            assert torch.allclose(value, alone[name], rtol=1e-10, atol=1e-12), name


@pytest.mark.exhaustive  # test_volume_risk_features.py compares the bits on one rank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_kept_features_change_no_bit_on_ranks(strategy, tmp_path):
    options = {"dtype": torch.float32, "dropout": 0.2, "chunk": 3}
    plain = run_ranks(2, volume_cases.train, options, settings(strategy))
    options |= {"keep": 2, "root": str(tmp_path)}
    (one, read), (other, read_too) = run_ranks(2, volume_cases.train, options, settings(strategy))
    for weights in (one, other):
        assert all(torch.equal(weights[name], plain[0][0][name]) for name in weights)
    assert sum(read) + sum(read_too) < sum(itertools.chain(*(slices for _, slices in plain)))


def test_only_gradients_of_trainable_parameters_are_reduced():
    for reduced in run_ranks(2, volume_cases.reduced_buckets, {"dtype": torch.float32}, settings("ddp")):
        by_phase = {}
        for _, _, elements, trainable, _ in reduced:
            by_phase.setdefault(trainable, []).append(elements)
        assert len(by_phase) == 3
        steps = (6, 3, 2)
        for (trainable, elements), count in zip(sorted(by_phase.items()), steps, strict=True):
            assert sum(elements) == count * trainable


@pytest.mark.exhaustive  # the test above counts what all buckets hold
def test_frozen_parameters_have_no_buckets():
    """Buckets are so small that each parameter has a bucket of its own. The first step of a phase has a single bucket,
    because DDP arranges the buckets after it."""
    wanted = settings("ddp")
    wanted["parallel"] = {"strategy": "ddp", "bucket_mb": 1e-6}
    for reduced in run_ranks(2, volume_cases.reduced_buckets, {"dtype": torch.float32}, wanted):
        steps = [(place + 1, parameters) for place, is_last, _, _, parameters in reduced if is_last]
        assert len(steps) == 11
        phases = [[b for b, _ in phase] for _, phase in itertools.groupby(steps, key=operator.itemgetter(1))]
        trainable = sorted({parameters for _, parameters in steps})
        assert phases == [[1, *[number] * more] for number, more in zip(trainable, (5, 2, 1), strict=True)]
