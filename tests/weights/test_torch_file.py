"""Files of torch.save: plain torch trains, Lockstep begins with its file; Lockstep exports, plain torch goes on."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep import Trainer
from lockstep.configs import config_file
from lockstep.core.checkpoint import store
from lockstep.core.data.order import permute
from lockstep.core.errors import UsageError
from lockstep.core.schedule import Schedule
from lockstep.weights import torch_file, torch_optimizer
from lockstep_lab.verify.reference.optimizer import ReferenceOptimizer
from tests import own_tasks, runs
from tests.core.checkpoint.cases import read
from tests.core.test_strategies import STRATEGIES, settings_for
from tests.guide_commands import ROOT
from tests.ranks import run_ranks

GLOBAL = 24


def plain_torch(task, model, optimizer, steps, scaler=None):
    """A training loop as people write it: the global batches of `steps`, and the mean of the loss over its units."""
    data = task.train_data()
    per_epoch = -(-len(data) // GLOBAL)
    for step in steps:
        epoch, within = divmod(step, per_epoch)
        positions = range(within * GLOBAL, min((within + 1) * GLOBAL, len(data)))
        batch = [t[torch.from_numpy(permute(list(positions), len(data), 0, epoch))] for t in data.tensors]
        loss = task.loss(model, batch) / len(batch[0])
        optimizer.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained_by_hand(folder, steps=4, wrap=lambda state: state, **more):
    """A file that a plain script has written after `steps`, the model and the optimizer."""
    task = own_tasks.Plain()
    torch.manual_seed(5)
    model = task.model()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    plain_torch(task, model, optimizer, range(steps), scaler)
    content = {"model": wrap(model.state_dict()), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    path = folder / "plain.pt"
    torch.save(content | {"epoch": 7} | more, path)
    return path, model, optimizer


def begin(path, folder, steps=3, **sections):
    """Train in Lockstep from `path`. The final weights, and the lines about `train.init_from`."""
    train = {"steps": steps, "init_from": str(path)} | sections.pop("train", {})
    weights, _ = runs.fit(own_tasks.Plain(), runs.config(train=train, **sections), folder)
    lines = [line for line in (folder / "train.log").read_text().splitlines() if "init_from" in line]
    return weights, "\n".join(lines)


# ---- into Lockstep


def test_lockstep_begins_with_weights_and_optimizer_of_a_plain_script(tmp_path):
    path, model, optimizer = trained_by_hand(tmp_path)
    weights, said = begin(path, tmp_path / "run")
    assert "the weights are from its key 'model'" in said
    assert "the state of AdamW is loaded for 4 parameters; its settings come from the config" in said
    assert "the loss scale is not loaded (precision=fp32); the new run starts at step 0; not loaded: epoch=7" in said
    plain_torch(own_tasks.Plain(), model, optimizer, range(3))  # a new training: its samples begin anew
    assert runs.difference(weights, state_of(model)) < 1e-14
    torch.save(torch.load(path)["model"], tmp_path / "weights.pt")
    without, said = begin(tmp_path / "weights.pt", tmp_path / "other")
    assert "the weights are from the whole file" in said
    assert runs.difference(without, weights) > 1e-4


def test_verify_repeats_the_updates_of_a_training_that_begins_with_a_state(tmp_path):
    path, *_ = trained_by_hand(tmp_path)
    recorder = None

    class Updates(runs.FinalWeights):
        def start(self, training):
            nonlocal recorder
            config, state = prepared_config(path), training.optimizer.state
            recorder = ReferenceOptimizer(training.model, config, steps_per_epoch=10, state=state)

        def before_update(self, training):
            recorder.before_update(training.step - 1)

        def close(self):
            recorder.after_step(None)

    Trainer(prepared_config(path), run_dir=tmp_path / "run", quiet=True).fit(own_tasks.Plain(), Updates())
    assert recorder.updates == 3
    assert recorder.differences == {"weights": 0.0}


def prepared_config(path):
    settings = runs.config(train={"steps": 3, "init_from": str(path)})
    return config_file.parse(settings, needs_task=False).model_dump(by_alias=True)


@pytest.mark.parametrize("name", ["ddp 2", "fsdp 2"])
def test_ranks_begin_with_the_file_too(tmp_path, name):
    path, model, optimizer = trained_by_hand(tmp_path)
    world, parallel = STRATEGIES[name]
    settings = settings_for(world, parallel, train={"steps": 3, "init_from": str(path)})
    plain_torch(own_tasks.Plain(), model, optimizer, range(3))
    for weights, _ in run_ranks(world, runs.fit_kind, "Plain", {}, settings, tmp_path / "run"):
        assert runs.difference(weights, state_of(model)) < 1e-12
    assert "the state of AdamW is loaded for 4 parameters" in (tmp_path / "run/train.log").read_text()


def test_the_loss_scale_is_taken_where_there_is_one():
    from lockstep.core.parallel.precision import Precision

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3).state_dict() | {"_growth_tracker": 2}
    precision = Precision("fp16", torch.device("cpu"))
    assert precision.load_foreign(scaler)
    assert precision.scaler.state_dict() == scaler
    assert not precision.load_foreign({"loss_scale": 3.0})
    assert not Precision("fp32", torch.device("cpu")).load_foreign(scaler)
    two = Precision("fp16", torch.device("cpu"), ranks=2)
    assert two.load_foreign(scaler)
    assert two.loss_scale == 1024


@pytest.mark.parametrize(
    ("prefix", "key"),
    [
        ("module.", "state_dict"),
        ("_orig_mod.", "model_state_dict"),
        ("module._orig_mod.", "model"),
        ("_orig_mod.module.", None),
        ("model.", "state_dict"),
        ("", "net"),
    ],
)
def test_names_of_wrappers_and_of_keys_do_not_matter(tmp_path, prefix, key):
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({key: state, "epoch": 3} if key else state, tmp_path / "a.pt")
    file = torch_file.read(tmp_path / "a.pt")
    found = torch_file.unwrapped(file.weights, model.state_dict())
    assert list(found) == list(model.state_dict())
    assert file.others == (("epoch=3",) if key else ())
    if key is None:
        save_file(state, tmp_path / "a.safetensors")
        from lockstep.weights.first_weights import load_weights

        other = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        load_weights(other, tmp_path / "a.safetensors")
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


def test_a_prefix_that_belongs_to_the_model_or_to_some_names_stays():
    own = ["model.a", "model.b"]
    assert torch_file.unwrapped(["model.a", "model.b"], own) == {name: name for name in own}
    assert torch_file.unwrapped(["module.a", "n"], ["a", "n"]) == {"module.a": "module.a", "n": "n"}
    assert torch_file.unwrapped(["a._orig_mod.b"], ["a.b"]) == {"a.b": "a._orig_mod.b"}


def test_what_differs_is_named(tmp_path):
    path, *_ = trained_by_hand(tmp_path)
    content = torch.load(path)
    del content["model"]["0.bias"]
    content["model"] |= {"2.bias": torch.ones(4), "9.x": torch.ones(1)}
    torch.save(content, path)
    with pytest.raises(
        UsageError, match=r"(?s)plain.pt belongs to a different model: 1 missing in the file: 0\.bias; "
    ) as error:
        begin(path, tmp_path / "run")
    assert "1 unknown to the model: 9.x; 1 differing: 2.bias (file [4], model [5])" in str(error.value)
    assert "train.init_skip" in str(error.value)
    _, said = begin(path, tmp_path / "other", train={"init_skip": ["0.bias", "2.bias", "9.x"]})
    assert "these keep the values of Task.model: 0.bias, 2.bias" in said
    assert "the optimizer's state is not loaded: train.init_skip excludes some of its weights" in said


class Evil:
    def __init__(self, function, argument):
        self.called = function, (argument,)

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize(("function", "name"), [(os.mkdir, "posix.mkdir"), (eval, "eval")])
def test_a_file_that_would_run_code_is_refused(tmp_path, function, name, old_format):
    argument = str(tmp_path / "ran") if function is os.mkdir else f"__import__('os').mkdir({str(tmp_path / 'ran')!r})"
    content = {"model": nn.Linear(2, 2).state_dict(), "note": Evil(function, argument)}
    torch.save(content, tmp_path / "evil.pt", _use_new_zipfile_serialization=not old_format)
    with pytest.raises(UsageError) as error:
        begin(tmp_path / "evil.pt", tmp_path / "run")
    assert f"evil.pt cannot be read safely: it would call {name}. A torch.save file" in str(error.value)
    assert "Lockstep reads only tensors and plain values (weights_only=True)" in str(error.value)
    assert error.value.where == "train.init_from"
    assert not (tmp_path / "ran").exists()
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(UsageError, match=r"it would call torch\.nn\.modules\.linear\.Linear"):
        torch_file.read(tmp_path / "module.pt")


def test_files_without_weights_are_refused_with_what_they_have(tmp_path):
    def refusal(content, damage=None):
        torch.save(content, tmp_path / "a.pt")
        if damage:
            (tmp_path / "a.pt").write_bytes(damage((tmp_path / "a.pt").read_bytes()))
        with pytest.raises(UsageError) as error:
            torch_file.read(tmp_path / "a.pt")
        return str(error.value)

    state = nn.Linear(2, 2).state_dict()
    assert "It has the keys 'optimizer', 'epoch'" in refusal({"optimizer": {}, "epoch": 1})
    assert "contains a list, not weights by name" in refusal([torch.ones(2)])
    assert "contains weights under 'model' and under 'net'" in refusal({"model": state, "net": state})
    assert "cannot be read as a torch.save file" in refusal(state, lambda content: content[:-30])


# ---- which states of optimizers fit


def why_not(saved, optimizer=adamw, saved_class=None, model=None):
    model = model or nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    target = optimizer(model)
    try:
        torch_optimizer.load(saved, model, target, saved_class=saved_class)
    except torch_optimizer.NotTaken as error:
        assert not target.state
        return str(error)
    return None


def saved_by(optimizer, model=None):
    model = model or nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    made = optimizer(model) if callable(optimizer) else optimizer
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    return made.state_dict()


SGD = {"lr": 0.1, "momentum": 0.9}


def optimizer_of(name, **options):
    return lambda model: getattr(torch.optim, name)(model.parameters(), **options)


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"]
)
def test_each_class_of_torch_takes_its_own_state_and_no_other(name):
    options = SGD if name == "SGD" else {}
    saved = saved_by(optimizer_of(name, **options))
    assert why_not(saved, optimizer_of(name, **options)) is None
    others = {"AdamW", "Adam", "SGD", "RAdam", "Adamax", "RMSprop"} - {name}
    for other in others:
        assert why_not(saved, optimizer_of(other, **(SGD if other == "SGD" else {}))), other


def test_a_state_that_does_not_fit_is_not_taken():
    saved = saved_by(adamw)
    assert why_not(saved) is None
    assert why_not(saved, saved_class="AdamW") is None
    assert why_not(saved, saved_class="Adam") == "it belongs to Adam, but the config has AdamW"
    assert why_not({"state": {}, "param_groups": saved["param_groups"]}) == "it is empty"
    assert why_not("text") == "it is not in the format of torch.optim"
    wider = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert "exp_avg of 0.weight has the shape [3, 3] instead of [4, 3]" in why_not(saved, model=wider)
    deeper = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    assert why_not(saved, model=deeper) == "it has 4 parameters, but the model has 6 (6 trainable)"
    infinite = saved_by(adamw)
    infinite["state"][1]["exp_avg"][0] = float("nan")
    assert why_not(infinite) == "exp_avg of 0.bias contains numbers that are not finite"
    lacking = saved_by(adamw)
    del lacking["state"][2]["exp_avg_sq"]
    assert "its slots of 1.weight (step, exp_avg) do not match this optimizer" in why_not(lacking)


def test_groups_are_matched_by_names_or_by_the_same_groups():
    def in_groups(model, named=False):
        pairs = list(model.named_parameters())
        halves = (pairs[2:], pairs[:2])
        return torch.optim.AdamW([{"params": half if named else [p for _, p in half]} for half in halves])

    def loaded(saved, optimizer, model):
        target = optimizer(model)
        torch_optimizer.load(saved, model, target, saved_class=None)
        return {name: target.state[p]["exp_avg"] for name, p in model.named_parameters()}

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    right = saved_by(in_groups, model)
    named = saved_by(lambda m: in_groups(m, named=True), model)
    first = right["state"][2]["exp_avg"]  # of 0.weight, the first of the second group
    assert torch.equal(loaded(right, in_groups, model)["0.weight"], first)
    assert loaded(named, adamw, model)["0.weight"].shape == (3, 3)
    assert why_not(right) == "its 2 groups do not list their parameters by name"
    model.requires_grad_(True)[0].requires_grad_(False)
    trained = saved_by(lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]), model)
    assert why_not(trained, model=model) is None


# ---- out of Lockstep


def exported(run_dir, out, task, settings):
    file = Trainer(settings, run_dir=run_dir, quiet=True).export_training_state(out, task)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["single", "ddp 2", "fsdp 2"])
def test_plain_torch_goes_on_with_an_exported_run(tmp_path, name):
    world, parallel = STRATEGIES[name]
    settings = {
        steps: settings_for(world, parallel, train={"steps": steps, "ema_decay": 0.9}, checkpoint={"mode": "sync"})
        for steps in (5, 8)
    }
    if name == "single":
        runs.fit_kind("Plain", {}, settings[5], tmp_path / "run")
    else:
        run_ranks(world, runs.fit_kind, "Plain", {}, settings[5], tmp_path / "run")
    task = own_tasks.Plain()
    content = exported(tmp_path / "run", tmp_path / "out/training.pt", task, settings[5])
    assert (content["step"], content["epoch"], content["optimizer_class"]) == (5, 0, "AdamW")
    (group,) = content["optimizer"]["param_groups"]
    assert group["param_names"] == [name for name, _ in task.model().named_parameters()]
    assert group["params"] == [0, 1, 2, 3]
    model = task.model()
    model.load_state_dict(content["model"])
    assert content["model_ema"].keys() == content["model"].keys()
    assert not torch.equal(content["model_ema"]["0.weight"], content["model"]["0.weight"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(content["optimizer"])
    for group in optimizer.param_groups:
        group["fused"] = name == "single"  # the kernel of the run, which an export does not choose
    plain_torch(task, model, optimizer, range(5, 8))
    if name == "single":
        weights, _ = runs.fit_kind("Plain", {}, settings[8], tmp_path / "run")
        assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    else:
        weights, _ = run_ranks(world, runs.fit_kind, "Plain", {}, settings[8], tmp_path / "run")[1]
        assert runs.difference(weights, state_of(model)) < 1e-12
    with pytest.raises(UsageError, match="exists: it is not overwritten"):
        exported(tmp_path / "run", tmp_path / "out/training.pt", task, settings[5])


def test_an_export_begins_another_run_with_all_its_state(tmp_path):
    options = {"train": {"steps": 6}, "optim": {"groups": [{"name": "head", "match": ["2.*"], "lr": 0.002}]}}
    settings = runs.config(**options, schedule={"name": "cosine"})
    runs.fit(own_tasks.Plain(), settings, tmp_path / "run")
    content = exported(tmp_path / "run", tmp_path / "a.pt", own_tasks.Plain(), settings)
    head, others = content["optimizer"]["param_groups"]
    assert (head["param_names"], head["params"]) == (["2.weight", "2.bias"], [0, 1])
    assert (others["param_names"], others["params"]) == (["0.weight", "0.bias"], [2, 3])
    assert head["initial_lr"] == 0.002
    last = Schedule(name="cosine", total=6)(5)  # the curve has come to its end, where its last rate stays
    assert (head["lr"], others["lr"]) == (0.002 * last, 0.01 * last)
    saved = read(store.listed(tmp_path / "run/checkpoints")[0])
    assert torch.equal(content["optimizer"]["state"][0]["exp_avg"], saved["optimizer.2.weight.exp_avg"])
    _, said = begin(tmp_path / "a.pt", tmp_path / "next")  # without groups
    assert "the state of AdamW is loaded for 4 parameters" in said
    assert "not loaded: step=6, epoch=0" in said


def test_the_export_of_fp16_has_the_loss_scale(tmp_path):
    settings = runs.config(train={"steps": 2}, precision="fp16")
    runs.fit(own_tasks.Plain(dtype=torch.float32), settings, tmp_path / "run")
    content = exported(tmp_path / "run", tmp_path / "a.pt", own_tasks.Plain(dtype=torch.float32), settings)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(content["scaler"])
    assert scaler.state_dict() == {**scaler.state_dict(), **content["scaler"]}
    assert (content["scaler"]["scale"], content["scaler"]["_growth_tracker"]) == (2.0**16, 2)


# ---- the page


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.save says so in a single process
def test_the_code_of_the_page_on_checkpoints_runs(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    monkeypatch.chdir(tmp_path)
    settings = runs.config(task={"kind": "toy"}, train={"steps": 4}, checkpoint={"mode": "sync"})
    trainer = Trainer(settings, run_dir="runs/toy", quiet=True)
    trainer.fit()
    trainer.export_training_state("training.pt")
    places = {"make_model": trainer.task().model, "torch": torch}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "docs/checkpoints.md", "exec"), places)
    for number, name in enumerate(("theirs.pt", "whole.pt")):
        Trainer(settings | {"train": {"steps": 1, "init_from": name}}, run_dir=f"runs/{number}", quiet=True).fit()
        assert "of AdamW is loaded" in Path(f"runs/{number}/train.log").read_text()
    shutil.rmtree("runs")
