"""P2: the gradient does not depend on how the global batch was cut. Against plain torch."""

import json

import pytest
import torch

from lockstep import LockstepError
from lockstep.core.checkpoint import files, store
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly

CUTS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3)]
KINDS = [(*cut, kind) for kind in ("Masked", "TwoHeads", "Plain") for cut in CUTS]
LENGTHS = [(*cut, length) for length in (49, 61) for cut in CUTS]
STEPS = 20


def micro(world, accumulate, global_batch=24):
    return {"micro": -(-global_batch // (world * accumulate))}


def trained(world, kind, options, settings):
    return run_ranks(world, runs.fit_kind, kind, options, settings)


@pytest.mark.cases("2-3-TwoHeads", "1-4-Plain")
@pytest.mark.parametrize(
    ("world", "accumulate", "kind"), mainly([*KINDS[1:4], (2, 3, "TwoHeads"), (1, 4, "Plain")], KINDS)
)
def test_weights_after_20_steps_are_those_of_plain_torch(world, accumulate, kind):
    expected, _ = runs.by_hand(getattr(own_tasks, kind)(), STEPS)
    settings = runs.config(batch=micro(world, accumulate), train={"steps": STEPS})
    for weights, _ in trained(world, kind, {}, settings):
        assert runs.difference(weights, expected) < 1e-10


# Last batches of 1 sample (a filler on every rank but one) and of 13.
@pytest.mark.cases("1-4-49", "2-3-61")
@pytest.mark.parametrize(("world", "accumulate", "length"), mainly([*LENGTHS[1:3], (2, 3, 61)], LENGTHS))
def test_partial_last_batch_is_trained_exactly(world, accumulate, length):
    expected, _ = runs.by_hand(own_tasks.Masked(length), STEPS)
    settings = runs.config(batch=micro(world, accumulate), train={"steps": STEPS})
    for weights, _ in trained(world, "Masked", {"length": length}, settings):
        assert runs.difference(weights, expected) < 1e-10


@pytest.mark.cases("1-4", "3-2")
@pytest.mark.parametrize(("world", "accumulate"), [(1, 4), (2, 3), (3, 2)])
def test_clipped_training_is_exact_and_logs_the_norm_before_clipping(world, accumulate):
    expected, norms = runs.by_hand(own_tasks.Masked(), clip_norm=0.1)
    settings = runs.config(batch=micro(world, accumulate), optim={"clip_norm": 0.1})
    for weights, results in trained(world, "Masked", {}, settings):
        assert runs.difference(weights, expected) < 1e-10
        assert results["train/grad_norm"] == pytest.approx(norms[-1], rel=1e-10)


@pytest.mark.parametrize(("world", "accumulate"), mainly([(1, 4), (2, 3)], CUTS))
def test_float32_agrees_to_rounding(world, accumulate):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    expected, _ = runs.by_hand(own_tasks.Masked(dtype=torch.float32), STEPS, optimizer=sgd)
    settings = runs.config(batch=micro(world, accumulate), train={"steps": STEPS})
    settings["optim"] = {"name": "SGD", "lr": 0.05, "args": {"momentum": 0.9}}
    for weights, _ in trained(world, "Masked", {"dtype": torch.float32}, settings):
        assert runs.difference(weights, expected) < 1e-6


def test_logged_loss_is_the_mean_over_exactly_the_units_since_the_last_entry():
    task = own_tasks.Masked()
    settings = runs.config(
        optim={"lr": 1e-30, "weight_decay": 0.0}, train={"steps": 10}, log={"every_steps": 10}
    )  # weights stay
    model = (torch.manual_seed(0), task.model())[1]
    inputs, targets, mask = task.data  # 240 samples in 10 steps of 24: the window is the epoch
    expected = float(((model(inputs) - targets).square() * mask).sum().detach() / mask.sum())
    for world in (1, 2):
        for _, results in trained(world, "Masked", {}, settings | {"batch": {"global": 24, "micro": 5}}):
            assert results["train/loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("world", [1, 2])
def test_step_without_any_valid_unit_is_skipped_and_counted(tmp_path, world):
    task = own_tasks.Masked()
    torch.manual_seed(0)
    untouched = {f"model.{name}": tensor.clone() for name, tensor in task.model().state_dict().items()}
    settings = runs.config(train={"steps": 4}, log={"every_steps": 4})
    for message in run_ranks(world, rank_cases.error_of, "Masked", {"mask_all": True}, settings, tmp_path):
        assert "nothing was learned: all updates were skipped (4 steps)" in message
        assert "Task.weight counted no unit in any global batch" in message
        assert "fp16" not in message
    (saved,) = store.listed(tmp_path / "checkpoints")
    assert runs.difference(dict(files.read(saved.path, saved.index)), untouched) == 0
    (results,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert results["train/skipped"] == 4
    assert "train/loss" not in results
    log = (tmp_path / "train.log").read_text()
    assert "warning: the last 4 steps changed no weight: 4 global batches had no valid unit" in log
    with pytest.raises(LockstepError, match="nothing was learned"):  # also where it goes on from there
        runs.fit(own_tasks.Masked(mask_all=True), settings, tmp_path)


def test_heads_that_differ_between_loss_and_weight_are_an_error(tmp_path):
    class Wrong(own_tasks.Masked):
        def weight(self, batch):
            return {"other": batch[2].sum()}

    with pytest.raises(LockstepError, match=r"heads \['loss'\].*\['other'\]"):
        runs.fit(Wrong(), runs.config(), tmp_path)


def test_loss_that_is_not_a_sum_is_an_error(tmp_path):
    class PerSample(own_tasks.Plain):
        def loss(self, model, batch):
            return (model(batch[0]) - batch[1]).square().mean(dim=1)

    with pytest.raises(LockstepError, match=r"shape \(24,\)"):
        runs.fit(PerSample(), runs.config(), tmp_path)
