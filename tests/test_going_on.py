"""When a run goes on: it keeps the schedule's curve and the task's source, and damaged logs are repaired."""

import io
import json
import shutil

import pytest

from lockstep import LockstepError, Trainer
from lockstep.trainer import source_code
from tests import own_tasks, runs
from tests.parts.cases import run_info
from tests.selection import mainly


def entries(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- the schedule's curve


def curve(folder, steps, allow_change=(), **schedule):
    """Train to `steps` on a cosine; the learning rate by step, of all that was logged."""
    settings = runs.config(train={"steps": steps}, schedule={"name": "cosine"} | schedule, log={"every_steps": 1})
    Trainer(settings, run_dir=folder, quiet=True, allow_change=allow_change).fit(own_tasks.Plain())
    return {entry["step"]: entry["train/lr"] for entry in entries(folder)}


def test_longer_or_shorter_training_on_another_curve_is_refused_with_the_jump(tmp_path):
    first = curve(tmp_path, 10)
    weights = checkpoint(tmp_path)
    for steps in (20, 5):
        with pytest.raises(LockstepError) as caught:
            curve(tmp_path, steps)
        assert caught.value.exit_code == 2
        assert caught.value.where == f"train.steps={steps}"
        assert (
            f"the cosine schedule had 10 steps and has {steps} now: "
            f"after 10 updates the learning rate goes from {first[10]:.4g} to " in str(caught.value)
        )
        for remedy in ("schedule.total_steps=10 ", 'Trainer(allow_change=["train.steps"]) ', "Trainer(fresh=True) "):
            assert remedy in caught.value.remedy
    assert checkpoint(tmp_path) == weights


def checkpoint(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "checkpoints").rglob("*")) if path.is_file()}


def test_longer_training_may_keep_its_curve(tmp_path):
    first = curve(tmp_path, 10)
    longer = curve(tmp_path, 14, total_steps=10)
    assert longer == first | dict.fromkeys(range(11, 15), first[10])
    assert first[10] > 0
    assert curve(tmp_path / "at-once", 14, total_steps=10) == longer
    with pytest.raises(
        LockstepError, match=r"schedule\.total_steps=12: the cosine schedule had 10 steps and has 12 now"
    ):
        curve(tmp_path, 16, total_steps=12)


def test_beginning_of_a_curve_may_be_trained_first(tmp_path):
    whole = curve(tmp_path / "whole", 12)
    curve(tmp_path / "halved", 5, total_steps=12)
    assert curve(tmp_path / "halved", 12) == whole
    assert checkpoint(tmp_path / "halved").keys() >= checkpoint(tmp_path / "whole").keys()


@pytest.mark.parametrize(
    "allowed",
    mainly(["train", "schedule.total_steps"], ["train.steps", "train.epochs", "train", "schedule.total_steps"]),
)
def test_another_curve_may_be_allowed_and_is_told(tmp_path, allowed):
    first = curve(tmp_path, 10)
    assert curve(tmp_path, 20, allow_change=[allowed])[11] > 10 * first[10]
    assert (
        "warning: the cosine schedule had 10 steps and has 20 now: after 10 updates the learning rate goes from"
        in (tmp_path / "train.log").read_text()
    )
    assert curve(tmp_path, 20)  # it is the run's now


def test_length_of_a_curve_is_free_until_it_matters(tmp_path):
    curve(tmp_path, 3, warmup_steps=3)
    assert curve(tmp_path, 8, warmup_steps=3) == curve(tmp_path / "at-once", 8, warmup_steps=3)
    with pytest.raises(LockstepError, match=r"train\.epochs=2: the cosine schedule had 8 steps and has 20 now"):
        Trainer(
            runs.config(train={"steps": None, "epochs": 2}, schedule={"name": "cosine", "warmup_steps": 3}),
            run_dir=tmp_path,
            quiet=True,
        ).fit(own_tasks.Plain())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "warmup",
    mainly([{"warmup_share": 0.3}], [{}, {"warmup_steps": 3}, {"warmup_share": 0.3}]),
    ids=["none", "steps", "share"],
)
def test_a_curve_without_length_goes_on_in_a_longer_training(tmp_path, warmup):
    for name in ("constant", "step"):
        options = {"name": name, "step_epochs": 0.5, **warmup}
        longer = {**curve(tmp_path / name, 10, **options), **curve(tmp_path / name, 14, **options)}
        assert longer == {**curve(tmp_path / "at-once", 14, **options | {"total_steps": 10})}
        assert curve(tmp_path / name, 16, **options)[14] == longer[14]  # the warm-up is kept for good
        shutil.rmtree(tmp_path / "at-once")


def test_a_run_in_its_warm_up_may_become_longer_or_shorter(tmp_path):
    shared = {"name": "linear", "warmup_share": 0.5}
    begun = curve(tmp_path / "begun", 4, total_steps=10, **shared)
    for steps in (20, 7):
        folder = shutil.copytree(tmp_path / "begun", tmp_path / f"to-{steps}")
        goes_on = curve(folder, steps, **shared)
        assert begun.items() <= goes_on.items()
        assert goes_on == curve(tmp_path / f"whole-{steps}", steps, name="linear", warmup_steps=5)


@pytest.mark.parametrize(
    ("warmup", "told"), mainly([(20, True), (19, False)], [(20, True), (30, True), (19, False), (0, False)])
)
def test_warm_up_that_never_ends_is_told(tmp_path, capsys, warmup, told):
    settings = runs.config(task={"kind": "toy"}, schedule={"warmup_steps": warmup})
    Trainer(settings, run_dir=tmp_path).fit()
    text = f"warning: schedule.warmup_steps={warmup} lasts for the whole training of 20 steps: "
    text += f"the learning rate only rises, to {min(1, 20 / max(1, warmup)):.3g} of optim.lr"
    assert (text in (tmp_path / "train.log").read_text()) == told
    assert (text in capsys.readouterr().out) == told


# ---- the task's source


def test_another_task_object_is_refused_by_its_class(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    kept = {path.name for path in (tmp_path / "source").iterdir()}
    assert kept == {f"tests.own_tasks.{name}" for name in ("Plain", "Masked", "masked_data")}

    class Other(own_tasks.Plain):
        def loss(self, model, batch):
            return super().loss(model, batch) * 2

    for steps in (4, 8):
        with pytest.raises(
            LockstepError,
            match=r"the task's code has changed since the run began: tests\.test_going_on\..*Other is new",
        ) as caught:
            runs.fit(Other(), runs.config(train={"steps": steps}), tmp_path)
        assert caught.value.exit_code == 2
    assert runs.fit(own_tasks.Plain(), runs.config(train={"steps": 8}), tmp_path)[1]["step"] == 8
    assert runs.fit(Other(), runs.config(train={"steps": 9}), tmp_path, allow_change=["task"])[1]["step"] == 9


def test_task_whose_source_cannot_be_read_trains_and_says_so(tmp_path, monkeypatch):
    def unreadable(*_):
        raise RecursionError

    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    monkeypatch.setattr(source_code, "of_class", unreadable)
    assert runs.fit(own_tasks.Plain(), runs.config(train={"steps": 8}), tmp_path)[1]["step"] == 8
    assert "the source of the task cannot be read" in (tmp_path / "train.log").read_text()
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 2}), tmp_path / "new")
    assert not (tmp_path / "new" / "source").exists()


# ---- logs


class Tabled(own_tasks.Classes):
    """Its accuracy is a number that is not finite; its confusion matrix goes into metric_arrays.jsonl."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1.0 if model.training else float("nan"))


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
def test_damaged_logs_are_repaired_with_one_message_each_and_hold_json(tmp_path):
    settings = runs.config(train={"steps": 5, "eval_every_steps": 5})
    runs.fit(Tabled(), settings, tmp_path)
    for name in ("metrics.jsonl", "metric_arrays.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"\0" * 100 + b"\n" + b'{"step": 5, "torn')
    runs.fit(Tabled(), settings | {"train": {"steps": 10, "eval_every_steps": 5}}, tmp_path)
    log = (tmp_path / "train.log").read_text()
    for name, steps in (("metrics.jsonl", [5, 5, 10, 10]), ("metric_arrays.jsonl", [5, 10])):
        lines = (tmp_path / name).read_text().splitlines()
        assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == steps
        assert log.count(f"{name}: 2 of ") == 1
    assert entries(tmp_path)[-1]["eval/loss"] is None
    assert "eval/loss nan" in log


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
@pytest.mark.parametrize(
    "name",
    mainly(["metrics.jsonl", "tensorboard"], ["train.log", "metrics.jsonl", "metric_arrays.jsonl", "tensorboard"]),
)
def test_log_that_cannot_be_opened_ends_no_training(tmp_path, capsys, name):
    runs.mark(tmp_path)
    (tmp_path / name).touch() if name == "tensorboard" else (tmp_path / name).mkdir()
    settings = runs.config(
        train={"steps": 10, "eval_every_steps": 5}, log={"writers": ["text_log", "json_lines", "tensorboard"]}
    )
    assert Trainer(settings, run_dir=tmp_path).fit(own_tasks.Classes())["step"] == 10
    said = capsys.readouterr()
    is_opened_at_once = name in ("train.log", "metrics.jsonl")  # others open their files with the first record
    warning = f"warning: {name} cannot be {'opened' if is_opened_at_once else 'written'}: "
    assert said.err.count(warning) == 1
    assert said.out.count(warning) == 1
    if name != "train.log":
        assert (tmp_path / "train.log").read_text().count(warning) == 1


def test_tensorboard_on_a_full_disk_goes_on_in_another_file(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from lockstep.parts.writers.tensorboard import TensorBoard

    writer = TensorBoard(run_info(tmp_path))
    writer.record({"step": 1, "loss": 0.5})
    whole = writer.writer._writer
    writer.writer._writer = io.BytesIO()
    writer.writer._writer.write = lambda data: whole.write(data[:7]) and full()
    with pytest.raises(OSError, match="full"):
        writer.record({"step": 2, "loss": 0.25})
    whole.close()
    writer.record({"step": 3, "loss": 0.125})
    writer.close()
    found = {}
    for path in (tmp_path / "tensorboard").iterdir():
        events = EventAccumulator(str(path))
        events.Reload()
        found |= {event.step: event.value for event in events.Scalars("loss")}
    assert found == {1: 0.5, 3: 0.125}


def full():
    raise OSError(28, "full")
