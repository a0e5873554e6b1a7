"""What a step does besides arithmetic: how often ranks talk, what they agree on, and how short its way is."""

import pytest
import torch

from lockstep import LockstepError
from lockstep.core.parallel.world import join_world
from lockstep.core.step import driven
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_reduction_per_bucket_per_step_under_accumulation(accumulate):
    settings = runs.config(batch={"micro": 12 // accumulate}, train={"steps": 10})
    for calls in run_ranks(2, rank_cases.count_reductions, settings):
        buckets = max(calls) + 1
        assert len(calls) == 10 * buckets


@pytest.mark.cases("Dropout")
@pytest.mark.parametrize("world", mainly([3], [2, 3]))
@pytest.mark.parametrize("kind", ["Masked", "Dropout"])
def test_replicas_are_bit_identical_after_50_steps(world, kind):
    settings = runs.config(train={"steps": 50}, batch={"micro": 5}, optim={"clip_norm": 0.5})
    digests = run_ranks(world, rank_cases.digest_of_everything, kind, {}, settings)
    assert len(digests[0]) == 4 + 4 * 3  # weights, and AdamW's step and two moments for each
    assert all(digest == digests[0] for digest in digests[1:])


def test_buffers_are_those_of_rank_0_at_evaluation(tmp_path):
    settings = runs.config(train={"steps": 6, "eval_every_steps": 3})
    first, second = run_ranks(2, rank_cases.batchnorm_buffers, settings, tmp_path)
    assert len(first) == 2
    assert first == second


class CallsBackward(own_tasks.Plain):
    """Its loss computes gradients itself, in one of the ways of a plain loop."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if torch.is_grad_enabled():
            loss.backward(retain_graph=self.how == "keeps the graph")
        return loss.detach() if self.how == "detaches" else loss


class Penalised(own_tasks.Plain):
    """A gradient of the inputs, which leaves none in the parameters."""

    def loss(self, model, batch):
        with torch.enable_grad():
            inputs = batch[0].requires_grad_()
            (slope,) = torch.autograd.grad(super().loss(model, [inputs, batch[1]]), inputs, create_graph=True)
        return super().loss(model, [inputs, batch[1]]) + slope.square().sum()


def refusal_of(how, strategy):
    try:
        runs.fit(CallsBackward(how), runs.config(train={"steps": 2}, parallel={"strategy": strategy}))
    except LockstepError as error:
        return str(error)
    return ""


def test_a_loss_that_calls_backward_is_named():
    """With retain_graph=True, its gradient counted twice, silently."""
    for world, strategy, how in [
        (1, "single", "frees the graph"),
        (1, "single", "keeps the graph"),
        (1, "single", "detaches"),
        (2, "ddp", "keeps the graph"),
        (2, "fsdp", "keeps the graph"),
    ]:
        for text in run_ranks(world, refusal_of, how, strategy):
            assert "Task.loss: it calls backward() itself" in text, (strategy, how)
            assert "torch.autograd.grad(loss, inputs)" in text
    assert runs.fit(Penalised(), runs.config(train={"steps": 2}))[1]["step"] == 2


def test_parameter_without_gradient_is_named_on_all_ranks():
    for world in (1, 2):
        for message in run_ranks(world, rank_cases.error_of, "Unused", {}, runs.config()):
            assert "forgotten.weight, forgotten.bias" in message
            assert "find_unused_parameters" in message


def test_unused_parameters_can_be_allowed():
    settings = runs.config(parallel={"find_unused_parameters": True})
    expected, _ = runs.by_hand(own_tasks.Unused())
    for world in (1, 2):
        for weights, _ in run_ranks(world, runs.fit_kind, "Unused", {}, settings):
            assert runs.difference(weights, expected) < 1e-10


def test_model_without_trainable_parameters_is_an_error():
    class Frozen(own_tasks.Plain):
        def model(self):
            return super().model().requires_grad_(False)

    with pytest.raises(LockstepError, match="no trainable parameter"):
        runs.fit(Frozen(), runs.config())


def test_overflow_in_fp16_skips_the_update_counts_it_and_holds_the_schedule():
    class Overflowing(own_tasks.Masked):
        """Gradients beyond fp16 at the initial loss scale of 65536, until it has come down."""

        def loss(self, model, batch):
            return super().loss(model, batch) * 100

    settings = runs.config(precision="fp16", schedule={"name": "linear"}, train={"steps": 12}, log={"every_steps": 1})
    _, results = runs.fit(Overflowing(dtype=torch.float32), settings)
    skipped = results["train/skipped"]
    assert 0 < skipped < 12
    assert results["train/loss_scale"] == 65536 * 0.5**skipped
    assert results["train/lr"] == pytest.approx(0.01 * (1 - (11 - skipped) / 12))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains_like_fp32(precision):
    full, expected = runs.fit(own_tasks.Masked(dtype=torch.float32), runs.config())
    settings = runs.config(precision=precision)
    for world in (1, 2):
        for weights, results in run_ranks(world, runs.fit_kind, "Masked", {"dtype": torch.float32}, settings):
            assert weights["0.weight"].dtype == torch.float32
            assert runs.difference(weights, full) > 0  # it did compute in another format
            assert results["train/loss"] == pytest.approx(expected["train/loss"], rel=0.05)
            assert results["train/skipped"] <= 2  # fp16 finds its loss scale first


def test_not_finite_loss_names_step_rank_and_samples():
    settings = runs.config(batch={"global": 8}, train={"steps": 5}, log={"every_steps": 5})
    for world in (1, 2):
        for message in run_ranks(world, rank_cases.error_of, "FromFiles", {"poisoned": [7]}, settings):
            assert "the loss is nan" in message
            named = message.partition("samples [")[2].partition("]")[0].split(", ")
            assert "7" in named
            assert len(named) == 8 // world
            assert "step " in message
            assert "rank " in message


def test_a_failing_answer_ends_the_steps_before_the_caller_sees_the_error():
    ended = []

    def steps():
        try:
            yield 1
        finally:
            ended.append(True)

    def fails(value):
        raise ValueError("the step failed")

    with pytest.raises(ValueError, match="the step failed") as caught:  # the error holds the frames of the generator
        driven(steps(), fails)
    assert ended, caught
    assert driven(iter_of(3), lambda value: value + 1) == [1, 2, 3]


def iter_of(count):
    answers = []
    for value in range(count):
        answers.append((yield value))
    return answers


# ---- buffers


def mixed_buffers(rank):
    kinds = (torch.float32, torch.int64, torch.bool, torch.complex128, torch.bfloat16, torch.uint8)
    found = [torch.full((number + 1,), rank + 1, dtype=kind) for number, kind in enumerate(kinds)]
    return [
        torch.tensor(rank),
        *found,
        torch.full((3, 4), float(rank)).t(),
        torch.empty(0),
        torch.arange(6.0)[::2] + rank,
    ]


def test_buffers_of_all_kinds_are_those_of_rank_0():
    for of_rank in run_ranks(2, broadcast_buffers):
        assert all(torch.equal(one, other) for one, other in zip(of_rank, mixed_buffers(0), strict=True))


def broadcast_buffers():
    with join_world("cpu") as world:
        buffers = mixed_buffers(world.rank)
        world.broadcast_tensors(buffers)
        return buffers
