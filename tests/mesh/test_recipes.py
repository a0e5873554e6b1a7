"""The plans of the recipes and of transformers' models: trainings on a mesh are those of one process in plain torch."""

import pytest
import torch

from tests import lm_cases, risk_cases, runs
from tests.mesh import mesh_cases
from tests.ranks import run_ranks
from tests.risk_cases import make_task, volume_table
from tests.selection import mainly

GATHERED = {"config": lm_cases.LLAMA, "loss_chunk": None}  # logits of all words
QWEN = {"config": lm_cases.LLAMA | {"model_type": "qwen3", "head_dim": 4}}  # norms within each head
UNTIED = {"small": lm_cases.SMALL["small"] | {"tie": False}, "loss_chunk": 20}
MODELS = {"small": {**lm_cases.SMALL, "loss_chunk": 20}, "untied": UNTIED, "llama": {"config": lm_cases.LLAMA}}
GEMMA = {"config": lm_cases.LLAMA | {"model_type": "gemma", "head_dim": 4}}  # an embedding with a buffer
MODELS |= {"gathered": GATHERED, "qwen3": QWEN, "gemma": GEMMA}
BY_TOKENS = {"cut_tokens": True, "length": 31}  # of which a rank has 16
MODELS |= {f"{kind}, tokens": MODELS[kind] | BY_TOKENS for kind in ("small", "llama", "qwen3")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return lm_cases.corpus(tmp_path_factory.mktemp("texts"))


MESHES = {"1x1x2": (2, "ddp"), "1x2x2": (4, "fsdp"), "2x1x2": (4, "ddp")}


def settings_of(strategy, micro=2, **more):
    """Steps of 8 rows, which have other numbers of tokens; the norm is clipped."""
    sections = {"batch": {"global": 8, "micro": micro}, "log": {"every_steps": 1}}
    sections["optim"] = {"name": "SGD", "lr": 0.5, "weight_decay": 0.0, "clip_norm": 0.5}
    return runs.config(**sections, parallel={"strategy": strategy, "tensor": 2}, **more)


CASES = [(kind, mesh, 20) for kind in MODELS for mesh in MESHES]
KEPT = [("llama, tokens", "1x1x2", 3)]


def scores_by_hand(options, weights):
    """Perplexity and accuracy of the evaluation, from all logits of each document."""
    task = lm_cases.small_task(**options)
    model, rows = task.model().double(), task.eval_data()
    model.load_state_dict(weights)
    pairs = [pair for row in range(len(rows)) for pair in lm_cases.pieces(rows[row])]
    with torch.no_grad():
        logits = torch.cat([model(input_ids=ids[None]).logits[0] for ids, _ in pairs])
    targets = torch.cat([targets for _, targets in pairs])
    right = (logits.argmax(-1) == targets)[targets != -100]
    return float(torch.nn.functional.cross_entropy(logits, targets).exp()), float(right.double().mean())


@pytest.mark.parametrize(("kind", "mesh", "steps"), mainly(KEPT, [*KEPT, *CASES]))
def test_a_language_model(corpus, kind, mesh, steps):
    options = {"train": corpus, **MODELS[kind], "eval_fraction": 0.3, "prompts": []}
    with mesh_cases.norms_in_float64(options):
        plain, losses = lm_cases.by_hand(options, steps, 8, 0.5, clip_norm=0.5)
        perplexity, accuracy = scores_by_hand(options, plain)
    (world, strategy), train = MESHES[mesh], {"steps": steps, "eval_every_steps": steps}
    for weights, results in run_ranks(world, mesh_cases.language_model, options, settings_of(strategy, train=train)):
        assert lm_cases.difference(weights, plain) < 1e-10
        assert results["train/loss"] == pytest.approx(losses[-1], rel=1e-10)
        assert results["eval/perplexity"] == pytest.approx(perplexity, rel=1e-10)
        assert results["eval/accuracy"] == pytest.approx(accuracy, rel=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["small", "llama", "llama, tokens"])
def test_evaluations_and_texts_of_a_language_model_and_its_checkpoints(corpus, kind, tmp_path):
    """The run goes on with one process from what the mesh saved."""
    options = {"train": corpus, **MODELS[kind], "eval_fraction": 0.3, "new_tokens": 5}

    def trained(ranks, folder, steps):
        train = {"steps": steps, "eval_every_steps": 3}
        settings = settings_of("fsdp", train=train, checkpoint={"mode": "sync"})
        return run_ranks(ranks, lm_cases.train, options, settings, tmp_path / folder)

    ((alone, expected),) = trained(1, "one", 3)
    for weights, results in trained(4, "cut", 3):
        assert lm_cases.difference(weights, alone) < 1e-10
        for key in ("loss", "perplexity", "bits_per_byte", "accuracy"):
            assert results[f"eval/{key}"] == pytest.approx(expected[f"eval/{key}"], rel=1e-10)
    ((on, found),), ((alone, expected),) = trained(1, "cut", 6), trained(1, "one", 6)
    assert lm_cases.difference(on, alone) < 1e-10
    assert found["eval/perplexity"] == pytest.approx(expected["eval/perplexity"], rel=1e-10)


@pytest.mark.parametrize(("chunk", "ranks"), mainly([], [(2, 2), (2, 4), (None, 4)]))
def test_a_vision_transformer_over_slices(tmp_path, chunk, ranks):
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
    for weights, _ in run_ranks(ranks, risk_cases.fit, options, table, None, settings):
        assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) < 1e-12
