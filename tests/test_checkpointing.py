"""What runs save, keep, resume from, refuse to resume from, and export."""

import json
import re
import resource

import pytest
import torch
from safetensors.torch import load_file

from lockstep import LockstepError, Trainer
from lockstep.checkpoint import files, store
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks


def saved(run_dir):
    """Everything in the newest checkpoint."""
    newest = store.listed(run_dir / "checkpoints")[0]
    return newest.step, dict(files.read(newest.path, newest.index)), newest.values


def same(one, other):
    return one[0] == other[0] and one[1].keys() == other[1].keys() and all(torch.equal(one[1][k], other[1][k]) for k in one[1]) and one[2] == other[2]


# ---- the step, the weights, the optimizer and the loss scale are all there is


TRAININGS = [
    ("Masked", {"schedule": {"name": "one_cycle"}, "optim": {"clip_norm": 0.5}}),
    ("Dropout", {"optim": {"name": "SGD", "args": {"momentum": 0.9}}, "train": {"ema_decay": 0.9}}),
    ("Single", {"precision": "fp16", "optim": {"name": "Adagrad"}}),
]
OTHERS_COVER = (("Masked", 2), ("Dropout", 2), ("Single", 3))


def trainings():
    """On one rank and on several each."""
    for kind, settings in TRAININGS:
        for world in (1, 2, 3):
            yield pytest.param(world, kind, settings, marks=pytest.mark.exhaustive if (kind, world) in OTHERS_COVER else (), id=f"{kind}-{world}")


@pytest.mark.parametrize(("world", "kind", "settings"), list(trainings()))
def test_run_that_goes_on_from_a_checkpoint_ends_bitwise_like_one_that_was_never_stopped(tmp_path, world, kind, settings):
    settings = runs.config(batch={"micro": 5}, checkpoint={"every_steps": 7, "keep_last": 9}, **settings)
    run_ranks(world, rank_cases.fit_saved, kind, settings, tmp_path)
    whole = saved(tmp_path)
    for one in store.listed(tmp_path / "checkpoints"):
        if one.step > 7:
            store.remove(one.path)
    run_ranks(world, rank_cases.fit_saved, kind, settings, tmp_path)
    assert whole[0] == 20
    assert same(whole, saved(tmp_path))


def test_elastic_2_to_1_to_2_to_3_ranks_uses_the_same_samples_and_gives_the_same_weights(tmp_path):
    settings = runs.config(batch={"micro": 7})
    expected, _ = runs.by_hand(own_tasks.Plain(length=100))
    used = {}
    for world, stop in ((2, 6), (1, 9), (2, 14), (3, 20)):
        for steps, _ in run_ranks(world, rank_cases.ledger, tmp_path / "run", settings | {"train": {"steps": stop}}, {"length": 100}):
            for step, indices in steps:
                used.setdefault(step, []).extend(indices)
    undisturbed = {}
    for steps, _ in run_ranks(1, rank_cases.ledger, tmp_path / "one", settings, {"length": 100}):
        for step, indices in steps:
            undisturbed.setdefault(step, []).extend(indices)
    assert {step: sorted(indices) for step, indices in used.items()} == {step: sorted(indices) for step, indices in undisturbed.items()}
    _, tensors, _ = saved(tmp_path / "run")
    found = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    assert runs.difference(found, expected) < 1e-10


def test_every_rank_writes_a_share_and_any_number_of_ranks_reads_them(tmp_path):
    settings = runs.config(train={"steps": 4})
    run_ranks(3, runs.fit_kind, "Plain", {}, settings, tmp_path)
    names = {path.name for path in (tmp_path / "checkpoints" / "step-00000004").iterdir()}
    assert names == {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata", "index.json", "manifest.json"}


# ---- averaged weights


def test_averaged_weights_are_torchs_are_evaluated_and_exported(tmp_path):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    settings = runs.config(train={"steps": 20, "eval_every_steps": 10, "ema_decay": 0.8})
    task = own_tasks.Plain(length=120, eval_length=30)
    _, results = runs.fit(task, settings, tmp_path)
    torch.manual_seed(0)
    model = own_tasks.Plain(length=120, eval_length=30).model()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    averaged.update_parameters(model)  # the first only copies
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    data = task.train_data().tensors
    for step in range(20):
        indices = own_tasks_order(120, step)
        optimizer.zero_grad()
        (task.loss(model, [tensor[indices] for tensor in data]) / 24).backward()
        optimizer.step()
        averaged.update_parameters(model)
    file = Trainer(settings, run_dir=tmp_path, quiet=True).export(tmp_path / "out", task)
    found = load_file(file)
    expected = averaged.module.state_dict()
    assert runs.difference(found, expected) < 1e-12
    batch = task.eval_data().tensors
    assert results["eval/loss"] == pytest.approx(task.loss(averaged.module, batch).item() / len(batch[0]), rel=1e-9)
    assert Trainer(settings, run_dir=tmp_path, quiet=True).evaluate(task)["loss"] == results["eval/loss"]


def own_tasks_order(length, step, batch=24):
    import numpy as np

    from lockstep.data.order import permute

    epoch, within = divmod(step, length // batch)
    return torch.from_numpy(permute(np.arange(within * batch, (within + 1) * batch), length, 0, epoch))


# ---- starting from weights


def test_training_starts_from_exported_weights_and_names_what_does_not_fit(tmp_path):
    first, _ = runs.fit(own_tasks.Plain(), runs.config(train={"steps": 3}), tmp_path / "first")
    Trainer(runs.config(), run_dir=tmp_path / "first", quiet=True).export(tmp_path / "weights", own_tasks.Plain())
    settings = runs.config(train={"steps": 1, "init_from": str(tmp_path / "weights")}, optim={"lr": 1e-30, "weight_decay": 0.0})
    second, _ = runs.fit(own_tasks.Plain(), settings, tmp_path / "second")
    assert runs.difference(second, first) < 1e-12

    class Other(own_tasks.Plain):
        def model(self):
            self.built = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5, bias=False)).double()
            return self.built

    with pytest.raises(LockstepError, match=r"train\.init_from: .*unknown to the model: 2\.bias"):
        runs.fit(Other(), settings, tmp_path / "third")


# ---- what stays


def test_last_best_and_every_nth_are_kept(tmp_path):
    keep = {"every_steps": 2, "keep_last": 2, "keep_every_steps": 10, "keep_best": "min eval/loss"}
    settings = runs.config(train={"steps": 30, "eval_every_steps": 5}, checkpoint=keep, optim={"lr": 0.3})
    runs.fit(own_tasks.Plain(eval_length=20), settings, tmp_path)
    evaluated = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "eval/loss" in line]
    best = min(evaluated, key=lambda entry: entry["eval/loss"])["step"]
    steps = {one.step for one in store.listed(tmp_path / "checkpoints")}
    assert steps == {10, 20, 30, 28, best}


def test_unknown_metric_to_keep_by_is_named(tmp_path):
    settings = runs.config(train={"steps": 4, "eval_every_steps": 2}, checkpoint={"keep_best": "max eval/acc"})
    with pytest.raises(LockstepError, match=r"checkpoint\.keep_best: there is no metric eval/acc.*\n.*eval/loss"):
        runs.fit(own_tasks.Plain(eval_length=20), settings, tmp_path)
    with pytest.raises(LockstepError, match="keep_best"):
        Trainer(runs.config(checkpoint={"keep_best": "eval/loss"}))


# ---- what is refused


def test_changed_key_may_be_allowed_by_name(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    changed = runs.config(train={"steps": 8}, optim={"lr": 0.5, "clip_norm": 1.0})
    with pytest.raises(LockstepError, match=r"optim\.clip_norm: None there, 1\.0 here\n    optim\.lr: 0\.01 there, 0\.5 here"):
        runs.fit(own_tasks.Plain(), changed, tmp_path)
    with pytest.raises(LockstepError, match=r"optim\.clip_norm") as caught:
        Trainer(changed, run_dir=tmp_path, allow_change=["optim.lr"], quiet=True).fit(own_tasks.Plain())
    assert "optim.lr:" not in str(caught.value)
    with pytest.raises(LockstepError, match=r"did you mean optim\.lr"):
        Trainer(changed, run_dir=tmp_path, allow_change=["optim.lrr"], quiet=True).fit(own_tasks.Plain())
    assert Trainer(changed, run_dir=tmp_path, allow_change=["optim"], quiet=True).fit(own_tasks.Plain())["step"] == 8
    assert runs.fit(own_tasks.Plain(), changed | {"train": {"steps": 9}}, tmp_path)[1]["step"] == 9  # it is the run's now


def test_other_training_data_are_refused(tmp_path):
    runs.fit(own_tasks.Plain(length=50), runs.config(train={"steps": 4}), tmp_path)
    with pytest.raises(LockstepError, match="50 samples then, 60 now"):
        runs.fit(own_tasks.Plain(length=60), runs.config(), tmp_path)

    class Altered(own_tasks.Plain):
        def train_data(self):
            data = super().train_data()
            data.tensors[0][0] += 1
            return data

    with pytest.raises(LockstepError, match="samples differ"):
        runs.fit(Altered(length=50), runs.config(), tmp_path, allow_change=["task"])
    assert Trainer(runs.config(), run_dir=tmp_path, allow_change=["data", "task"], quiet=True).fit(Altered(length=50))["step"] == 20


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "index.json", "manifest.json"])
def test_flipped_byte_in_any_file_is_found_and_the_checkpoint_before_is_used(tmp_path, capsys, name):
    settings = runs.config(checkpoint={"every_steps": 10})
    runs.fit(own_tasks.Plain(), settings, tmp_path)
    path = tmp_path / "checkpoints" / "step-00000020" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    Trainer(settings, run_dir=tmp_path).fit(own_tasks.Plain())
    out = capsys.readouterr().out
    assert re.search(f"passed over a damaged checkpoint: step-00000020: {re.escape(name)}", out)
    assert f"resuming {tmp_path} at step 10" in out


def test_file_that_the_system_refuses_to_write_is_survived(tmp_path):
    """A real refusal: the system's limit on file sizes, for the checkpoint of step 10."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Limited(own_tasks.Plain):
        calls = 0

        def model(self):
            self.built = torch.nn.Sequential(torch.nn.Linear(10, 2000), torch.nn.Linear(2000, 5)).double()
            return self.built

        def loss(self, model, batch):
            self.calls += 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if 8 <= self.calls <= 12 else before[0], before[1]))
            return super().loss(model, batch)

    settings = runs.config(checkpoint={"every_steps": 5, "mode": "sync"})
    try:
        with pytest.raises(LockstepError, match=r"1 checkpoints could not be written, the newest is of step 20.*step 10 could not"):
            runs.fit(Limited(), settings, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.step for one in store.listed(tmp_path / "checkpoints")] == [20, 15, 5]
    assert "warning: the checkpoint of step 10 could not be written" in (tmp_path / "train.log").read_text()


def test_checkpoint_carries_results_of_its_own_step_only(tmp_path):
    """Evaluation results belong to their own step: a checkpoint between two evaluations has none."""
    settings = runs.config(train={"steps": 12, "eval_every_steps": 6}, checkpoint={"every_steps": 4, "keep_last": 9})
    runs.fit(own_tasks.Plain(eval_length=20), settings, tmp_path)
    assert {one.step: bool(one.metrics) for one in store.listed(tmp_path / "checkpoints")} == {4: False, 8: False, 12: True}


def test_ranks_that_do_not_share_the_run_directory_are_named_before_anything_is_computed(tmp_path):
    for message in run_ranks(2, rank_cases.fit_in_a_folder_of_its_own, runs.config(), tmp_path):
        assert "ranks [1] do not see what rank 0 writes there" in message


def test_state_of_another_optimizer_is_left_out_where_the_change_is_allowed(tmp_path, capsys):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    changed = runs.config(train={"steps": 8}, optim={"name": "RMSprop", "weight_decay": 0.0})
    assert Trainer(changed, run_dir=tmp_path, allow_change=["optim"]).fit(own_tasks.Plain())["step"] == 8
    assert "the state of AdamW is left out" in capsys.readouterr().out


def test_averages_may_begin_later(tmp_path, capsys):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    later = runs.config(train={"steps": 8, "ema_decay": 0.5})
    assert Trainer(later, run_dir=tmp_path, allow_change=["train.ema_decay"]).fit(own_tasks.Plain())["step"] == 8
    assert "averages begin with the weights of this step" in capsys.readouterr().out
    assert any(name.startswith("ema.") for name in saved(tmp_path)[1])


def test_state_that_cannot_be_saved_is_named_before_training(tmp_path):
    class Odd(own_tasks.Plain):
        def model(self):
            class Extra(torch.nn.Linear):
                def get_extra_state(self):
                    return {"a": 1}

            self.built = Extra(10, 5, dtype=torch.float64)
            return self.built

        def loss(self, model, batch):
            raise AssertionError("it trained")

    with pytest.raises(LockstepError, match=r"_extra_state.*can be saved neither as a tensor nor as a number"):
        runs.fit(Odd(), runs.config(), tmp_path)


def test_checkpoints_without_a_config_are_not_taken_for_anyones(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(LockstepError, match=r"no config\.yaml"):
        runs.fit(own_tasks.Plain(), runs.config(seed=1), tmp_path)
