"""Rows of packed documents: nothing is lost, nothing leaks, and the training is that of the documents one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.lm import models, packing
from lockstep_recipes.tasks.lm.data import NOT_LEARNED
from tests import lm_cases, runs
from tests.lm_cases import small_task
from tests.ranks import run_ranks
from tests.selection import mainly

# ---- the plan


@given(st.lists(st.integers(1, 16), min_size=1, max_size=80))
def test_each_piece_is_in_one_row_and_rows_are_not_too_long(lengths):
    lengths = np.array(lengths)
    pieces, ends = packing.pack(lengths, 16)
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    sizes = [int(lengths[row].sum()) for row in np.split(pieces, ends[:-1])]
    assert max(sizes) <= 16
    # Two rows that would fit into one row are never left: so more than half of all places are used.
    assert len(sizes) == 1 or sum(sorted(sizes)[:2]) > 16


def test_the_plan_is_a_function_of_the_lengths():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    assert [part.tolist() for part in packing.pack(lengths, 128)] == [
        part.tolist() for part in packing.pack(lengths, 128)
    ]
    assert packing.pack(np.array([3, 8, 5]), 8)[0].tolist() == [1, 2, 0]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(2, 12))
def test_each_token_but_the_first_of_a_document_is_predicted_once(sizes, length):
    ends = np.cumsum(sizes)
    found = packing.cut(ends, np.ones(ends[-1], dtype=bool), length)
    assert found.lengths.max() <= length
    predicted = np.concatenate(
        [np.arange(begin + 1, begin + size + 1) for begin, size in zip(found.begins, found.lengths, strict=True)]
    )
    assert sorted(predicted) == sorted(set(range(ends[-1])) - {0, *ends[:-1].tolist()})
    assert found.split == sum(size - 1 > length for size in sizes)


def test_places_behind_the_last_learned_token_are_left_out():
    counts = np.zeros(20, dtype=bool)
    counts[[5, 12]] = True  # documents of 10 tokens
    found = packing.cut(np.array([10, 20]), counts, 4)
    assert found.begins.tolist() == [4, 10]  # in the first piece of document 0 nothing is learned
    assert found.lengths.tolist() == [1, 2]


def test_rows_hold_all_tokens_and_all_bytes(tmp_path):
    texts = ["été 🎉 x", *lm_cases.texts()]
    rows = [{"text": text} for text in texts]
    task = small_task(lm_cases.json_lines(tmp_path / "a.jsonl", rows))
    data = task.train_data()
    expected = sorted(
        [*task.tokenizer(text, add_special_tokens=False)["input_ids"], task.tokenizer.eos_token_id] for text in texts
    )
    assert data.plan.split  # some are longer than a row
    targets = sorted(token for index in range(len(data)) for token in data[index].targets.tolist())
    assert targets == sorted(token for document in expected for token in document)
    assert sum(data[index].bytes for index in range(len(data))) == sum(len(text.encode()) for text in texts)
    assert all(len(row.ids) <= 32 for row in (data[index] for index in range(len(data))))
    assert [data.where(index) for index in range(len(data))] != []
    begins = {(row.documents[place], row.positions[place]) for row in [data[0]] for place in range(len(row.ids))}
    assert len(begins) == len(data[0].ids)


# ---- the training


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return lm_cases.corpus(tmp_path_factory.mktemp("corpus"))


def settings(world_batch=8, **sections):
    return runs.config(
        batch={"global": world_batch, "micro": sections.pop("micro", 8)},
        train={"steps": 6},
        optim={"name": "SGD", "lr": 0.5, "weight_decay": 0.0},
        **sections,
    )


@pytest.fixture(scope="module")
def plain(corpus):
    known = {}

    def of(kind):
        if kind not in known:
            known[kind] = lm_cases.by_hand({"train": corpus, **lm_cases.MODELS[kind]}, 6, 8, 0.5)
        return known[kind]

    return of


CASES = [(kind, world, micro) for kind in lm_cases.MODELS for world in (1, 2, 3) for micro in (2, 8)]
CHOSEN = [("llama", 2, 2)]


@pytest.mark.parametrize(("kind", "world", "micro"), mainly(CHOSEN, CASES))
def test_packed_rows_train_as_their_documents_one_by_one(corpus, plain, kind, world, micro):
    options = {"train": corpus, **lm_cases.MODELS[kind]}
    data = small_task(**options).train_data()
    assert max(int(data[index].documents[-1]) for index in range(len(data))) > 0  # rows have several documents
    (weights, results), *_ = run_ranks(world, lm_cases.train, options, settings(micro=micro))
    # transformers computes cosines and norms of Llama in float32, whatever the number format of the model, and the last
    # bit of a cosine depends on its place in the tensor.
    bound = 1e-7 if kind == "llama" else 1e-10
    assert lm_cases.difference(weights, plain(kind)[0]) < bound
    assert results["train/loss"] == pytest.approx(plain(kind)[1][-1], rel=bound)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", mainly(["llama"], ["small", "llama"]))
def test_fsdp_trains_as_one_process(corpus, plain, kind):
    options = {"train": corpus, **lm_cases.MODELS[kind]}
    (weights, _), *_ = run_ranks(2, lm_cases.train, options, settings(micro=2, parallel={"strategy": "fsdp"}))
    assert lm_cases.difference(weights, plain(kind)[0]) < 1e-10


def test_padded_rows_have_the_loss_of_packed_rows(corpus):
    losses = []
    for packing_ in (True, False):
        task = small_task(corpus, packing=packing_)
        data = task.train_data()
        torch.manual_seed(0)
        model = task.model().double()
        batch = task.collate([task.prepare(data[index], 0, True) for index in range(len(data))])
        losses.append((task.loss(model, batch).item(), int(task.weight(batch))))
        assert ("documents" in batch) == packing_
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert len(data.lengths) == len(data)


@pytest.mark.parametrize("kind", list(lm_cases.MODELS))
def test_the_gradient_of_a_packed_batch_is_that_of_its_documents(corpus, kind):
    task = small_task(corpus, **lm_cases.MODELS[kind])
    data = task.train_data()
    torch.manual_seed(0)
    model = task.model().double()
    rows = [data[index] for index in range(min(6, len(data)))]
    packed = task.loss(model, task.collate(rows))
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    single = torch.stack([lm_cases.loss_of_each(model, row)[0] for row in rows]).sum()
    single.backward()
    assert packed.item() == pytest.approx(single.item(), rel=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - gradients[name]).abs().max()) < 1e-10 * largest, name


# ---- models that cannot be packed


class SeesAll(torch.nn.Module):
    """A model that ignores the mask."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=False):
        return self.inner(input_ids, position_ids)


def test_a_model_in_which_documents_see_each_other_is_refused(corpus):
    task = small_task(corpus)
    models.check_no_leak(task.model(), 300, "SmallModel")
    with pytest.raises(UsageError, match=r"SeesAll cannot be packed: a token sees other documents.*\n.*packing=false"):
        models.check_no_leak(SeesAll(task.model()), 300, "SeesAll")


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_models_without_positions_or_masks_are_refused(corpus, kind):
    sizes = {
        "bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
        "mamba": {"hidden_size": 16, "num_hidden_layers": 1},
    }
    task = small_task(corpus, config={"model_type": kind, **sizes[kind]})
    with pytest.raises(UsageError, match=r"task.packing: .* cannot be packed"):
        task.model()
    task = small_task(corpus, config={"model_type": kind, **sizes[kind]}, packing=False)
    data = task.train_data()
    assert task.loss(task.model(), task.collate([data[0], data[1]])) > 0


BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 32}


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_that_sees_the_next_token_is_refused(corpus, packed):
    with pytest.raises(UsageError, match=r"task.model: BertLMHeadModel is not causal: a token sees later tokens"):
        small_task(corpus, config=BERT, packing=packed).model()
    small_task(corpus, config=BERT | {"is_decoder": True}, packing=False).model()


def test_attention_that_is_cut_by_places_of_a_row_is_not_packed(corpus):
    sizes = {**lm_cases.LLAMA, "model_type": "llama4_text", "attention_chunk_size": 16, "head_dim": 4}
    with pytest.raises(
        UsageError, match=r"task.packing: attention of llama4_text works on chunks of 16 tokens.*\n.*length=16"
    ):
        small_task(corpus, config=sizes).model()
    models.check_lengths(small_task(corpus, config=sizes).config, 16, True)
    models.check_lengths(small_task(corpus, config=sizes).config, 32, False)


@pytest.mark.parametrize("packed", [True, False])
def test_rotations_that_depend_on_the_longest_document_of_a_batch_are_refused(corpus, packed):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    config = {**lm_cases.LLAMA, "model_type": "phi3", "rope_parameters": rope, "pad_token_id": 0}
    config |= {"original_max_position_embeddings": 16}
    with pytest.raises(UsageError, match=r"task.length: positions of phi3 beyond 16 depend on the longest document"):
        small_task(corpus, config=config, packing=packed).model()
    small_task(corpus, config=config, packing=packed, length=16).model()


def test_a_sliding_window_stays(corpus):
    """A model with windows finds the documents by its positions, and sees no token outside of its window."""
    sizes = {**lm_cases.LLAMA, "model_type": "mistral", "sliding_window": 4}
    task = small_task(corpus, config=sizes)
    model, row = task.model().double(), task.train_data()[0]
    batch = task.collate([row])
    assert task.loss(model, batch).item() == pytest.approx(lm_cases.loss_of_each(model, row)[0].item(), rel=1e-10)


def test_targets_are_left_out_where_nothing_is_learned(tmp_path):
    rows = [{"question": "a b c", "answer": "d e"}] * 3
    task = small_task(lm_cases.json_lines(tmp_path / "qa.jsonl", rows))
    batch = task.collate([task.train_data()[0]])
    assert (batch["targets"] == NOT_LEARNED).any()
    answer = task.tokenizer("d e", add_special_tokens=False)["input_ids"]
    assert task.weight(batch) == 3 * (len(answer) + 1)
