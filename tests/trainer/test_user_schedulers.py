"""Schedulers of a script with a `Loop`: the rates of a plain loop, also after the run was left and resumed."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core.errors import UsageError
from lockstep.trainer import user_exit

CONFIG = {"log.writers": ["json_lines"], "device": "cpu"}
EPOCHS, SIZE, BATCH = 4, 40, 10

PER_EPOCH = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "in turn": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
}


def training(make):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SIZE, 3), torch.randn(SIZE, 1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return data, model, optimizer, make(optimizer)


def value_of(epoch):
    """What the plateau is looked for in: it does not improve in the epochs 1 and 3."""
    return float(-(epoch // 2))


def stepped(scheduler, epoch):
    is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(value_of(epoch)) if is_plateau else scheduler.step()


def plain_rates(make):
    *_, optimizer, scheduler = training(make)
    rates = []
    for epoch in range(EPOCHS):
        rates += [optimizer.param_groups[0]["lr"]] * (SIZE // BATCH)
        optimizer.step()
        stepped(scheduler, epoch)
    return rates


def loop_rates(make, folder, *, given=False, stop=None, is_late=False):
    """The rate of each step, until the script leaves after step `stop`."""
    data, model, optimizer, scheduler = training((lambda _: None) if is_late else make)
    options = {"scheduler": scheduler, "scheduler_every": "epoch"} if given else {}
    options |= {"global_batch": BATCH, "epochs": EPOCHS, "run_dir": folder, "quiet": True, "config": CONFIG}
    loop, rates = lockstep.Loop(model, optimizer, data, **options), []
    scheduler = make(optimizer) if is_late else scheduler
    for step in loop:
        for inputs, targets in step:
            rates.append(optimizer.param_groups[0]["lr"])
            step.backward((loop.model(inputs) - targets).square().mean())
        if step.ends_epoch and not given:
            stepped(scheduler, step.epoch)
        if step.number == stop:
            break
    loop.close()
    return rates


@pytest.mark.cases("cosine", "plateau")
@pytest.mark.parametrize("name", PER_EPOCH)
def test_a_scheduler_that_the_body_steps_has_the_rates_of_a_plain_loop_also_when_resumed(name, tmp_path):
    make = PER_EPOCH[name]
    expected = plain_rates(make)
    assert len(set(expected)) > 1
    for is_late in (False, True):
        assert loop_rates(make, tmp_path / f"whole {is_late}", is_late=is_late) == expected
        for stop in (6, 8, 12):
            folder = tmp_path / f"{stop} {is_late}"
            cut = loop_rates(make, folder, stop=stop, is_late=is_late)
            assert cut + loop_rates(make, folder, is_late=is_late) == expected, (stop, is_late)


@pytest.mark.cases("in turn")
@pytest.mark.parametrize("name", ["StepLR", "cosine", "in turn"])
def test_a_scheduler_that_the_loop_steps_after_each_epoch_has_the_rates_of_a_plain_loop(name, tmp_path):
    make = PER_EPOCH[name]
    assert loop_rates(make, tmp_path / "whole", given=True) == plain_rates(make)
    cut = loop_rates(make, tmp_path / "cut", given=True, stop=8)
    assert cut + loop_rates(make, tmp_path / "cut", given=True) == plain_rates(make)


def test_a_scheduler_that_the_script_makes_no_more_is_told(tmp_path):
    loop_rates(PER_EPOCH["StepLR"], tmp_path, stop=5)
    data, model, optimizer, _ = training(lambda optimizer: None)
    config = CONFIG | {"log.writers": ["text_log"]}
    loop = lockstep.Loop(
        model, optimizer, data, global_batch=BATCH, epochs=EPOCHS, run_dir=tmp_path, quiet=True, config=config
    )
    iter(loop).__next__()
    loop.close()
    text = (tmp_path / "train.log").read_text()
    assert "the checkpoint's state of StepLR is left out, because the script does not make this scheduler" in text


def trained(arguments, scheduler, body, options):
    loop = lockstep.Loop(*arguments, **options)
    for step in loop:
        for inputs, targets in step:
            step.backward((loop.model(inputs) - targets).square().mean())
        body(arguments[1], scheduler)


def misused(tmp_path, make, body, *, given, **options):
    data, model, optimizer, scheduler = training(make)
    options |= {"scheduler": scheduler} if given else {}
    options |= {"global_batch": BATCH, "epochs": 1, "run_dir": tmp_path / "run", "quiet": True, "config": CONFIG}
    with pytest.raises(UsageError) as caught:
        trained((model, optimizer, data), scheduler, body, options)
    user_exit.fail_open(caught.value)
    return str(caught.value)


def test_what_a_resumed_run_could_not_restore_is_an_error_in_the_first_steps(tmp_path):
    step_lr, kept = PER_EPOCH["StepLR"], []
    text = misused(tmp_path, step_lr, lambda optimizer, scheduler: scheduler.step(), given=True)
    assert "step 2: the body called scheduler.step(), as the loop does" in text
    text = misused(tmp_path, lambda _: None, lambda optimizer, _: kept.append(step_lr(optimizer)), given=False)
    assert "the body of the loop made a StepLR" in text
    text = misused(tmp_path, lambda optimizer: [step_lr(optimizer), step_lr(optimizer)], print, given=False)
    assert "the optimizer has two schedulers of the class StepLR" in text
    text = misused(tmp_path, step_lr, print, given=True, scheduler_every="batch")
    assert "scheduler_every='batch'" in text


class Average:
    """A moving average that a script keeps by itself."""

    def __init__(self):
        self.values = {"mean": torch.zeros(()), "count": 0}

    def add(self, value):
        self.values = {"mean": 0.9 * self.values["mean"] + 0.1 * value, "count": self.values["count"] + 1}

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


def averaged(folder, stops):
    for stop in stops:
        data, model, optimizer, _ = training(lambda optimizer: None)
        options = {"global_batch": BATCH, "epochs": 2, "run_dir": folder, "quiet": True, "config": CONFIG}
        loop = lockstep.Loop(model, optimizer, data, **options)
        average = loop.state["average"] = Average()
        best = loop.state.setdefault("best", 10.0)
        for step in loop:
            for inputs, targets in step:
                loss = (loop.model(inputs) - targets).square().mean()
                step.backward(loss)
            average.add(loss.detach())
            best = loop.state["best"] = min(best, float(loss.detach()))
            if step.number == stop:
                break
        loop.close()
    return average.values, best


def test_objects_with_a_state_are_kept_with_the_state_of_the_loop(tmp_path):
    expected, best = averaged(tmp_path / "whole", [None])
    assert expected["count"] == 2 * SIZE // BATCH
    assert averaged(tmp_path / "cut", [3, 5, None]) == (expected, best)
