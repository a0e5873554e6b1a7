"""Differences between ranks or batches: the order of heads, heads without units, unused parameters."""

import pytest
import torch

from lockstep import LockstepError
from tests import own_tasks, rank_cases, runs
from tests.processes import launched
from tests.ranks import run_ranks
from tests.selection import mainly


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr)


SGD = {"optim": {"name": "SGD", "lr": 0.05, "weight_decay": None}}


@pytest.mark.parametrize("world", mainly([3], [2, 3]))
def test_heads_in_another_order_on_another_rank_change_nothing(world):
    expected, _ = runs.by_hand(own_tasks.TwoHeads())
    settings = runs.config(batch={"micro": 5}, log={"every_steps": 1})
    (first, *others) = run_ranks(world, runs.fit_kind, "HeadsByRank", {}, settings)
    (_, alone) = runs.fit(own_tasks.TwoHeads(), settings)
    assert runs.difference(first[0], expected) < 1e-10
    for results in (first[1], *(one[1] for one in others)):
        for name in ("train/loss", "train/loss/a", "train/loss/b"):
            assert results[name] == pytest.approx(alone[name], rel=1e-10)


def test_other_heads_on_another_rank_are_named_on_all_before_the_first_step():
    for message in run_ranks(2, rank_cases.error_of, "HeadsByRank", {"fewer_from": 1}, runs.config()):
        assert "Task.weight: rank 0 has the heads ['a', 'b'], rank 1 has ['a']" in message


# Where one rank fails alone, the processes end: commands of their own, in the order of the tests below.
TASKS = "from tests.own_tasks import *"
COMMON = (
    "--nproc",
    2,
    "--max-restarts",
    0,
    "batch.global=24",
    "batch.micro=4",
    "train.steps=20",
    "log.writers=[text_log,json_lines]",
)


def failing(task, *settings):
    return ("train", f"{{folder}}/tasks.py:{task}", *settings, "--run-dir", "{folder}/run", "--fresh", *COMMON)


ALONE = launched(failing("HeadsByRank", "task.fewer_from=1", "task.of=loss"), failing("UnusedFrom"))


@launched(failing("HeadsByRank", "task.fewer_from=14"))
def test_other_heads_in_a_later_batch_are_named(launch):
    ended = launch.done[0]
    assert ended.returncode == 1
    assert (
        "rank 1 failed: Task.weight: the heads are ['a'] on rank 1, and were ['a', 'b'] in the first step"
        in ended.stderr
    )


@pytest.mark.exhaustive
@ALONE
def test_a_loss_with_other_heads_than_the_weight_is_named_before_the_first_update(launch):
    ended = launch.done[0]
    assert ended.returncode == 1
    assert (
        "rank 1 failed: Task.loss and Task.weight: the loss has the heads ['a'], the weight has ['a', 'b']"
        in ended.stderr
    )


@pytest.mark.exhaustive
@ALONE
def test_a_parameter_that_one_rank_stops_using_is_named_there(launch):
    ended = launch.done[1]
    assert ended.returncode == 1
    words = "2 trainable parameters got no gradient on this rank, though they did before: extra.weight, extra.bias"
    assert f"rank 1 failed: Task.loss: {words}" in ended.stderr
    assert "find_unused_parameters=true" in ended.stderr


@pytest.mark.parametrize(
    ("key", "value", "frozen"), [("strategy", "fsdp", False), ("strategy", "fsdp", True), ("static_graph", True, False)]
)
def test_constants_that_a_strategy_cannot_do_without_are_named(key, value, frozen):
    settings = runs.config(batch={"global": 6, "micro": 2}, parallel={key: value})
    for message in run_ranks(2, rank_cases.error_of, "ConstantHeads", {"frozen": frozen}, settings):
        assert "is a constant, which depends on no parameter" in message
        assert f"parallel.{key}" in message


@pytest.mark.parametrize(("world", "micro"), mainly([(1, 2), (3, 2)], [(1, 6), (1, 2), (2, 3), (3, 2)]))
def test_a_head_without_units_may_be_a_constant(world, micro, tmp_path):
    task = own_tasks.ConstantHeads(constants=False)
    expected, _ = runs.by_hand(task, steps=12, global_batch=6, optimizer=sgd)
    settings = runs.config(batch={"global": 6, "micro": micro}, train={"steps": 12}, **SGD)
    for weights, _ in run_ranks(world, runs.fit_kind, "ConstantHeads", {}, settings, tmp_path):
        assert runs.difference(weights, expected) < 1e-10


@pytest.mark.parametrize("world", [2, 3])
def test_constants_update_as_sums_over_nothing_do(world):
    """With AdamW, zeros are not the absence of a gradient: parameters decay on every rank or on none."""
    settings = runs.config(batch={"global": 6, "micro": 2}, train={"steps": 12})
    expected, _ = runs.fit(own_tasks.ConstantHeads(constants=False), settings)
    assert runs.difference(runs.fit(own_tasks.ConstantHeads(), settings)[0], expected) < 1e-10
    for weights, _ in run_ranks(world, runs.fit_kind, "ConstantHeads", {}, settings):
        assert runs.difference(weights, expected) < 1e-10


@pytest.mark.parametrize("world", [1, 2])
def test_a_head_with_the_coefficient_0_may_be_a_constant(world, tmp_path):
    expected, _ = runs.by_hand(own_tasks.Watched())
    for strategy in ("ddp", "fsdp")[:world]:
        settings = runs.config(batch={"micro": 5}, parallel={"strategy": strategy})
        for weights, results in run_ranks(world, runs.fit_kind, "Watched", {}, settings, tmp_path / strategy):
            assert runs.difference(weights, expected) < 1e-10
            assert results["train/loss/b"] > 0


@pytest.mark.parametrize("world", [1, 2])
def test_a_head_over_frozen_parameters_may_be_a_constant(world, tmp_path):
    def freeze(model, step):
        model.second.requires_grad_(step >= 4)

    expected, _ = runs.by_hand(own_tasks.FrozenHead(), steps=12, global_batch=6, before_step=freeze, optimizer=sgd)
    settings = runs.config(
        batch={"global": 6, "micro": 3}, train={"steps": 12, "unfreeze": [{"match": ["second.*"], "step": 4}]}, **SGD
    )
    for weights, _ in run_ranks(world, runs.fit_kind, "FrozenHead", {}, settings, tmp_path):
        assert runs.difference(weights, expected) < 1e-10


@pytest.mark.parametrize(
    ("method", "what", "words"),
    [
        ("loss", "float", "returned a float (1.5)"),
        ("loss", "None", "returned a NoneType"),
        ("loss", "tuple", "returned a tuple"),
        ("loss", "vector", "returned a tensor of shape (3,)"),
        ("loss", "int", "dtype int64"),
        ("loss", "detached", "depends on no trainable parameter"),
        ("loss", "constant", "depends on no trainable parameter"),
        ("loss", "empty", "empty dict"),
        ("loss", "number", "a head is called 1, a int"),
        ("loss", "nested", "head 'a' is a dict"),
        ("weight", "text", "is a str '12'"),
        ("weight", "vector", "is a Tensor of shape (3,)"),
        ("weight", "negative", "is -1.0"),
        ("weight", "nan", "is nan"),
        ("weight", "none", "is a NoneType"),
        ("weight", "empty", "empty dict"),
    ],
)
def test_what_a_task_returns_is_checked(method, what, words, tmp_path):
    message = rank_cases.error_of("Returns", {"method": method, "what": what}, runs.config(), tmp_path)
    assert words in message
    assert f"Task.{method}" in message
    assert "remedy" in message


def loss_in_16_bits(kind):
    class Narrow(getattr(own_tasks, kind)):
        def loss(self, model, batch):
            losses = super().loss(model, batch)
            return (
                {head: value.bfloat16() for head, value in losses.items()}
                if isinstance(losses, dict)
                else losses.bfloat16()
            )

    return Narrow(dtype=torch.float32)


@pytest.mark.parametrize(("kind", "bound"), [("Masked", 1e-6), ("TwoHeads", 2e-3)])
def test_a_loss_of_16_bits_does_not_round_its_factor(kind, bound):
    # A large step: the weights themselves are rounded, which must be small beside what they move.
    far = {"optim": SGD["optim"] | {"lr": 5.0}}
    expected, _ = runs.by_hand(
        getattr(own_tasks, kind)(dtype=torch.float32), steps=1, optimizer=lambda model: sgd(model, lr=5.0)
    )
    start = (torch.manual_seed(0), getattr(own_tasks, kind)(dtype=torch.float32).model().state_dict())[1]
    settings = runs.config(train={"steps": 1}, batch={"micro": 7}, **far)
    weights, _ = runs.fit(loss_in_16_bits(kind), settings)
    for name, tensor in weights.items():
        moved, wanted = tensor - start[name], expected[name] - start[name]
        assert float((moved - wanted).norm() / wanted.norm()) < bound


@pytest.mark.cases("2", "3")
@pytest.mark.parametrize(("world", "micro"), [(1, 2), (2, 3), (3, 2)])
def test_losses_of_16_bits_beside_constants_are_scaled_alike_on_all_ranks(world, micro):
    options = {"dtype": torch.float32, "narrow": True}
    expected, _ = runs.by_hand(
        own_tasks.ConstantHeads(dtype=torch.float32, constants=False), steps=12, global_batch=6, optimizer=sgd
    )
    settings = runs.config(batch={"global": 6, "micro": micro}, train={"steps": 12}, **SGD)
    found = [weights for weights, _ in run_ranks(world, runs.fit_kind, "ConstantHeads", options, settings)]
    assert all(runs.difference(weights, found[0]) == 0 for weights in found)
    assert runs.difference(found[0], expected) < 5e-3


@pytest.mark.parametrize(
    ("coefficients", "words"),
    [
        ({"bb": 2.0}, "there is no head 'bb'"),
        (2, "int"),
        ({"a": "x"}, "head 'a' is 'x'"),
        ({"b": float("nan")}, "head 'b' is nan"),
    ],
    ids=["misspelt", "number", "text", "nan"],
)
def test_coefficients_that_mean_nothing_are_named(coefficients, words):
    task = own_tasks.TwoHeads()
    task.coefficients = coefficients
    with pytest.raises(LockstepError) as caught:
        runs.fit(task, runs.config(train={"steps": 1}))
    assert words in str(caught.value)
    assert "Task.coefficients" in str(caught.value)
