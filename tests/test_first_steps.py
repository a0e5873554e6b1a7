"""A run whose checkpoints could not be loaded ends after its first step, and state that no checkpoint holds is told."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep import LockstepError, Trainer
from lockstep.engine.outside_state import OutsideState
from tests import own_tasks, runs
from tests.ranks import run_ranks


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
        "MadeInForward": ["Task.model: after step 1 ", "late.weight float64 [5, 5] is not in a new model"],
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


def test_frozen_weights_may_stay_out_of_checkpoints_only_where_the_task_makes_them_again(tmp_path):
    runs.fit(Task("LoadsTheRest"), settings(3), tmp_path / "run")
    runs.fit(Task("LoadsTheRest"), settings(6), tmp_path / "run")
    Trainer(settings(3), run_dir=tmp_path / "whole", quiet=True).fit(Task("Net"))
    weights = Trainer(settings(3), run_dir=tmp_path / "whole", quiet=True).export(tmp_path / "out", Task("Net"))
    text = refusal("LoadsTheRest", tmp_path / "begun", train={"init_from": str(weights), "init_skip": ["first.*"]})
    assert "state_dict leaves out first.weight, first.bias" in text


# ---- buffers and extra states take the form that they have in the checkpoint


@pytest.mark.parametrize("kind", ["Bank", "LateBank", "History"])
def test_a_buffer_that_grows_is_resumed_bit_for_bit_evaluated_and_exported(tmp_path, kind):
    def told(folder):
        return (folder / "train.log").read_text()

    ema = {"ema_decay": 0.5}
    whole, results = runs.fit(Task(kind), settings(7, train=ema), tmp_path / "whole")
    runs.fit(Task(kind), settings(4, train=ema), tmp_path / "halved")
    halved, again = runs.fit(Task(kind), settings(7, train=ema), tmp_path / "halved")
    assert all(torch.equal(whole[name], halved[name]) for name in whole | halved)
    assert len(whole["bank" if "Bank" in kind else "_extra_state"]) == (30 if "Bank" in kind else 7)
    assert again["eval/loss"] == results["eval/loss"]
    trainer = Trainer(settings(7, train=ema), run_dir=tmp_path / "halved", quiet=True)
    assert trainer.evaluate(Task(kind))["loss"] == pytest.approx(results["eval/loss"])
    assert len(trainer.predict(Task(kind))) == 24
    exported = load_file(trainer.export(tmp_path / "out", Task(kind)))
    if kind != "History":
        assert torch.equal(exported["bank"], whole["bank"])
    assert ("note: bank" in told(tmp_path / "halved")) == (kind != "History")
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


def test_every_rank_names_what_could_not_be_loaded(tmp_path):
    for kind, strategy, part in [
        ("MadeInForward", "ddp", "late.weight"),
        ("Bank", "fsdp", "with fsdp, a buffer keeps its shape"),
    ]:
        texts = [text for text, _ in run_ranks(2, _on_two_ranks, str(tmp_path), kind, strategy, 3)]
        for text in texts:
            assert part in text
            assert "after step 1 no checkpoint of this run can be loaded" in text


# ---- state outside of what is saved


class Outside(Net):
    """Keeps state where no checkpoint holds it, besides what is no state."""

    def __init__(self):
        super().__init__()
        self.calls, self.scale, self.ready = 0, 1.0, False
        self.mean = torch.zeros(16)
        self.size, self.same, self.last = 0, 3, None
        self.register_buffer("queue", torch.zeros(4), persistent=False)
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("recomputed", torch.arange(4), persistent=False)
        self.norm = nn.BatchNorm1d(16, dtype=torch.float64)

    def forward(self, inputs):
        self.ready, self.size, self.same = True, len(inputs), 3
        self.recomputed = torch.arange(4)
        self.last = self.norm(self.first(inputs)).tanh()
        if self.training:
            self.calls += 1
            self.scale *= 0.5
            self.mean += 1
            self.queue += 1
        return self.second(self.last)


class Counting(Task):
    def __init__(self):
        super().__init__("Net")
        self.losses, self.rate = 0, 0.1

    def loss(self, model, batch):
        self.losses += 1
        return super().loss(model, batch)


def _warnings(folder, make, **options):
    runs.fit(make(**options), settings(3), folder)
    lines = (folder / "train.log").read_text().splitlines()
    return [line for line in lines if "and no checkpoint holds that" in line]


def test_state_that_no_checkpoint_holds_is_named_while_the_run_is_young_and_at_its_end(tmp_path):
    found = _warnings(tmp_path / "outside", Task, kind="Outside")
    assert len(found) == 2  # when it is seen, and at the end
    named = found[0].partition("training changes ")[2].partition(", and no checkpoint")[0].split(", ")
    assert set(named) == {
        "calls (int)",
        "scale (float)",
        "ready (bool)",
        "mean (tensor)",
        "queue (non-persistent buffer)",
    }
    runs.fit(Task("Outside"), settings(6), tmp_path / "outside")  # a resumed run does not say it twice
    log = (tmp_path / "outside" / "train.log").read_text()
    assert log.count("and no checkpoint holds that") == 4
    found = _warnings(tmp_path / "task", Counting)
    assert "training changes Task.losses (int), and" in found[0]


def test_nothing_is_said_of_models_whose_state_is_saved(tmp_path):
    for kind in ("Net", "Bank"):
        assert not _warnings(tmp_path / kind, Task, kind=kind)


def test_a_model_of_transformers_keeps_nothing_outside(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    models = [
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, vocab_size=50)),
        transformers.BertForMaskedLM(transformers.BertConfig(**small, vocab_size=50)),
    ]
    for model in models:
        model.train()
        outside = OutsideState(nn.Sequential(model), object())
        for length in (7, 9):
            outside.look()
            tokens = torch.zeros(2, length, dtype=torch.int64)
            model(input_ids=tokens, labels=tokens).loss.backward()
        outside.look()
        assert outside.warnings() == []
