"""What a mesh cannot do is an error that names the key, the layers and the remedy, before anything is computed."""

import os

import pytest
import torch
from torch import nn

from lockstep.core.errors import LockstepError, TrainingError, UsageError
from lockstep.core.parallel.options import ParallelConfig
from lockstep.mesh import plans, strategy, tokens
from lockstep.mesh.group import Alone
from tests import lm_cases, runs
from tests.mesh import mesh_cases
from tests.ranks import run_ranks


def plan(model, own=None, ranks=2):
    return plans.plan_of(model, own, ranks)


def layers(**named):
    return nn.ModuleDict(named)


REFUSED = [
    (layers(a=nn.Linear(4, 4)), None, "there is no plan for sharding ModuleDict over 2 ranks"),
    (layers(a=nn.Linear(4, 4)), {"b": "colwise"}, "no module matches 'b'"),
    (layers(a=nn.Linear(4, 4)), {"a": "colwize"}, "unknown style 'colwize'"),
    (layers(a=nn.Linear(4, 3)), {"a": "colwise"}, r"a \(out_features=3\) cannot be divided by 2"),
    (layers(a=nn.Linear(3, 4)), {"a": "rowwise"}, r"a \(in_features=3\)"),
    (layers(a=nn.LayerNorm(4)), {"a": "colwise"}, "a is a torch.nn.modules.normalization.LayerNorm"),
    (layers(a=nn.Linear(4, 4), b=nn.SyncBatchNorm(4)), {"a": "colwise"}, "SyncBatchNorm would count"),
    (layers(a=nn.Embedding(5, 4)), {"a": "embedding_rowwise"}, r"num_embeddings=5"),
    (
        layers(a=layers(b=nn.Linear(4, 4))),
        {"a": "sequence_parallel", "a.b": "colwise_gather_output"},
        "a.b has the style colwise_gather_output in a, which has sequence_parallel",
    ),
    (layers(a=layers(b=nn.Linear(4, 4))), {"a": "sequence_gather"}, "a has the style sequence_gather in no block"),
    (
        layers(a=layers(b=nn.Linear(4, 4), c=nn.BatchNorm1d(4))),
        {"a": "sequence_parallel", "a.b": "colwise"},
        "a.c would see only the tokens of one rank",
    ),
]


@pytest.mark.parametrize(("model", "own", "what"), REFUSED, ids=[what for *_, what in REFUSED])
def test_a_plan_that_does_not_fit(model, own, what):
    with pytest.raises(UsageError, match=what):
        plan(model, own)


class _Gives(nn.Module):
    """A block that gives what `way` makes of its linear layer's outputs."""

    def __init__(self, way):
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden):
        return self.way(self.down(self.up(hidden)))


@pytest.mark.parametrize(
    ("way", "given", "what"),
    [
        (
            lambda part: (part, part.norm(dim=-1, keepdim=True)),
            torch.ones(2, 6, 4),
            r"\(2, 3, 4\), \(2, 3, 1\) instead of 3",
        ),
        (lambda part: {"hidden": part}, torch.ones(2, 6, 4), "a returns dict instead of 3 of 6 tokens"),
        (lambda part: part.mean(dim=1), torch.ones(2, 6, 4), r"a returns \(2, 4\) instead of 3"),
        (lambda part: part, torch.ones(2, 4, dtype=torch.int64), r"a first receives torch.int64 of shape \(2, 4\)"),
    ],
)
def test_a_block_of_parts_gets_and_gives_tokens(way, given, what):
    """Without the errors, each rank would go on with its part alone, or with a part of something else."""
    model = layers(a=_Gives(way))
    group = Alone(2, lambda *_: None)
    tokens.arrange(model, plan(model, {"a": "sequence_parallel", "a.up": "colwise", "a.down": "rowwise"}), group)
    with pytest.raises(TrainingError, match=what):
        model["a"](given)


class _MaskFirst(nn.Module):
    """A block, or a module in one, whose mask comes before the tokens."""

    def __init__(self):
        super().__init__()
        self.inner = _Gives(lambda part: part)

    def forward(self, mask, hidden):
        return self.inner(hidden)


SEEING = {"a.inner": "sequence_gather"}


@pytest.mark.parametrize(
    ("mask", "more", "what"),
    [
        ((2, 12, 3), {}, r"a first receives \(2, 12, 3\), and a second tensor with its part's shape"),
        ((1, 12, 5), {}, r"a returns \(2, 6, 4\) instead of 6 of 12 tokens .*: \(1, 6, width\)"),
        ((2, 1, 6, 6), SEEING, r"a.inner first receives \(2, 6, 4\) instead of 3 of 6 tokens"),
    ],
)
def test_a_mask_is_not_taken_for_the_tokens_of_a_block(mask, more, what):
    """It is cut where the tokens of each sample stand, or the samples, or the words that a token looks at."""
    model = layers(a=_MaskFirst())
    styles = {"a": "sequence_parallel", "a.inner.up": "colwise", "a.inner.down": "rowwise"}
    tokens.arrange(model, plan(model, styles | more), Alone(2, lambda *_: None))
    with pytest.raises(TrainingError, match=what):
        model["a"](torch.ones(mask), torch.ones(2, 6, 4))


def test_shared_heads_of_the_own_language_model_that_do_not_divide_are_named(tmp_path):
    options = {"train": lm_cases.corpus(tmp_path), "small": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1}}
    with pytest.raises(UsageError, match="num_key_value_heads=1"):
        plan(lm_cases.small_task(**options).model())


def test_heads_that_do_not_divide_are_named_though_rows_do():
    attention = layers(q=nn.Linear(4, 12))
    attention.num_heads = 3
    with pytest.raises(UsageError, match=r"a \(num_heads=3\)"):
        plan(layers(a=attention), {"a.q": "colwise"})


@pytest.mark.parametrize("words", [[0, 5], [-1, 4]])
def test_words_that_a_cut_embedding_does_not_have_are_named(words):
    embedding = nn.Embedding(5, 4)
    with pytest.raises(TrainingError, match=f"embedding has 5 rows, but was given {words[0]} to {words[1]}"):
        strategy._check_words("embed", embedding, (torch.tensor(words),))
    strategy._check_words("embed", embedding, (torch.arange(5),))


def test_tied_layers_are_refused_in_a_plan_of_the_tasks_own():
    tied = layers(a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    tied["b"].weight = tied["a"].weight
    with pytest.raises(UsageError, match="shares its weight"):
        plan(tied, {"b": "colwise"})


def test_a_plan_of_transformers_leaves_ends_whole_that_cannot_be_cut():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    for tie in (False, True):
        sizes |= {"tie_word_embeddings": tie}
        uneven, even = (
            plan(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=v)))
            for v in (9, 10)
        )
        assert len(uneven.styles) == 7
        assert [note.split()[0] for note in sorted(uneven.notes)] == ["lm_head", "model.embed_tokens"]
        assert (len(even.styles), even.notes, uneven.tied) == (9, [], [])
        assert even.tied == [("lm_head", "model.embed_tokens")] * tie
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=10))
    with pytest.raises(UsageError, match="num_key_value_heads=1"):
        plan(model)


KEYS = {
    "watch.every": {"watch": {"every": 5}},
    "compute.compile": {"compute": {"compile": "blocks"}},
    "precision=fp16": {"precision": "fp16"},
    "data.on_error=skip": {"data": {"on_error": "skip"}},
    "find_unused_parameters": {"parallel": {"find_unused_parameters": True}},
    "cannot be divided into tensor groups of 4": {"parallel": {"tensor": 4}},
    "there is no plan for sharding": {"plan": {}},
}


def refusals():
    """What each config is refused with, on this rank; and what a group on two nodes is refused with."""
    found = {}
    os.environ["LOCKSTEP_NODE"] = "ab"[int(os.environ["RANK"])]
    try:
        runs.fit(mesh_cases.Cut(), runs.config(parallel={"tensor": 2}))
    except LockstepError as error:
        found["rank 0 (node a, cpu), rank 1 (node b, cpu)"] = str(error)
    finally:
        del os.environ["LOCKSTEP_NODE"]
    for name, sections in KEYS.items():
        sections = dict(sections)
        task = mesh_cases.Cut(plan=sections.pop("plan", None))
        sections["parallel"] = {"tensor": 2} | sections.get("parallel", {})
        try:
            runs.fit(task, runs.config(**sections))
        except LockstepError as error:
            found[name] = str(error)
    return found


def test_keys_that_do_not_know_a_mesh_are_refused_on_all_ranks():
    for found in run_ranks(2, refusals):
        assert len(found) == len(KEYS) + 1
        for name, text in found.items():
            assert name in text
            assert "remedy" in text


def test_commands_that_do_not_know_a_mesh_refuse_it():
    with pytest.raises(UsageError, match=r"parallel.tensor=2: a command does not support"):
        ParallelConfig(tensor=2).without_mesh("a command")
    ParallelConfig().without_mesh("a command")
