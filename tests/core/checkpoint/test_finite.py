"""What is committed is finite: the check itself, what a saver does with it, and whole runs that meet NaN."""

import contextlib
import math
import os
import signal

import pytest
import torch
from torch import nn

from lockstep.core.checkpoint import finite
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.checkpoint.saver import Saver
from lockstep.core.errors import LockstepError, TrainingError
from tests import own_tasks, rank_cases, runs
from tests.core.checkpoint import cases
from tests.core.checkpoint.cases import ALONE, about, steps
from tests.ranks import run_ranks

NAN, INF = math.nan, math.inf


# ---- one tensor


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64]
)
@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, finite.FINITE), (INF, finite.INFINITE), (-INF, finite.INFINITE), (NAN, finite.NAN)]
)
def test_one_element_decides(dtype, value, expected):
    tensor = torch.ones(257)
    tensor[100] = value
    assert finite.grade(tensor.to(dtype)) == expected
    assert finite.grade(tensor[100].to(dtype)) == expected  # a scalar
    assert finite.grade(tensor.to(dtype).reshape(1, 257).t()) == expected


def test_nan_beside_infinity_is_nan_and_an_imaginary_part_counts():
    assert finite.grade(torch.tensor([INF, NAN])) == finite.NAN
    assert finite.grade(torch.complex(torch.zeros(2), torch.tensor([0.0, NAN]))) == finite.NAN
    assert finite.grade(torch.complex(torch.zeros(2), torch.tensor([0.0, INF])).conj()) == finite.INFINITE


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0), torch.tensor([True]), torch.tensor([2**62]), torch.full((3,), 3e38)],
    ids=["empty", "bool", "int", "large"],
)
def test_what_can_hold_no_nan_or_is_merely_large_is_finite(tensor):
    assert finite.grade(tensor) == finite.FINITE


def test_a_tensor_may_hold_what_it_held_before_training_and_nothing_worse():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -INF]))
    model.register_parameter("frozen", nn.Parameter(torch.tensor([INF]), requires_grad=False))
    state = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    state["ema.frozen"] = model.frozen.detach().clone()
    allowed = finite.at_start(model, state, ALONE)
    assert finite.faults(state, allowed) == {}
    worse = {"model.mask": NAN, "model.weight": INF, "ema.frozen": NAN}
    found = finite.faults(state | {name: torch.tensor([value]) for name, value in worse.items()}, allowed)
    assert found == {"model.mask": finite.NAN, "model.weight": finite.INFINITE, "ema.frozen": finite.NAN}


# ---- a saver


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("name", ["model.weight", "optimizer.weight.exp_avg", "ema.weight", "model.count"])
def test_state_that_is_not_finite_is_refused_and_nothing_is_pruned(tmp_path, in_background, name):
    told = []
    saver = Saver(
        tmp_path,
        ALONE,
        CheckpointConfig(keep_last=1),
        tell=told.append,
        in_background=in_background,
        allowed={"model.mask": finite.INFINITE},
    )
    good = {key: torch.ones(5) for key in ("model.weight", "optimizer.weight.exp_avg", "ema.weight", "model.count")}
    good["model.mask"] = torch.tensor([-INF])
    saver.save(3, good, {}, about(3))
    saver.wait()
    expected = rf"step 5, rank 0: {name} holds NaN, so this state was not saved; the checkpoint of step 3 is kept"
    bad = good | {name: torch.tensor([0.0, NAN])}
    with contextlib.nullcontext() if in_background else pytest.raises(TrainingError, match=expected):
        saver.save(5, bad, {}, about(5))
    with pytest.raises(TrainingError, match=expected) as caught:
        saver.wait()
    assert caught.value.exit_code == 1
    assert not caught.value.retryable
    assert steps(tmp_path) == [3]
    assert not list(tmp_path.glob(".staging*"))
    assert len(told) == in_background  # at once, where the training goes on meanwhile
    for act in (saver.wait, saver.finish, lambda: saver.save(6, good, {}, about(6))):
        with pytest.raises(TrainingError, match=expected):
            act()


def test_the_first_checkpoint_is_refused_too(tmp_path):
    saver = Saver(tmp_path, ALONE, CheckpointConfig(), tell=cases.ignore)
    saver.save(2, {"model.a": torch.tensor([INF]), "model.b": torch.tensor([NAN])}, {}, about(2))
    with pytest.raises(
        TrainingError, match=r"model\.a holds infinite numbers, and 1 more .* no checkpoint was saved before"
    ):
        saver.finish()
    assert steps(tmp_path) == []
    assert "No checkpoint is saved" in saver.kept()


# ---- whole runs


def at_zero(tensor):
    """Zero, with a gradient that is NaN: the derivative of sqrt(z * z) at 0."""
    zero = tensor - tensor.detach()
    return (zero * zero).sqrt().sum()


class Zero(own_tasks.Plain):
    """Step `at` has a finite loss and a NaN gradient. hidden: only of elements that no later loss depends on."""

    def __init__(self, at, hidden=False, stops=None, **options):
        super().__init__(**options)
        self.at, self.hidden, self.stops, self.steps = at, hidden, stops, 0

    def model(self):
        model = super().model()
        model.ghost = nn.Parameter(torch.zeros(4, dtype=self.dtype))
        return model

    def loss(self, model, batch):
        self.steps += model.training
        loss = super().loss(model, batch) + model.ghost[0]
        if model.training and self.steps == self.at:
            loss = loss + at_zero(model.ghost[2:] if self.hidden else model[0].bias)
        if model.training and self.steps == self.stops:
            os.kill(os.getpid(), signal.SIGUSR1)
        return loss


SETTINGS = runs.config(log={"every_steps": 50}, checkpoint={"every_steps": 5, "keep_last": 1})


def test_nan_gradient_in_a_step_that_saves_is_named_before_the_save_and_the_checkpoint_before_stays(tmp_path):
    with pytest.raises(TrainingError, match=r"step 10, .*the gradient norm is nan"):
        runs.fit(Zero(at=10), SETTINGS, tmp_path)
    assert steps(tmp_path / "checkpoints") == [5]
    assert runs.fit(Zero(at=None), SETTINGS, tmp_path)[1]["step"] == 20


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_nan_that_no_loss_shows_is_not_saved(tmp_path, mode):
    settings = SETTINGS | {"checkpoint": {"every_steps": 5, "keep_last": 1, "mode": mode}}
    expected = r"step 10, rank 0: model\.ghost holds NaN, and 2 more .*the checkpoint of step 5 is kept"
    with pytest.raises(TrainingError, match=expected):
        runs.fit(Zero(at=8, hidden=True), settings, tmp_path)
    assert steps(tmp_path / "checkpoints") == [5]


def test_nan_is_not_saved_on_a_request_to_stop(tmp_path):
    with pytest.raises(
        TrainingError, match=r"step 9, rank 0: model\.ghost holds NaN, .*the checkpoint of step 5 is kept"
    ):
        runs.fit(Zero(at=8, hidden=True, stops=9), SETTINGS, tmp_path)
    assert steps(tmp_path / "checkpoints") == [5]


def fit_hidden(folder):
    """Errors of trainings whose NaN one rank holds, or all do."""
    found = []
    for name, parallel in (("ddp", {"strategy": "ddp"}), ("fsdp", {"strategy": "fsdp"})):
        with rank_cases.impatient():
            try:
                runs.fit(Zero(at=8, hidden=True), SETTINGS | {"parallel": parallel}, folder / name)
            except LockstepError as error:
                found.append(str(error))
    return found


def test_all_ranks_end_where_one_holds_nan(tmp_path):
    for replicated, sharded in run_ranks(2, fit_hidden, tmp_path):
        assert "ghost holds NaN" in replicated
        assert "step 10, rank 1: model.ghost holds NaN" in sharded  # the second half of its rows
        assert "the checkpoint of step 5 is kept" in replicated
        assert "the checkpoint of step 5 is kept" in sharded
    assert steps(tmp_path / "ddp" / "checkpoints") == steps(tmp_path / "fsdp" / "checkpoints") == [5]


def test_mask_of_infinities_is_saved_and_resumed(tmp_path):
    class WithMask(own_tasks.Plain):
        def model(self):
            model = super().model()
            model.register_buffer("mask", torch.tensor([0.0, -INF]))
            return model

    runs.fit(WithMask(), runs.config(train={"steps": 3}), tmp_path)
    assert runs.fit(WithMask(), runs.config(train={"steps": 6}), tmp_path)[1]["step"] == 6


def test_parameter_that_is_not_finite_at_the_start_is_named_before_the_first_step(tmp_path):
    class Empty(own_tasks.Plain):
        def model(self):
            model = super().model()
            with torch.no_grad():
                model[2].weight[1, 3] = NAN
            return model

        def loss(self, model, batch):
            raise AssertionError("it computed")

    with pytest.raises(TrainingError, match=r"rank 0: model\.2\.weight holds NaN before the first step"):
        runs.fit(Empty(), runs.config(), tmp_path)
