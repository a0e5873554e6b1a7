"""A loss over the global batch is that of one process that has the whole batch, however the batch is cut."""

import pytest
import torch

from lockstep.core.errors import LockstepError
from lockstep.core.parallel.world import join_world
from lockstep.updates.rows import gather_rows
from tests import pair_tasks, runs
from tests.ranks import run_ranks
from tests.selection import mainly

EXACT = 1e-10
STEPS = 12  # an epoch is 10


def fit(kind, options, settings, run_dir=None):
    return runs.fit(getattr(pair_tasks, kind)(**options), settings, run_dir)


def settings(micro=5, **sections):
    return runs.config(batch={"global": 24, "micro": micro}, **sections)


CASES = [(kind, *cut) for kind in ("Pairs", "Alike") for cut in ((1, 24), (1, 5), (2, 12), (2, 5), (3, 3))]
CHOSEN = [("Pairs", 1, 24), ("Pairs", 2, 5), ("Alike", 1, 5), ("Alike", 3, 3)]


@pytest.mark.parametrize(("kind", "ranks", "micro"), mainly([("Alike", 3, 3), ("Pairs", 2, 5)], CASES))
def test_weights_are_those_of_one_process_with_the_whole_batch(kind, ranks, micro):
    task = getattr(pair_tasks, kind)()
    expected, norms = runs.by_hand(task, STEPS, clip_norm=0.5)
    sections = {"train": {"steps": STEPS}, "log": {"every_steps": 1}, "optim": {"clip_norm": 0.5}}
    found = run_ranks(ranks, fit, kind, {}, settings(micro, **sections))
    for weights, results in found:
        weights["calls"] = expected["calls"]
        assert runs.difference(weights, expected) < EXACT
        assert results["train/grad_norm"] == pytest.approx(norms[-1], rel=1e-9)


def test_the_logged_loss_is_that_of_the_global_batch():
    task = pair_tasks.Pairs()
    expected = []
    runs.by_hand(task, steps=1, before_step=lambda model, step: expected.append(model))
    with torch.no_grad():
        torch.manual_seed(0)
        model = task.model()
        data = task.train_data()
        indices = torch.from_numpy(runs.permute(range(24), 240, 0, 0))
        loss = task.loss(model, task.embed(model, [tensor[indices] for tensor in data.tensors])) / 24
    for _, results in run_ranks(2, fit, "Pairs", {}, settings(train={"steps": 1}, log={"every_steps": 1})):
        assert results["train/loss"] == pytest.approx(float(loss), rel=1e-12)


def with_dropout(settings):
    """The same training in one process: the embeddings of each micro-batch under its seed, then one backward pass."""
    from lockstep.core.data.order import StepPlan, derive_seed
    from lockstep.core.data.randomness import seed_forward

    task = pair_tasks.Pairs(dropout=0.4)
    torch.manual_seed(0)
    model, data = task.model().train(), task.train_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    ranks, micro = settings
    plan = StepPlan(240, 24, micro, world=ranks)
    for step in range(STEPS):
        parts = []
        for rank in range(ranks):
            for number, one in enumerate(plan.rank_micro_batches(step, rank)):
                seed_forward(derive_seed(0, step, rank, number), torch.device("cpu"))
                batch = [tensor[list(one.indices)] for tensor in data.tensors]
                parts.append(task.embed(model, batch))
        gathered = {name: torch.cat([part[name] for part in parts]) for name in ("left", "right")}
        optimizer.zero_grad()
        (task.loss(model, gathered) / 24).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("cut", mainly([[2, 5]], [[1, 5], [2, 5], [3, 8]]))
def test_both_passes_drop_the_same_elements(cut):
    expected = with_dropout(cut)
    for weights, _ in run_ranks(cut[0], fit, "Pairs", {"dropout": 0.4}, settings(cut[1], train={"steps": STEPS})):
        # Rank 0 has counted its calls of the second pass. The first pass leaves no trace.
        assert weights.pop("calls") == expected["calls"] / cut[0]
        assert runs.difference(weights, {name: expected[name] for name in weights}) < EXACT


@pytest.mark.parametrize("ranks", mainly([2], [1, 2, 3]))
def test_sharded_models_train_the_same(ranks):
    expected, _ = runs.by_hand(pair_tasks.Pairs(), STEPS)
    parallel = {"strategy": "fsdp", "shard_modules": ["left.*", "right.*"]}
    sharded = settings(train={"steps": STEPS}, parallel=parallel)
    for weights, _ in run_ranks(ranks, fit, "Pairs", {}, sharded):
        weights["calls"] = expected["calls"]
        assert runs.difference(weights, expected) < EXACT


@pytest.mark.exhaustive
def test_samples_that_cannot_be_read_are_left_out_on_any_ranks():
    skips = settings(2, data={"on_error": "skip"})
    (expected, _), *_ = run_ranks(1, fit, "Unreadable", {}, skips)
    for weights, _ in run_ranks(3, fit, "Unreadable", {}, skips):
        weights["calls"] = expected["calls"]
        assert runs.difference(weights, expected) < EXACT


@pytest.mark.exhaustive
def test_a_resumed_training_is_bit_identical(tmp_path):
    def train(steps, folder):
        sections = settings(train={"steps": steps}, checkpoint={"every_steps": 6})
        return fit("Pairs", {"dropout": 0.3}, sections, tmp_path / folder)[0]

    whole = train(12, "whole")
    train(6, "cut")
    cut = train(12, "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("OwnGenerator", "the embeddings of a batch differ between the pass without and the pass with gradient"),
        ("Complex", "it returned complex numbers"),
        ("Nothing", "it returned a NoneType for a batch of 5 samples"),
        ("NoRows", r"it returned a tensor of shape \(\) for a batch of 5 samples"),
    ],
)
def test_embeddings_that_cannot_be_used_are_an_error(kind, words):
    with pytest.raises(LockstepError, match=words) as caught:
        fit(kind, {}, settings())
    assert "Task.embed" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_train_alike_on_any_ranks(precision):
    options = {"dtype": torch.float32}
    (one, _), *_ = run_ranks(1, fit, "Pairs", options, settings(precision=precision))
    for weights, _ in run_ranks(2, fit, "Pairs", options, settings(precision=precision)):
        weights["calls"] = one["calls"]
        assert 0 < runs.difference(weights, one) < 0.1


def test_a_rank_without_samples_takes_part():
    small = runs.config(batch={"global": 2, "micro": 2}, train={"steps": 6})
    expected, _ = runs.by_hand(pair_tasks.Pairs(), steps=6, global_batch=2)
    for weights, _ in run_ranks(3, fit, "Pairs", {}, small):
        weights["calls"] = expected["calls"]
        assert runs.difference(weights, expected) < EXACT


def test_embeddings_that_are_not_finite_are_named_as_a_loss_that_is_not_finite():
    with pytest.raises(LockstepError, match="the loss is nan"):
        fit("NotFinite", {}, settings(train={"steps": 2}, log={"every_steps": 1}))


def gathered_on(rows):
    with join_world("cpu") as world:
        return gathered(world, rows)


def gathered(world, rows):
    count = rows[world.rank]
    tensors = [
        torch.arange(count, dtype=torch.float32) + 10 * world.rank,
        torch.arange(count * 2, dtype=torch.int64).reshape(count, 2),
        torch.ones(count, dtype=torch.bool),
        torch.arange(count, dtype=torch.float64) / 3,
    ]
    return gather_rows(tensors, world)


def test_rows_of_any_dtypes_are_gathered_where_some_ranks_have_one_row_or_none():
    for rows in ((1, 0), (0, 1), (1, 1), (3, 1), (0, 0)):
        for rank, (found, begin) in enumerate(run_ranks(2, gathered_on, rows)):
            assert begin == sum(rows[:rank])
            floats, integers, truths, doubles = found
            assert floats.tolist() == [*map(float, range(rows[0])), *(10.0 + one for one in range(rows[1]))]
            assert integers.tolist() == [[2 * row, 2 * row + 1] for count in rows for row in range(count)]
            assert truths.tolist() == [True] * sum(rows)
            assert doubles.tolist() == [row / 3 for count in rows for row in range(count)]
