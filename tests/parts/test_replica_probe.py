"""A training that compares its ranks names the rank that differs, and saves nothing of the bad step."""

import collections
import math
import os
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import Trainer
from lockstep.core.checkpoint import store
from lockstep.core.errors import LockstepError
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.strategy import Forward
from lockstep.parts import determinism, replicas
from lockstep.parts.replica_probe import ReplicaProbe
from lockstep.parts.replicas import differing, other_losses, who_differs
from tests import own_tasks, part_cases, runs
from tests.core.test_strategies import STRATEGIES, settings_for
from tests.ranks import run_ranks
from tests.selection import mainly

BAD_STEP = 4
BY_STEPS, AT_SAVES = {"probe_every": 2}, {"probe_every": 1000}


class WithBuffers(own_tasks.Deep):
    """BatchNorm, whose statistics are each rank's own; a mask that nothing changes; and random numbers."""

    def __init__(self, **options):
        super().__init__(**options, dropout=0.2)

    def model(self):
        built = super().model()
        built.norm = nn.BatchNorm1d(10).to(self.dtype)
        return built

    def loss(self, model, batch):
        return super().loss(model, [model.norm(batch[0]), *batch[1:]])


class WithCodes(WithBuffers):
    """A code book that each forward pass moves through `.data`, which torch does not count."""

    def model(self):
        built = super().model()
        built.register_buffer("codes", torch.zeros(2, 10, dtype=self.dtype))
        return built

    def loss(self, model, batch):
        if model.training:
            model.codes.data.lerp_(batch[0].mean(dim=0), 0.1)
        return super().loss(model, batch)


class Spoiled(runs.FinalWeights):
    """Flips the lowest bit of a number on one rank, after an update."""

    def __init__(self, what, rank):
        super().__init__()
        self.what, self.rank = what, rank

    def record_steps(self, prepared):
        def flip(optimizer, *_):
            if prepared.state.step == BAD_STEP:
                tensors = replicas.tensors_of_state(prepared.state)
                numbers = local(tensors[self.what].detach()).flatten()
                numbers[-1:].view(torch.int64).bitwise_xor_(1)

        if os.environ["RANK"] == str(self.rank):
            prepared.state.optimizer.register_step_post_hook(flip)
        yield from super().record_steps(prepared)


def spoiled(what, rank, settings, folder, kind="WithBuffers"):
    """The error that the training ends with on this rank."""
    task = WithBuffers() if kind == "WithBuffers" else own_tasks.Deep()
    try:
        Trainer(settings, run_dir=folder, quiet=True).fit(task, Spoiled(what, rank))
    except LockstepError as error:
        return str(error)
    return None


def fit(settings, folder):
    return runs.fit(WithBuffers(), settings, folder)[0]


def fit_with_codes(settings, folder):
    assert not torch.backends.cudnn.deterministic
    runs.fit(WithCodes(), settings, folder)
    assert not torch.backends.cudnn.deterministic


def settings_of(name, train, **sections):
    world, parallel = (3, {"strategy": "ddp"}) if name == "ddp 3" else STRATEGIES[name]
    checkpoint = {"every_steps": 2 if train.get("probe_every") != 2 else 3, "mode": "sync"}
    return world, settings_for(world, parallel, train={"steps": 6, **train}, checkpoint=checkpoint, **sections)


@pytest.mark.parametrize(
    ("name", "rank", "what", "train", "says"),
    [
        ("ddp 2", 1, "model.head.weight", BY_STEPS, "ranks 0 and 1 differ in model.head.weight"),
        ("ddp 2", 0, "optimizer.inner.bias.exp_avg_sq", AT_SAVES, "ranks 0 and 1 differ in optimizer.inner.bias.exp"),
        ("ddp 3", 1, "buffer.factors", BY_STEPS, "rank 1 differs from ranks 0 and 2 in buffer.factors"),
        ("ddp 3", 0, "model.inner.weight", AT_SAVES, "rank 0 differs from ranks 1 and 2 in model.inner.weight"),
        ("ddp 3", 2, "ema.scale", BY_STEPS, "rank 2 differs from ranks 0 and 1 in ema.scale"),
    ],
)
def test_a_flipped_bit_is_named_and_not_saved(tmp_path, name, rank, what, train, says):
    averages = {"ema_decay": 0.9} if train is BY_STEPS else {}  # a step later the bit is in the averages too
    world, settings = settings_of(name, averages | train)
    for text in run_ranks(world, spoiled, what, rank, settings, tmp_path / "run"):
        assert (
            f"step {BAD_STEP}, train.probe_every={train['probe_every']}: the ranks do not hold the same state" in text
        )
        assert says in text
        assert "more tensors" not in text
        assert "the fault is on rank" not in text  # of the rank that said it first
        assert f"The checkpoint of step {2 if train is AT_SAVES else 3} is saved" in text
        assert "This state is not saved" in text
    assert [one.step for one in store.listed(tmp_path / "run/checkpoints")] == [2 if train is AT_SAVES else 3]


@pytest.mark.parametrize("name", mainly(["fsdp 2"], ["ddp 2", "ddp 3", "fsdp 2", "hybrid 2x2"]))
def test_ranks_that_agree_train_on_as_if_nobody_compared_them(tmp_path, name):
    world, settings = settings_of(name, BY_STEPS)
    probed = run_ranks(world, fit, settings, tmp_path / "run")
    world, settings = settings_of(name, {})
    plain = run_ranks(world, fit, settings, tmp_path / "other")
    for one, other in zip(probed, plain, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.exhaustive
def test_replicas_of_shards_are_compared_in_hybrid_sharding_and_nothing_else_of_shards(tmp_path):
    world, settings = settings_of("hybrid 2x2", BY_STEPS)
    for text in run_ranks(world, spoiled, "model.head.weight", 3, settings, tmp_path / "run", "Deep"):
        assert "ranks 1 and 3 differ in model.head.weight" in text


def test_a_code_book_that_is_written_through_data_is_no_damage(tmp_path):
    world, settings = settings_of("ddp 2", BY_STEPS)
    run_ranks(world, fit_with_codes, settings, tmp_path / "run")
    assert len(store.listed(tmp_path / "run/checkpoints")) == 2


class NeverTheSame(own_tasks.Plain):
    """In evaluation, the loss moves with each call, on all ranks alike."""

    calls = 0

    def loss(self, model, batch):
        self.calls += not model.training
        return super().loss(model, batch) * (1 if model.training else 1 + 1e-15 * self.calls)


def never_the_same(settings, folder):
    runs.fit(NeverTheSame(), settings, folder)


class OtherArithmetic(own_tasks.Plain):
    """In evaluation, rank 1 computes another last bit: always, or each time another."""

    calls = 0

    def __init__(self, always):
        super().__init__()
        self.always = always

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if model.training:
            return loss
        self.calls += 1
        is_wrong = os.environ["RANK"] == "1"
        return loss * (1 + 1e-15 * is_wrong * (1 if self.always else self.calls))


def computing_otherwise(always, settings, folder):
    try:
        runs.fit(OtherArithmetic(always), settings, folder)
    except LockstepError as error:
        return str(error)
    return None


def test_a_rank_that_computes_otherwise_is_named(tmp_path):
    world, settings = settings_of("ddp 3", BY_STEPS)
    for text in run_ranks(world, computing_otherwise, True, settings, tmp_path / "run"):
        assert "step 2" in text
        assert "rank 1 differs from ranks 0 and 2 in the loss of one batch, though their states are the same" in text
        assert text.count("rank ") > 3
    assert store.listed(tmp_path / "run/checkpoints") == []


def test_a_loss_that_is_never_the_same_is_a_warning(tmp_path):
    world, settings = settings_of("ddp 2", BY_STEPS)
    assert run_ranks(world, computing_otherwise, False, settings, tmp_path / "run") == [None, None]
    log = (tmp_path / "run/train.log").read_text()
    assert log.count("after step 2, the loss of one batch changes when it is computed again") == 1
    assert log.count("computed again") == 1
    assert store.listed(tmp_path / "run/checkpoints")[0].step == 6


def test_a_loss_that_never_repeats_is_told_also_where_the_ranks_agree(tmp_path):
    world, settings = settings_of("ddp 2", BY_STEPS)
    run_ranks(world, never_the_same, settings, tmp_path / "run")
    assert (tmp_path / "run/train.log").read_text().count(
        "the loss of one batch changes when it is computed again"
    ) == 1


def test_convolutions_are_not_chosen_by_measurement(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with determinism.same_convolutions():
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)


def test_one_rank_has_no_probe(tmp_path):
    settings = runs.config(train={"steps": 2, "probe_every": 1})
    runs.fit(own_tasks.Plain(), settings, tmp_path / "run")
    assert "train.probe_every compares nothing on one rank" in (tmp_path / "run/train.log").read_text()


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
    """Counts sums, which each digest ends with, and values that the host waits for."""

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
    world = types.SimpleNamespace(gather=lambda value: [value], broadcast=lambda value: value)
    state = types.SimpleNamespace(
        strategy=strategy, world=world, optimizer=torch.optim.SGD(model.parameters()), averages=None, step=0
    )
    probe = ReplicaProbe(1)
    training = part_cases.inside(state, model=model)
    probe.start(training)
    training.step = 1
    with Counted() as counted:
        probe.before_save(training)
    assert counted.operations["sum"] == len(model.state_dict()) + 1
    assert counted.operations["stack"] == 1, "the digests come to the host together"
    assert "_local_scalar_dense" not in counted.operations
