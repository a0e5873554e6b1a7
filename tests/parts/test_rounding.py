"""16-bit weights: the share of the first update that rounding loses, and float16 that would become NaN."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Task
from lockstep.core.errors import UsageError
from tests import runs
from tests.ranks import run_ranks


class Narrow(Task):
    """Half of the weights are 1.0, where steps of bfloat16 are 0.0039 downwards. The others are small."""

    def __init__(self, dtype=torch.bfloat16, frozen=False):
        self.dtype, self.frozen = dtype, frozen

    def model(self):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)).to(self.dtype)
        with torch.no_grad():
            model[0].weight[:2], model[0].weight[2:] = 1.0, 2.0**-10
            model[1].weight.fill_(2.0**-10)
        if self.frozen:
            model[0].requires_grad_(False)
            model[1].float()
        return model

    def train_data(self):
        return TensorDataset(torch.ones(48, 4))

    def loss(self, model, batch):
        inner = model[0](batch[0].to(self.dtype))
        return model[1](inner.to(model[1].weight.dtype)).float().sum()


def lines_of(folder):
    return [line for line in (folder / "train.log").read_text().splitlines() if "loses" in line]


def fit(task, folder, **sections):
    settings = {"optim": {"name": "AdamW", "lr": 1e-3, "weight_decay": 0.0}, "train": {"steps": 2}} | sections
    return runs.fit(task, runs.config(**settings), folder)


def test_the_share_is_that_of_the_first_update(tmp_path):
    fit(Narrow(), tmp_path / "small")
    (line, *again) = lines_of(tmp_path / "small")
    assert "20 trainable weights are bfloat16" in line  # 8 of them are 1.0
    assert "at the learning rate 0.001, rounding loses 40.0% of their updates (0.0% in float32)" in line
    assert len(again) <= 1  # the summary of warnings at the end
    fit(Narrow(), tmp_path / "large", optim={"name": "AdamW", "lr": 0.01, "weight_decay": 0.0})
    assert "rounding loses 0.0% of their updates" in lines_of(tmp_path / "large")[0]


def test_the_share_is_that_of_a_whole_model_by_hand(tmp_path):
    class Drawn(Narrow):
        def model(self):
            return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1)).to(self.dtype)

    task = Drawn()
    weights, _ = fit(task, tmp_path / "run", train={"steps": 1}, optim={"name": "SGD", "lr": 1e-4}, schedule={})
    torch.manual_seed(0)
    before = task.model()
    loss = task.loss(before, [torch.ones(24, 4)]) / 24
    loss.backward()
    found = [(weights[name] == one, one.grad != 0) for name, one in before.named_parameters()]
    lost = sum(int((stays & graded).sum()) for stays, graded in found)
    total = sum(int(graded.sum()) for _, graded in found)
    assert f"rounding loses {lost / total:.1%} of their updates" in lines_of(tmp_path / "run")[0]


def test_a_warmup_does_not_change_the_share(tmp_path):
    fit(Narrow(), tmp_path / "run", train={"steps": 4}, schedule={"warmup_steps": 3})
    assert "at the learning rate 0.001, rounding loses 40.0%" in lines_of(tmp_path / "run")[0]


@pytest.mark.parametrize("task", [Narrow(torch.float32), Narrow(frozen=True)], ids=["float32", "frozen"])
def test_nothing_is_said_if_only_frozen_weights_have_16_bits(task, tmp_path):
    fit(task, tmp_path / "run")
    assert not lines_of(tmp_path / "run")


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad"])
def test_float16_is_refused_with_an_eps_that_is_zero_there(name, tmp_path):
    with pytest.raises(UsageError, match=f"parameters are float16.* eps=1e-(08|10) of {name} is zero") as caught:
        fit(Narrow(torch.float16), tmp_path / "run", optim={"name": name, "lr": 1e-3})
    assert "dtype=torch.float32" in str(caught.value)
    assert "precision=bf16" in str(caught.value)


def test_float16_is_refused_if_it_trains_later(tmp_path):
    class Later(Narrow):
        def model(self):
            model = super().model()
            model[1].float()
            return model

    unfreeze = [{"match": ["0.*"], "step": 1}]
    with pytest.raises(UsageError, match="1 trainable parameters are float16"):
        fit(Later(torch.float16), tmp_path / "run", train={"steps": 3, "unfreeze": unfreeze})
    fit(Narrow(torch.float16, frozen=True), tmp_path / "frozen")


def test_float16_with_another_eps_trains(tmp_path):
    optim = {"name": "AdamW", "lr": 1e-3, "weight_decay": 0.0, "args": {"eps": 1e-4}}
    weights, _ = fit(Narrow(torch.float16), tmp_path / "run", optim=optim)
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert "float16" in lines_of(tmp_path / "run")[0]


def fit_on_ranks(strategy):
    with runs.shared_folder() as folder:
        fit(Narrow(), folder, parallel={"strategy": strategy})
        return lines_of(folder) if os.environ["RANK"] == "0" else None


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_0_measures_its_share(strategy):
    line = run_ranks(2, fit_on_ranks, strategy)[0][0]
    assert f"rounding loses {'40.0%' if strategy == 'ddp' else '66.7%'} of" in line  # rank 0 has the first 3 rows


def test_a_loop_says_it_too(tmp_path):
    task = Narrow()
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    config = {"log.writers": ["text_log"], "device": "cpu", "log.pictures": 0}
    options = {"global_batch": 24, "steps": 2, "quiet": True, "run_dir": tmp_path / "run", "config": config}
    loop = lockstep.Loop(model, optimizer, task.train_data(), **options)
    for step in loop:
        for batch in step:
            step.backward(task.loss(loop.model, batch), reduction="sum")
    loop.close()
    assert "rounding loses 40.0%" in lines_of(tmp_path / "run")[0]
