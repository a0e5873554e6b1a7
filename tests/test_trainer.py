"""Whole runs through the public interface: what is written, how a run goes on, and what is refused."""

import contextlib
import json

import pytest
import torch
import yaml

import lockstep.trainer.assemble
from lockstep import LockstepError, Trainer
from lockstep.core.errors import UsageError
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly


def entries(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_run_directory_holds_config_environment_logs_and_checkpoint(tmp_path):
    settings = runs.config(
        task={"kind": "toy"},
        train={"steps": 10, "eval_every_steps": 5},
        log={"writers": ["text_log", "json_lines", "tensorboard"]},
    )
    results = Trainer(settings, run_dir=tmp_path, quiet=True).fit()
    written = {path.name for path in tmp_path.iterdir() if path.name != ".lock"}
    logs = {"metrics.jsonl", "train.log", "tensorboard", "model.txt"}
    assert written == {"config.yaml", "environment.json", "checkpoints"} | logs
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["batch"]["global"] == 24
    assert json.loads((tmp_path / "environment.json").read_text())["torch"] == torch.__version__
    logged = entries(tmp_path)
    assert [entry["step"] for entry in logged] == [5, 5, 10, 10]
    assert {
        "step",
        "epoch",
        "time_s",
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "train/samples_per_s",
        "train/wait_share",
    } <= logged[0].keys()
    assert logged[-1]["eval/loss"] == results["eval/loss"]
    assert logged[-1]["eval/samples"] == 200
    log = (tmp_path / "train.log").read_text()
    assert "165 trainable" in log
    assert "step 10/10" in log
    # Of step 5, because it was not known yet whether the evaluation would succeed.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000005", "step-00000010"]


def test_tensorboard_holds_the_logged_values(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = runs.config(
        task={"kind": "toy"}, train={"steps": 10}, log={"writers": ["text_log", "json_lines", "tensorboard"]}
    )
    Trainer(settings, run_dir=tmp_path, quiet=True).fit()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {event.step: event.value for event in events.Scalars("train/loss")}
    assert values == {entry["step"]: pytest.approx(entry["train/loss"], rel=1e-6) for entry in entries(tmp_path)}


def test_tensorboard_hides_what_a_dead_run_wrote_after_its_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = runs.config(
        train={"steps": 20}, log={"writers": ["text_log", "json_lines", "tensorboard"]}, checkpoint={"every_steps": 12}
    )

    class Interrupted(own_tasks.Plain):
        calls = 0

        def loss(self, model, batch):
            self.calls += model.training  # not those of the dry run
            if self.calls == 17:
                raise KeyboardInterrupt
            return super().loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        runs.fit(Interrupted(), settings, tmp_path)
    runs.fit(own_tasks.Plain(), settings, tmp_path, allow_change=["task"])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [5, 10, 15, 20]


def test_learning_rate_of_each_group_is_logged_scaled_and_scheduled(tmp_path):
    settings = runs.config(schedule={"name": "linear"}, train={"steps": 10}, log={"every_steps": 5})
    settings["optim"] = {
        "lr": 0.01,
        "lr_scaling": "linear",
        "reference_batch": 12,
        "groups": [{"name": "last", "match": ["2.*"], "lr": 0.1}],
    }
    runs.fit(own_tasks.Plain(), settings, tmp_path)
    first, last = entries(tmp_path)
    assert first["train/lr/default"] == pytest.approx(0.02 * 0.6)  # twice the rate for twice the batch; update 4 of 10
    assert first["train/lr/last"] == pytest.approx(0.2 * 0.6)
    assert last["train/lr/last"] == pytest.approx(0.2 * 0.1)


STOPS = [(kind, step) for kind in ("Masked", "Dropout") for step in (7, 10, 13)]  # mid-epoch, at its end, after it


@pytest.mark.parametrize(("kind", "stopped_at"), mainly([("Dropout", 7)], STOPS))
def test_resumed_run_is_bitwise_the_undisturbed_one(tmp_path, kind, stopped_at):
    task = getattr(own_tasks, kind)
    settings = runs.config(schedule={"name": "cosine"}, checkpoint={"every_steps": stopped_at})
    whole, _ = runs.fit(task(), settings, tmp_path / "whole")

    class Interrupted(task):
        calls = 0

        def loss(self, model, batch):
            self.calls += model.training  # not those of the dry run
            if self.calls == stopped_at + 2:
                raise KeyboardInterrupt
            return super().loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        runs.fit(Interrupted(), settings, tmp_path / "halved")
    resumed, _ = runs.fit(task(), settings, tmp_path / "halved", allow_change=["task"])
    assert runs.difference(resumed, whole) == 0
    assert [entry["step"] for entry in entries(tmp_path / "halved")] == [5, 10, 15, 20]


@pytest.mark.exhaustive  # as test_per_rank_batch_fixes_the_global_batch_at_the_first_launch
def test_resume_on_another_world_size_trains_the_same(tmp_path):
    expected, _ = runs.by_hand(own_tasks.Masked())
    run_ranks(2, runs.fit_kind, "Masked", {}, runs.config(train={"steps": 8}), tmp_path)
    ((weights, _),) = run_ranks(1, runs.fit_kind, "Masked", {}, runs.config(batch={"micro": 7}), tmp_path)
    assert runs.difference(weights, expected) < 1e-10


@pytest.mark.exhaustive  # as test_training_in_memory_is_that_of_the_trainer_bit_for_bit
def test_samples_of_every_step_are_the_same_on_any_number_of_ranks(tmp_path):
    settings = runs.config(train={"epochs": 2, "steps": None}, batch={"global": 7})
    ledgers = []
    for world in (1, 2, 3):
        steps = {}
        for part, _ in run_ranks(world, rank_cases.ledger, tmp_path / str(world), settings, {"length": 45}):
            for step, indices in part:
                steps.setdefault(step, []).extend(indices)
        ledgers.append({step: sorted(indices) for step, indices in steps.items()})
        for epoch in (0, 1):
            used = [index for step in range(7 * epoch, 7 * epoch + 7) for index in ledgers[-1][step]]
            assert sorted(used) == list(range(45))
    assert ledgers[0] == ledgers[1] == ledgers[2]


@pytest.mark.cases("3-4")
@pytest.mark.parametrize(("least", "steps"), [(7, 7), (3, 4), (None, 4)])
def test_few_samples_are_trained_with_for_as_many_steps_as_the_config_says_at_least(tmp_path, least, steps):
    train = {"epochs": 2, "min_steps": least, "steps": None}
    settings = runs.config(
        task={"kind": "toy", "samples": 48}, train=train, schedule={"name": "linear", "warmup_share": 0.5}
    )
    assert Trainer(settings, run_dir=tmp_path, quiet=True).fit()["step"] == steps


def test_finished_run_says_so_and_evaluates(tmp_path, capsys):
    settings = runs.config(task={"kind": "toy"}, train={"steps": 10, "eval_every_steps": 10})
    first = Trainer(settings, run_dir=tmp_path, quiet=True).fit()
    again = Trainer(settings, run_dir=tmp_path).fit()
    assert "complete at step 10" in capsys.readouterr().out
    assert again["eval/loss"] == first["eval/loss"]
    longer = Trainer(runs.config(task={"kind": "toy"}, train={"steps": 12}), run_dir=tmp_path, quiet=True).fit()
    assert longer["step"] == 12


def test_other_config_in_the_same_directory_is_refused_by_name(tmp_path):
    Trainer(runs.config(task={"kind": "toy"}), run_dir=tmp_path, quiet=True).fit()
    other = runs.config(task={"kind": "toy"}, optim={"lr": 0.5}, batch={"global": 48})
    with pytest.raises(LockstepError) as caught:
        Trainer(other, run_dir=tmp_path, quiet=True).fit()
    message = str(caught.value)
    assert "optim.lr: 0.01 there, 0.5 here" in message
    assert "batch.global: 24 there, 48 here" in message
    assert "Trainer(fresh=True)" in message
    assert caught.value.exit_code == 2
    fresh = Trainer(other, run_dir=tmp_path, fresh=True, quiet=True).fit()
    assert fresh["step"] == 20
    assert [entry["step"] for entry in entries(tmp_path)] == [5, 10, 15, 20]


def test_fresh_deletes_only_what_a_run_wrote(tmp_path):
    for _ in range(2):
        Trainer(runs.config(task={"kind": "toy"}), run_dir=tmp_path, fresh=True, quiet=True).fit()
        (tmp_path / "notes.txt").write_text("mine")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_per_rank_batch_fixes_the_global_batch_at_the_first_launch(tmp_path):
    settings = runs.config(train={"steps": 4}) | {"batch": {"per_rank": 6, "accumulate": 2}}
    run_ranks(2, runs.fit_kind, "Masked", {}, settings, tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["batch"] == {
        "global": 24,
        "micro": 6,
        "per_rank": None,
        "accumulate": None,
    }
    run_ranks(1, runs.fit_kind, "Masked", {}, settings | {"train": {"steps": 8}}, tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["batch"]["global"] == 24


def test_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    settings = runs.config(task={"kind": "toy"}, checkpoint={"every_steps": 10})
    Trainer(settings, run_dir=tmp_path, quiet=True).fit()
    state = tmp_path / "checkpoints" / "step-00000020" / "__0_0.distcp"
    broken = bytearray(state.read_bytes())
    broken[len(broken) // 2] ^= 1
    state.write_bytes(broken)
    Trainer(settings, run_dir=tmp_path).fit()
    out = capsys.readouterr().out
    assert "step-00000020: __0_0.distcp differs from its checksum" in out
    assert "resuming" in out
    assert "step 10" in out


def test_checkpoint_of_another_model_is_refused(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(), tmp_path)

    class Wider(own_tasks.Plain):
        def model(self):
            self.built = torch.nn.Linear(10, 5, dtype=torch.float64)
            return self.built

    with pytest.raises(LockstepError, match="tensors differ from the model's"):
        runs.fit(Wider(), runs.config(train={"steps": 30}), tmp_path, allow_change=["task"])


@pytest.mark.exhaustive  # as test_training_in_memory_is_that_of_the_trainer_bit_for_bit
def test_evaluation_of_a_run_on_two_ranks_is_that_of_training(tmp_path):
    settings = runs.config(train={"steps": 6, "eval_every_steps": 6})
    task = own_tasks.Masked(eval_length=19)
    _, results = runs.fit(task, settings, tmp_path)
    for answer in run_ranks(2, rank_cases.evaluate_run, tmp_path, "Masked", {"eval_length": 19}):
        assert answer["loss"] == results["eval/loss"]


@pytest.mark.exhaustive  # as test_training_in_memory_is_that_of_the_trainer_bit_for_bit
def test_run_of_one_rank_is_evaluated_on_two(tmp_path):
    settings = runs.config(train={"steps": 4, "eval_every_steps": 4}, parallel={"strategy": "single"})
    _, results = runs.fit(own_tasks.Masked(eval_length=19), settings, tmp_path)
    for answer in run_ranks(2, rank_cases.evaluate_run, tmp_path, "Masked", {"eval_length": 19}, "single"):
        assert answer["loss"] == results["eval/loss"]


def test_empty_data_sets_are_errors(tmp_path):
    with pytest.raises(LockstepError, match="training data set is empty"):
        runs.fit(own_tasks.Plain(0), runs.config(), tmp_path / "train")
    with pytest.raises(LockstepError, match="10 samples do not fill one batch of 24"):
        runs.fit(own_tasks.Plain(10), runs.config(data={"drop_last": True}), tmp_path / "dropped")
    with pytest.raises(LockstepError, match="evaluation data set is empty"):
        runs.fit(own_tasks.Plain(10), runs.config(train={"eval_every_steps": 5}), tmp_path / "eval")


def test_single_strategy_on_several_ranks_is_an_error():
    for message in run_ranks(2, rank_cases.error_of, "Plain", {}, runs.config(parallel={"strategy": "single"})):
        assert "2 ranks would train 2 models" in message


def test_exit_is_a_failure_before_this_rank_leaves_the_others(tmp_path, monkeypatch):
    """So that they are told of it, as of any error."""
    seen = []
    join = lockstep.trainer.assemble.join_world

    @contextlib.contextmanager
    def joined(*arguments):
        with join(*arguments) as world:
            try:
                yield world
            except Exception as error:
                seen.append(error)
                raise

    class Exiting(own_tasks.Plain):
        def loss(self, model, batch):
            raise SystemExit(0)

    monkeypatch.setattr(lockstep.trainer.assemble, "join_world", joined)
    with pytest.raises(LockstepError, match=r"in loss: the task called sys\.exit\(0\)") as caught:
        Trainer(runs.config(), run_dir=tmp_path, quiet=True).fit(Exiting())
    assert seen == [caught.value]
    assert not caught.value.retryable


def test_prediction_without_predict_is_an_error(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(), tmp_path)
    with pytest.raises(LockstepError, match="Plain has no predict"):
        Trainer(runs.config(), run_dir=tmp_path, quiet=True).predict(own_tasks.Plain(), own_tasks.Plain().train_data())


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "describe", "preflight", "export"])
def test_a_class_in_place_of_a_task_is_refused_before_anything_is_written(tmp_path, method):
    trainer = Trainer(runs.config(), run_dir=tmp_path / "run", quiet=True)
    arguments = [tmp_path / "out"] if method == "export" else []
    with pytest.raises(UsageError, match=r"the task is the class Plain\n.*give an object: Plain\(\)"):
        getattr(trainer, method)(*arguments, task=own_tasks.Plain)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("config", [[1], None, 7, own_tasks.Plain, own_tasks.Plain()])
def test_a_config_of_another_type_is_refused(config):
    with pytest.raises(UsageError, match=r"Trainer\(config\): the config is of type .*\n.*give a RunConfig, a mapping"):
        Trainer(config)


def test_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LockstepError, match="cannot write") as caught:
        Trainer(runs.config(task={"kind": "toy"}), run_dir=tmp_path / "file" / "run", quiet=True).fit()
    assert str(tmp_path / "file") in str(caught.value)


def test_more_ranks_than_gpus_is_an_error(monkeypatch):
    from lockstep.core.parallel.world import pick_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(pick_device("auto", 1, 2)) == "cuda:1"
    assert str(pick_device("cpu", 1, 4)) == "cpu"
    with pytest.raises(LockstepError, match="4 ranks on a machine with 2 GPUs"):
        pick_device("auto", 0, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LockstepError, match="no CUDA device"):
        pick_device("cuda", 0, 1)


@pytest.mark.parametrize(("world", "strategy"), mainly([(2, "ddp")], [(1, "single"), (2, "ddp"), (2, "fsdp")]))
def test_training_in_memory_is_that_of_the_trainer_bit_for_bit(tmp_path, world, strategy):
    """Most tests of the step train in memory, so that they need no run directory."""
    settings = runs.config(
        batch={"micro": 5},
        parallel={"strategy": strategy},
        train={"steps": 12, "eval_every_steps": 5, "ema_decay": 0.9},
        optim={"clip_norm": 0.5},
    )
    options = {"eval_length": 19, "dropout": 0.2}
    in_memory = run_ranks(world, runs.fit_kind, "Deep", options, settings)
    with_files = run_ranks(world, runs.fit_kind, "Deep", options, settings, tmp_path)
    for (weights, results), (expected, logged) in zip(in_memory, with_files, strict=True):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        measured = {"train/samples_per_s", "train/wait_share"}
        compared = {name for name in results if name.startswith(("train/", "eval/"))} - measured
        assert {"train/loss", "train/grad_norm", "eval/loss"} <= compared
        assert {name: results[name] for name in compared} == {name: logged[name] for name in compared}


@pytest.mark.cases("0.9")
@pytest.mark.parametrize("decay", [None, 0.9])
def test_model_that_fit_leaves_is_the_evaluated_model(tmp_path, decay):
    settings = runs.config(train={"steps": 10, "ema_decay": decay})
    trainer = Trainer(settings, run_dir=tmp_path, quiet=True)
    loss = trainer.fit(own_tasks.Classes(eval_length=20))["train/loss"]
    fitted = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    assert not trainer.model.training
    assert trainer.results["step"] == 10
    assert trainer.fit(own_tasks.Classes(eval_length=20))["train/loss"] == loss  # complete: the same results again
    trainer.evaluate(own_tasks.Classes(eval_length=20))
    assert fitted.keys() == trainer.model.state_dict().keys()
    assert all(torch.equal(fitted[name], tensor) for name, tensor in trainer.model.state_dict().items())
    with pytest.raises(LockstepError):
        trainer.fit(own_tasks.Plain())
    with pytest.raises(LockstepError, match="there is no model"):
        assert trainer.model
    trainer.predict(own_tasks.Classes(eval_length=20))
    assert not trainer.model.training


@pytest.mark.cases("1-True")
@pytest.mark.parametrize(("samples", "told"), [(1, True), (2, False)])
def test_ranks_without_samples_are_told(tmp_path, samples, told):
    settings = [f"batch.global={samples}", "train.steps=1", "train.epochs=null", "--run-dir", tmp_path]
    printed = run_ranks(2, rank_cases.command, "train", "toy", *settings)[0]
    text = "warning: batch.global=1 is less than the 2 ranks: a step has no sample for 1 of them; start at most 1 rank,"
    assert (text in printed) == told
