"""The plans of the recipes and of transformers' models: trainings on a mesh are those of one process in plain torch."""

import pytest
import torch

from tests import lm_cases, risk_cases, runs
from tests.ranks import run_ranks
from tests.risk_cases import make_task, volume_table
from tests.selection import mainly

WORDS_CUT = {"config": lm_cases.LLAMA, "loss_chunk": None}  # the embedding and the last layer, too
QWEN = {"config": lm_cases.LLAMA | {"model_type": "qwen3", "head_dim": 4}}  # norms within each head
MODELS = {"small": lm_cases.SMALL, "llama": {"config": lm_cases.LLAMA}, "words": WORDS_CUT, "qwen3": QWEN}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return lm_cases.corpus(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize(
    ("kind", "world"), mainly([("words", 2)], [(kind, world) for kind in MODELS for world in (2, 4)])
)
def test_a_language_model(corpus, kind, world):
    options = {"train": corpus, **MODELS[kind]}
    plain, losses = lm_cases.by_hand(options, 6, 8, 0.5)
    settings = runs.config(
        batch={"global": 8, "micro": 2},
        train={"steps": 6},
        optim={"name": "SGD", "lr": 0.5, "weight_decay": 0.0},
        log={"every_steps": 1},
        parallel={"strategy": "fsdp", "tensor": 2},
    )
    for weights, results in run_ranks(world, lm_cases.train, options, settings):
        assert lm_cases.difference(weights, plain) < 1e-10
        assert results["train/loss"] == pytest.approx(losses[-1], rel=1e-10)


@pytest.mark.parametrize("chunk", mainly([2], [None, 2]))
def test_a_vision_transformer_over_slices(tmp_path, chunk):
    table = volume_table(tmp_path)
    options = {"augment": None, "train_slices": "even", "slices_per_chunk": chunk}
    model = risk_cases.gradient_by_hand(make_task(options, table))
    with torch.no_grad():
        expected = {name: value - 0.1 * value.grad for name, value in model.named_parameters()}
    settings = runs.config(
        batch={"global": 10, "micro": 3},
        train={"steps": 1},
        optim={"name": "SGD", "lr": 0.1, "weight_decay": None},
        parallel={"strategy": "ddp", "tensor": 2},
    )
    for weights, _ in run_ranks(4, risk_cases.fit, options, table, None, settings):
        assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) < 1e-12
