"""Models of which little trains: checkpoints without frozen weights, and exports that peft and transformers load."""

import json
import os
import re
import warnings

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import lockstep
from lockstep import LockstepError, Trainer
from tests import runs
from tests.processes import ROOT
from tests.ranks import run_ranks
from tests.selection import mainly

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
PAGE = (ROOT / "docs" / "lora.md").read_text()
EXAMPLE = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def pretrained" in text)
CODE, _, REST = EXAMPLE.partition("pretrained()\nconfig")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    names: dict = {}
    exec(CODE, names)
    names["BASE"] = str(folder / "base")
    names["pretrained"]()
    return names["BASE"]


def words(base, dropout=0.0):
    """The task of the page, without dropout and in float64."""
    names: dict = {"__name__": "words"}
    exec(CODE, names)
    names["BASE"] = base

    class Words(names["Words"]):
        def model(self):
            model = AutoModelForSequenceClassification.from_pretrained(
                base, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
            )
            adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks for it
                return lockstep.trained_only(peft.get_peft_model(model.double(), adapters))

    return Words()


def settings(steps, strategy="ddp", **sections):
    return runs.config(train={"steps": steps}, parallel={"strategy": strategy}, batch={"global": 10}, **sections)


def trained(base, config, folder):
    return runs.fit(words(base), config, folder)[0]


def by_hand(base, steps):
    """Plain torch and peft, in one process."""
    torch.manual_seed(0)
    task = words(base)
    model = task.model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    inputs, labels = task.train_data().tensors
    for step in range(steps):
        places = torch.arange(step * 10, step * 10 + 10)
        chosen = torch.from_numpy(runs.permute(places.numpy(), 2000, 0, 0))
        loss = task.loss(model, [inputs[chosen], labels[chosen]]) / 10
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


STRATEGIES = [(1, "single"), (2, "ddp"), (2, "fsdp"), (3, "fsdp")]


@pytest.mark.parametrize(("world", "strategy"), mainly([(2, "fsdp")], STRATEGIES))
def test_adapters_train_as_in_plain_torch_and_go_on_on_another_number_of_ranks(base, world, strategy, tmp_path):
    run_ranks(world, trained, base, settings(4, strategy), tmp_path)
    index = json.loads((tmp_path / "checkpoints" / "step-00000004" / "index.json").read_text())
    assert all("lora_" in name or "classifier.modules_to_save" in name for name in index["tensors"])
    expected = by_hand(base, 6)
    for found in run_ranks(3 - world % 2, trained, base, settings(6), tmp_path):
        assert found.keys() == expected.keys()
        assert runs.difference(found, expected) < 1e-10


def test_a_run_does_not_go_on_over_other_frozen_weights(base, tmp_path):
    trained(base, settings(2), tmp_path / "run")
    other = tmp_path / "other"
    model = AutoModelForSequenceClassification.from_pretrained(base)
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.bias[3] += 1e-6
    model.save_pretrained(other)
    with pytest.raises(
        LockstepError, match=rf"to the weights of {base} \(digest \w+\), but {other} has the digest \w+"
    ):
        trained(str(other), settings(4), tmp_path / "run")


class Backbone(lockstep.Task):
    """A frozen backbone with BatchNorm, whose statistics move, and a head that trains."""

    def __init__(self, leaves_out=True, frozen=True):
        self.leaves_out, self.frozen = leaves_out, frozen

    def model(self):
        backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).requires_grad_(not self.frozen)
        model = torch.nn.Sequential(backbone, torch.nn.ReLU(), torch.nn.Linear(8, 1)).double()
        torch.nn.init.constant_(model[0][0].weight, 0.5)
        torch.nn.init.zeros_(model[0][0].bias)
        return lockstep.trained_only(model) if self.leaves_out else model

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).double())

    def loss(self, model, batch):
        return (model(batch[0])[:, 0] - batch[0].sum(dim=1)).square().sum()

    def predict(self, model, batch):
        return model(batch[0])


def test_buffers_of_a_frozen_backbone_are_saved_and_the_export_is_whole(tmp_path):
    cut, whole = settings(8, "single"), settings(4, "single")
    first = runs.fit(Backbone(), cut, tmp_path / "whole")[0]
    runs.fit(Backbone(), whole, tmp_path / "cut")
    again = runs.fit(Backbone(), cut, tmp_path / "cut")[0]
    assert set(first) == {"0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked", "2.weight", "2.bias"}
    assert runs.difference(first, again) == 0
    plain = runs.fit(Backbone(leaves_out=False), cut, tmp_path / "plain")[0]
    assert runs.difference({name: plain[name] for name in first}, first) == 0
    file = Trainer(cut, run_dir=tmp_path / "whole", quiet=True).export(tmp_path / "out", Backbone())
    from safetensors.torch import load_file

    found = load_file(file)
    assert found.keys() == plain.keys()
    assert runs.difference(found, plain) == 0
    assert (tmp_path / "out" / "model.pt2").exists()


def test_what_cannot_be_left_out_is_refused(tmp_path):
    with pytest.raises(LockstepError, match="none of the 6 parameters are frozen"):
        Backbone(frozen=False).model()
    config = settings(6, "single")
    config["train"]["unfreeze"] = [{"step": 3, "match": ["0.*"]}]
    with pytest.raises(LockstepError, match=r"state_dict leaves out 0\.0\.weight"):
        runs.fit(Backbone(), config, tmp_path)


class Teacher(torch.nn.Module):
    """A head that trains, on a backbone and a teacher that are frozen. The teacher may move in forward."""

    def __init__(self, moves):
        super().__init__()
        torch.manual_seed(1)
        self.backbone, self.student, self.teacher = (torch.nn.Linear(4, 4).double() for _ in range(3))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.backbone.requires_grad_(False)
        self.moves = moves

    def forward(self, inputs):
        if self.moves and self.training:
            for mine, leader in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data = mine.data * 0.5 + leader.data * 0.5  # as MoCo does: no version of a tensor counts this
        hidden = self.backbone(inputs).tanh()
        return (self.student(hidden) - 0.9 * self.teacher(hidden) - 1).square().sum()


class Follows(lockstep.AlternatingTask):
    """A teacher that moves in forward, or as a `Follower`."""

    players = (lockstep.Player("student", "student.*"),)

    def __init__(self, follower, keep):
        self.follower, self.keep = follower, keep
        self.followers = (lockstep.Follower("teacher.", of="student.", decay=0.5),) if follower else ()

    def model(self):
        return lockstep.trained_only(Teacher(not self.follower), keep=self.keep)

    def train_data(self):
        return Backbone().train_data()

    def student_loss(self, model, batch):
        return model(batch[0])


def fitted(follower, keep, steps, folder):
    config = settings(steps, "ddp", log={"flops": False})
    return runs.fit(Follows(follower, keep), config, folder)[0]


def test_frozen_weights_that_training_moves_are_an_error_or_kept(tmp_path):
    """Without an error, a resumed run would begin with the teacher that `Task.model` makes."""
    for follower, world in ((False, 2), (True, 1)):
        case = f"follower {follower}, {world} ranks"
        with pytest.raises(Exception, match=r"parameters that checkpoints leave out: teacher\.weight") as caught:
            run_ranks(world, fitted, follower, (), 4, tmp_path / case / "lost")
        assert "keep=['teacher.weight', 'teacher.bias']" in str(caught.value), case
        assert not (tmp_path / case / "lost" / "checkpoints").exists(), case
        whole = run_ranks(world, fitted, follower, "teacher.*", 6, tmp_path / case / "whole")[0]
        run_ranks(world, fitted, follower, ["*.bias", "teacher.*"], 4, tmp_path / case / "cut")
        again = run_ranks(world, fitted, follower, ["*.bias", "teacher.*"], 6, tmp_path / case / "cut")[0]
        assert set(whole) == {f"{part}.{name}" for part in ("student", "teacher") for name in ("weight", "bias")}
        assert runs.difference(whole, {name: again[name] for name in whole}) == 0, case
    with pytest.raises(LockstepError, match=r"'student\.\*' does not match any frozen parameter"):
        Follows(True, ["student.*"]).model()


@pytest.mark.exhaustive
def test_the_example_learns_and_its_exports_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "example"}
    exec(EXAMPLE, names)
    assert names["loss"] < 0.3
    assert sorted(os.listdir("adapters"))[:2] == ["adapter_config.json", "adapter_model.safetensors"]
    inputs = names["Words"]().train_data().tensors[0][:8]
    expected = names["trainer"].model(input_ids=inputs).logits
    assert torch.allclose(names["model"](input_ids=inputs).logits, expected, atol=1e-5)
    merged = AutoModelForSequenceClassification.from_pretrained("merged")
    assert torch.allclose(merged.eval()(input_ids=inputs).logits, expected, atol=1e-5)
