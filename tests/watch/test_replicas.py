"""Replicas are compared before each save too, and the words on who differs."""

import collections
import math
import os
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import Part, Trainer
from lockstep.core.checkpoint import store
from lockstep.core.errors import LockstepError
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.strategy import Forward
from lockstep.parts import determinism, replicas
from lockstep.parts.replicas import differing, digests_of, other_losses, tensors_of_state, who_differs
from lockstep.watch.state import state_digest
from tests import own_tasks, runs
from tests.core.test_strategies import STRATEGIES, settings_for
from tests.ranks import run_ranks

BAD_STEP = 4


class Spoiled(runs.FinalWeights):
    """Flips the lowest bit of a number on one rank, after an update."""

    def __init__(self, what, rank):
        super().__init__()
        self.what, self.rank = what, rank

    def join(self, run):
        super().join(run)

        def flip(optimizer, *_):
            if run.state.step == BAD_STEP:
                tensors = replicas.tensors_of_state(run.state)
                numbers = local(tensors[self.what].detach()).flatten()
                numbers[-1:].view(torch.int64).bitwise_xor_(1)

        if os.environ["RANK"] == str(self.rank):
            run.state.optimizer.register_step_post_hook(flip)


def spoiled(what, rank, settings, folder):
    """The error that the training ends with on this rank."""
    try:
        Trainer(settings, run_dir=folder, quiet=True).fit(own_tasks.Deep(), Spoiled(what, rank))
    except LockstepError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "rank", "what", "says", "kind"),
    [
        ("ddp 2", 0, "optimizer.inner.bias.exp_avg_sq", "ranks 0 and 1 differ in optimizer.inner.bias.exp", "memory"),
        ("ddp 3", 2, "ema.scale", "rank 2 differs from ranks 0 and 1 in ema.scale", "memory"),
        pytest.param(
            "hybrid 2x2",
            3,
            "optimizer.head.weight.exp_avg",
            "ranks 1 and 3 differ in optimizer.head.weight.exp_avg",
            "memory",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_flipped_bit_is_named_before_the_state_is_saved(tmp_path, name, rank, what, says, kind):
    world, parallel = (3, {"strategy": "ddp"}) if name == "ddp 3" else STRATEGIES[name]
    train, checkpoint = {"steps": 6, "ema_decay": 0.9}, {"every_steps": 2, "mode": "sync"}
    settings = settings_for(world, parallel, train=train, checkpoint=checkpoint, watch={"every": 2})
    for text in run_ranks(world, spoiled, what, rank, settings, tmp_path / "run"):
        assert f"step {BAD_STEP}, watch.every=2: {kind}: the ranks do not hold the same state: {says}" in text
        assert f"the memory or the device of rank {rank}" in text  # as the steps say when they are made again
        assert "more tensors" not in text
    # The check of step 2 was whole, and replicas were the same after it.
    assert [(one.step, one.checked_step) for one in store.listed(tmp_path / "run/checkpoints")] == [(2, 2)]


class Rogue(Part):
    """Writes a weight on one rank."""

    def __init__(self, how):
        self.how = how

    def after_step(self, training):
        if training.rank == 1 and training.step == BAD_STEP - 1:
            weight = training.model.head.weight
            with torch.no_grad():
                (weight if self.how == "seen" else weight.data).mul_(1.001)


def written(how, settings, folder):
    with pytest.raises(LockstepError) as caught:
        Trainer(settings, run_dir=folder, quiet=True, parts=[Rogue(how)]).fit(own_tasks.Deep())
    return str(caught.value)


def test_a_part_that_writes_weights_on_one_rank_is_named_before_the_machine(tmp_path):
    settings = settings_for(3, {"strategy": "ddp"}, train={"steps": 6}, watch={"every": 2})
    for how, words in {
        "seen": "code: the Part Rogue has written head.weight in after_step, on rank 1 and not on the others",
        "unseen": "or code of these Parts, which replays do not call: Rogue. Start without them",
    }.items():
        for text in run_ranks(3, written, how, settings, tmp_path / how):
            assert words in text, how
            assert ("take this machine out" in text, "the device of rank 1" in text) == (False, how == "unseen")


def test_convolutions_are_not_chosen_by_measurement(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with determinism.same_convolutions():
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)


# ---- words


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 2], "ranks 0 and 1 differ"),
        ([1, 2, 1], "rank 1 differs from ranks 0 and 2"),
        ([2, 1, 1], "rank 0 differs from ranks 1 and 2"),
        ([1, 2, 3], "ranks 0 and 1 differ"),
        ([1, 1, 2, 2], "ranks 0 and 2 differ"),
        ([1, 2, 1, 3, 1], "ranks 1 and 3 differ from ranks 0, 2 and 4"),
        ([1] * 11 + [2], "rank 11 differs from ranks 0, 1, 2, 3, 4, 5, 6 and 4 more"),
    ],
)
def test_who_differs(values, words):
    assert who_differs(dict(enumerate(values))) == words


def test_the_first_head_that_differs_is_found():
    one, near = (2.0).hex(), math.nextafter(2.0, 3.0).hex()
    assert other_losses([{"a": one, "b": one}] * 3) is None
    assert other_losses([{"a": one, "b": one}, {"a": one, "b": near}]) == ("b", "ranks 0 and 1 differ")
    assert differing([{"a": (0, 2, 1)}, {"a": (2, 2, 5)}]) == []  # other rows


class Counted(TorchDispatchMode):
    """Counts operations, such as the products that a digest ends with, and values that the host waits for."""

    def __init__(self):
        super().__init__()
        self.operations = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.operations[function.overloadpacket.__name__] += 1
        return function(*arguments, **(options or {}))


def test_a_comparison_reads_each_tensor_once_and_waits_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.ones(2), persistent=False)
    strategy = types.SimpleNamespace(unwrapped=Forward(model, lambda model, batch: None), is_sharded=False)
    world = types.SimpleNamespace(device=torch.device("cpu"))
    state = types.SimpleNamespace(
        strategy=strategy, world=world, optimizer=torch.optim.SGD(model.parameters()), averages=None, step=0
    )
    with Counted() as counted:
        digests_of(tensors_of_state(state))
    tensors = len(model.state_dict()) + 1
    assert counted.operations["dot"] == 2 * tensors, "each half of a digest ends with a product"
    assert counted.operations["stack"] == 1, "the digests come to the host together"
    assert "_local_scalar_dense" not in counted.operations
    with Counted() as counted:
        state_digest(state)
    assert counted.operations
    assert "_local_scalar_dense" not in counted.operations, "nothing comes to the host before all ranks are compared"
