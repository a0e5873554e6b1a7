"""A run whose checkpoints could not be loaded ends after its first step."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep import LockstepError, Trainer
from tests import own_tasks, runs
from tests.ranks import run_ranks
from tests.selection import mainly


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 5)
        self.to(torch.float64)

    def forward(self, inputs):
        return self.second(self.first(inputs).tanh())


class Bank(Net):
    """Remembers the hidden features of each batch, up to 30 rows. Later outputs depend on them."""

    def __init__(self, rows=0):
        super().__init__()
        self.register_buffer("bank", None if rows is None else torch.zeros(rows, 16, dtype=torch.float64))

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        if self.bank is not None and len(self.bank):
            hidden = hidden + self.bank.mean(dim=0)
        if self.training:
            rows = hidden.detach() if self.bank is None else torch.cat([self.bank, hidden.detach()])
            self.bank = rows[-30:].clone()
        return self.second(hidden)


class LateBank(Bank):
    def __init__(self):
        super().__init__(None)


class History(Net):
    """An extra state that gets longer with each step, and is a tensor."""

    def __init__(self):
        super().__init__()
        self.means = []

    def forward(self, inputs):
        shift = sum(self.means) / 10
        if self.training:
            self.means.append(float(self.second.weight.detach().mean()))
        return super().forward(inputs) + shift

    def get_extra_state(self):
        return torch.tensor(self.means, dtype=torch.float64)

    def set_extra_state(self, state):
        self.means = state.tolist()


class Nested(Net):
    """An extra state of nested values whose keys change. Later outputs depend on them."""

    def __init__(self):
        super().__init__()
        self.state = {"norms": {}, "last": (math.inf, [None, "begun"], b"\0")}

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            step = len(self.state["norms"])
            self.state["norms"][step] = inputs.new_tensor([step, 0.1])
            self.state["last"] = (step * 0.1, [True, f"step {step}"], b"\1")
        shift = sum(norm.sum() for norm in self.state["norms"].values())
        return super().forward(inputs) * (1 + shift / 20)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class MadeInForward(Net):
    def forward(self, inputs):
        if not hasattr(self, "late"):
            self.late = nn.Linear(5, 5, dtype=torch.float64)
        return self.late(super().forward(inputs))


class OtherDtype(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs):
        self.seen = self.seen.double() + 1
        return super().forward(inputs)


class Replaces(Net):
    """Its forward passes put a new object in the place of a parameter, from the call `begin` in training on."""

    begin = 1

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training and torch.is_grad_enabled()
        if self.calls >= self.begin:
            self.second.weight = nn.Parameter(self.second.weight.detach().clone())
        return super().forward(inputs)


class ReplacesLater(Replaces):
    begin = 3


class ReplacesFrozen(Net):
    """What is not trained may be another object."""

    def forward(self, inputs):
        self.scale = nn.Parameter(self.scale + 1, requires_grad=False)
        return super().forward(inputs)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)


class OfFixedLength(History):
    """It cannot take back what it gives."""

    def set_extra_state(self, state):
        if len(state):
            raise ValueError("the lengths must match")


class FrozenLeftOut(Net):
    left_out = "first."

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith(self.left_out)}


class TrainedLeftOut(FrozenLeftOut):
    left_out = "second."


class LoadsTheRest(FrozenLeftOut):
    """Frozen weights come from the task."""

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict=False)


class Task(own_tasks.Plain):
    def __init__(self, kind, **options):
        super().__init__(eval_length=24, **options)
        self.kind = kind

    def model(self):
        return globals()[self.kind]()

    def predict(self, model, batch):
        return model(batch[0])


def settings(steps, **sections):
    sections["train"] = {"steps": steps, "eval_every_steps": 3} | sections.get("train", {})
    return runs.config(**sections)


def refusal(kind, folder, steps=6, **sections):
    with pytest.raises(LockstepError) as caught:
        runs.fit(Task(kind), settings(steps, **sections), folder)
    return str(caught.value)


# ---- what cannot be loaded is refused after the first step


def test_a_run_that_could_not_be_resumed_ends_after_its_first_step(tmp_path):
    for kind, texts in {
        "MadeInForward": ["model.late.weight", "get a gradient and are in no optimizer", "in the model's constructor"],
        "OtherDtype": ["after step 1 ", "seen is float64 [3], and float32 [3] in a new model"],
        "OfFixedLength": ["load_state_dict does not take what state_dict returned", "must match"],
        "FrozenLeftOut": ["Task.model: load_state_dict does not take what state_dict returned", "Missing key", "first"],
        "TrainedLeftOut": ["Task.model: state_dict leaves out second.weight, second.bias"],
    }.items():
        text = refusal(kind, tmp_path / kind)
        for part in texts:
            assert part in text, kind
        assert not list((tmp_path / kind / "checkpoints").glob("step-*")), kind
    # also where the first step is the last, so that only the save comes after it
    assert "late.weight" in refusal("MadeInForward", tmp_path / "one", steps=1, train={"eval_every_steps": None})


def test_a_parameter_that_a_forward_pass_replaces_is_named(tmp_path):
    for kind in ("Replaces", "ReplacesLater"):
        text = refusal(kind, tmp_path / kind)
        assert "Task.model: code of the model or the loss replaces parameters with new objects" in text
        assert "second.weight" in text
    runs.fit(Task("ReplacesFrozen"), settings(3), tmp_path / "frozen")


def test_every_strategy_names_a_parameter_that_is_replaced(tmp_path):
    for strategy, kinds in {"ddp": ["Replaces", "ReplacesLater"], "fsdp": ["Replaces"]}.items():
        for kind in kinds:
            texts = [text for text, _ in run_ranks(2, _on_two_ranks, str(tmp_path / strategy), kind, strategy, 3)]
            assert any("The optimizer does not have" in text and "second.weight" in text for text in texts)


def test_frozen_weights_may_stay_out_of_checkpoints_only_where_the_task_makes_them_again(tmp_path):
    runs.fit(Task("LoadsTheRest"), settings(3), tmp_path / "run")
    runs.fit(Task("LoadsTheRest"), settings(6), tmp_path / "run")
    Trainer(settings(3), run_dir=tmp_path / "whole", quiet=True).fit(Task("Net"))
    weights = Trainer(settings(3), run_dir=tmp_path / "whole", quiet=True).export(
        tmp_path / "out", Task("Net"), program=False
    )
    text = refusal("LoadsTheRest", tmp_path / "begun", train={"init_from": str(weights), "init_skip": ["first.*"]})
    assert "state_dict leaves out first.weight, first.bias" in text


# ---- buffers and extra states take the form that they have in the checkpoint


@pytest.mark.parametrize("kind", mainly(["LateBank", "Nested"], ["Bank", "LateBank", "History", "Nested"]))
def test_a_buffer_that_grows_is_resumed_bit_for_bit_evaluated_and_exported(tmp_path, kind, capsys):
    def told(folder):
        return (folder / "train.log").read_text()

    ema = {"ema_decay": 0.5}
    whole, results = runs.fit(Task(kind), settings(7, train=ema), tmp_path / "whole")
    runs.fit(Task(kind), settings(4, train=ema), tmp_path / "halved")
    halved, again = runs.fit(Task(kind), settings(7, train=ema), tmp_path / "halved")
    assert all(torch.equal(whole[name], halved[name]) for name in whole | halved)
    if kind != "Nested":
        assert len(whole["bank" if "Bank" in kind else "_extra_state"]) == (30 if "Bank" in kind else 7)
    assert again["eval/loss"] == results["eval/loss"]
    trainer = Trainer(settings(7, train=ema), run_dir=tmp_path / "halved", quiet=True)
    assert trainer.evaluate(Task(kind))["loss"] == pytest.approx(results["eval/loss"])
    assert len(trainer.predict(Task(kind))) == 24
    trainer.quiet = False
    exported = load_file(trainer.export(tmp_path / "out", Task(kind), program=False))
    assert ("what get_extra_state returned: _extra_state" in capsys.readouterr().err) == (kind == "Nested")
    if kind == "Nested":
        state = torch.load(trainer.export_training_state(tmp_path / "all.pt", Task(kind)), weights_only=True)["model"]
        assert list(state["_extra_state"]["norms"]) == list(range(7))
    if "Bank" in kind:
        assert torch.equal(exported["bank"], whole["bank"])
    assert ("note: bank" in told(tmp_path / "halved")) == ("Bank" in kind)
    assert "note: bank" not in told(tmp_path / "whole")


def _on_two_ranks(folder, kind, strategy, micro):
    """Weights of 6 steps at once and of 3 and 3, on each rank; or the refusal."""
    batch = {"global": 5, "micro": micro}
    parallel = {"strategy": strategy}
    try:
        whole, _ = runs.fit(Task(kind), settings(6, batch=batch, parallel=parallel), f"{folder}/{kind}-whole")
        runs.fit(Task(kind), settings(3, batch=batch, parallel=parallel), f"{folder}/{kind}-halved")
        halved, _ = runs.fit(Task(kind), settings(6, batch=batch, parallel=parallel), f"{folder}/{kind}-halved")
    except LockstepError as error:
        return str(error), None
    return whole, halved


def _evaluate_with_fsdp(folder):
    with pytest.raises(LockstepError, match=r"(?s)first model\.bank: .*parallel\.strategy=ddp"):
        Trainer(settings(6, parallel={"strategy": "fsdp"}), run_dir=folder, quiet=True).evaluate(Task("Bank"))


def test_two_ranks_have_the_buffers_of_rank_0_also_where_these_grow_by_other_numbers_of_rows(tmp_path):
    (whole, halved), (other_whole, other_halved) = run_ranks(2, _on_two_ranks, str(tmp_path), "Bank", "ddp", 3)
    assert len(whole["bank"]) == 6 * 3  # rank 0 has 3 of 5 samples, rank 1 has 2
    for name, value in whole.items():
        assert torch.equal(value, halved[name])
        assert torch.equal(value, other_whole[name])
        assert torch.equal(value, other_halved[name])
    run_ranks(2, _evaluate_with_fsdp, str(tmp_path / "Bank-whole"))


def _losses_of(folder):
    settings_ = settings(6, batch={"global": 6, "micro": 3}, parallel={"strategy": "single"})
    return Trainer(settings_, run_dir=folder, quiet=True).evaluate(Task("Nested"))["loss"]


@pytest.mark.exhaustive  # one rank does so above
def test_nested_values_of_get_extra_state_are_resumed_with_every_strategy_and_on_other_ranks(tmp_path):
    for strategy in ("ddp", "fsdp"):
        whole, halved = run_ranks(2, _on_two_ranks, str(tmp_path), "Nested", strategy, 3)[0]
        assert all(torch.equal(value, halved[name]) for name, value in whole.items())
        values = [
            json.loads((newest / "index.json").read_text())["values"]
            for newest in sorted(tmp_path.glob("Nested-*/checkpoints/step-00000006"))
        ]
        assert values[0] == values[1] != {}
        assert _losses_of(tmp_path / "Nested-whole") == _losses_of(tmp_path / "Nested-halved")
        for name in ("whole", "halved"):
            shutil.rmtree(tmp_path / f"Nested-{name}")


def test_every_rank_names_what_could_not_be_loaded(tmp_path):
    for kind, strategy, part in [
        ("MadeInForward", "ddp", "model.late.weight, model.late.bias get a gradient"),
        ("Bank", "fsdp", "with fsdp, a buffer keeps its shape"),
    ]:
        texts = [text for text, _ in run_ranks(2, _on_two_ranks, str(tmp_path), kind, strategy, 3)]
        for text in texts:
            assert part in text
            assert kind == "MadeInForward" or "after step 1 a checkpoint of this run could not be loaded" in text
