"""What large language models need: units of their own for embeddings and head, and gradients that are reduced early."""

import pytest

from lockstep.core.blocks import find_blocks, find_ends
from packages.recipes.tests.tasks.lm import memory_cases
from tests import lm_cases
from tests.lm_cases import small_task
from tests.ranks import run_ranks
from tests.selection import mainly

WIDE = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "tie": False}
BLOCKS = ["model.layers.0", "model.layers.1"]
ENDS = ["model.embed_tokens", *BLOCKS, "lm_head"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return lm_cases.corpus(tmp_path_factory.mktemp("corpus"))


def ends_of(corpus, **options):
    model = small_task(corpus, **options).model()
    names = {id(module): name for name, module in model.named_modules()}
    found = find_ends(model, list(find_blocks(model).values()))
    return [[names[id(end)] for end in ends] for ends in found]


def test_large_embeddings_and_heads_are_found(corpus):
    both = [["model.embed_tokens"], ["lm_head"]]
    assert ends_of(corpus, small=WIDE) == both
    assert ends_of(corpus, config=lm_cases.LLAMA | {"tie_word_embeddings": False}) == both
    assert ends_of(corpus, small=WIDE | {"tie": True}) == [[], []]  # the first and the last layer share their weights
    assert ends_of(corpus, config=lm_cases.GPT2) == [[], []]
    assert ends_of(corpus, small=WIDE, tokenizer="characters") == [[], []]  # 16 x 30 of 2,048 parameters of a block
    assert find_ends(small_task(corpus, small=WIDE).model(), []) == ([], [])


@pytest.mark.parametrize(("tie", "chunk"), mainly([(True, 5)], [(False, None), (False, 5), (True, 5)]))
def test_a_step_with_sharded_ends_is_that_of_one_process_and_gathers_less(corpus, tie, chunk):
    options = {"train": corpus, "small": WIDE | {"tie": tie}, "loss_chunk": chunk, "prompts": []}
    expected = memory_cases.step_alone(options, 2)
    peaks = []
    for patterns in (None, BLOCKS):
        found = run_ranks(2, memory_cases.step_sharded, options, {"shard_modules": patterns})
        for gradients, _, units in found:
            assert lm_cases.difference(gradients, expected) < 1e-10
            assert units == (BLOCKS if tie or patterns else ENDS)
        peaks.append(found[0][1])
    less = [of_root - of_units for of_units, of_root in zip(*peaks, strict=True)]
    assert less == [0, 0] if tie else min(less) >= 300 * 16 * 8, peaks


@pytest.mark.exhaustive
def test_gradients_that_are_reduced_with_each_micro_batch_are_the_same_and_never_whole(corpus):
    options = {"train": corpus, "small": WIDE, "prompts": []}
    expected = memory_cases.step_alone(options, 6)
    kept = []
    for early in (False, True):
        found = run_ranks(2, memory_cases.step_sharded, options, {"reduce_each_micro_batch": early}, 3)
        for gradients, _, _ in found:
            assert lm_cases.difference(gradients, expected) < 1e-10
        kept.append(found[0][1][1])
    whole = sum(gradient.nbytes for gradient in expected.values())
    assert kept[0] >= whole
    assert kept[1] < whole
