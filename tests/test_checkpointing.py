"""What runs save, keep, resume from, refuse to resume from, and export."""

import json
import re
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import lockstep.trainer.assemble
from lockstep import LockstepError, Trainer
from lockstep.configs import config_file
from lockstep.core import resume
from lockstep.core.checkpoint import files, store
from lockstep.core.errors import DataError
from lockstep.core.parallel import stop_consensus
from lockstep.trainer import run_record
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly


def saved(run_dir):
    """Everything in the newest checkpoint."""
    newest = store.listed(run_dir / "checkpoints")[0]
    return newest.step, dict(files.read(newest.path, newest.index)), newest.values


def same(one, other):
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][k], other[1][k]) for k in one[1])
        and one[2] == other[2]
    )


# ---- the step, the weights, the optimizer and the loss scale are all there is


TRAININGS = [
    ("Masked", {"schedule": {"name": "one_cycle"}, "optim": {"clip_norm": 0.5}}),
    ("Dropout", {"optim": {"name": "SGD", "args": {"momentum": 0.9}}, "train": {"ema_decay": 0.9}}),
    ("Single", {"precision": "fp16", "optim": {"name": "Adagrad"}}),
]
OTHERS_COVER = (
    ("Masked", 1),
    ("Masked", 2),
    ("Masked", 3),
    ("Dropout", 1),
    ("Dropout", 2),
    ("Single", 2),
    ("Single", 3),
)


def trainings():
    """On one rank and on several each."""
    for kind, settings in TRAININGS:
        for world in (1, 2, 3):
            yield pytest.param(
                world,
                kind,
                settings,
                marks=pytest.mark.exhaustive if (kind, world) in OTHERS_COVER else (),
                id=f"{kind}-{world}",
            )


@pytest.mark.parametrize(("world", "kind", "settings"), list(trainings()))
def test_run_that_goes_on_from_a_checkpoint_ends_bitwise_like_one_that_was_never_stopped(
    tmp_path, world, kind, settings
):
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
        for steps, _ in run_ranks(
            world, rank_cases.ledger, tmp_path / "run", settings | {"train": {"steps": stop}}, {"length": 100}
        ):
            for step, indices in steps:
                used.setdefault(step, []).extend(indices)
    undisturbed = {}
    for steps, _ in run_ranks(1, rank_cases.ledger, tmp_path / "one", settings, {"length": 100}):
        for step, indices in steps:
            undisturbed.setdefault(step, []).extend(indices)
    assert {step: sorted(indices) for step, indices in used.items()} == {
        step: sorted(indices) for step, indices in undisturbed.items()
    }
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

    settings = runs.config(train={"steps": 20, "eval_every_steps": 10, "ema_decay": 0.6})  # 0.6 counts from 13 on
    task = own_tasks.Plain(length=120, eval_length=30)
    _, results = runs.fit(task, settings, tmp_path)
    torch.manual_seed(0)
    model = own_tasks.Plain(length=120, eval_length=30).model()

    def average(averages, current, count):  # the count is 1 at the first update, because torch counts the copy too
        get_ema_multi_avg_fn(min(0.6, (1 + int(count)) / (10 + int(count))))(averages, current, count)

    averaged = AveragedModel(model, multi_avg_fn=average)
    averaged.update_parameters(model)  # the first only copies
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    data = task.train_data().tensors
    for step in range(20):
        indices = own_tasks_order(120, step)
        optimizer.zero_grad()
        (task.loss(model, [tensor[indices] for tensor in data]) / 24).backward()
        optimizer.step()
        averaged.update_parameters(model)
    file = Trainer(settings, run_dir=tmp_path, quiet=True).export(tmp_path / "out", task, program=False)
    found = load_file(file)
    expected = averaged.module.state_dict()
    assert runs.difference(found, expected) < 1e-12
    batch = task.eval_data().tensors
    assert results["eval/loss"] == pytest.approx(task.loss(averaged.module, batch).item() / len(batch[0]), rel=1e-9)
    assert Trainer(settings, run_dir=tmp_path, quiet=True).evaluate(task)["loss"] == results["eval/loss"]
    assert "averages of the weights (train.ema_decay=0.6), not the weights" in (tmp_path / "train.log").read_text()


class Indexed(own_tasks.Plain):
    """Frozen indices and flags, and a frozen scale that moves in forward, beside what trains."""

    def model(self):
        class Model(torch.nn.Sequential):
            def forward(self, inputs):
                if self.training:
                    with torch.no_grad():
                        self.scale.add_(0.25)
                return super().forward(inputs[:, self.indices]) * self.scale

        model = Model(super().model())
        model.indices = torch.nn.Parameter(torch.arange(10).flip(0), requires_grad=False)
        model.flags = torch.nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        model.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
        return model


def test_frozen_indices_and_weights_that_forward_moves_are_exported_as_they_are(tmp_path):
    """Averages of indices 7, 11, 13 were 6, 10, 12."""
    settings = runs.config(train={"steps": 6, "ema_decay": 0.9})
    for world, strategy in ((1, "single"), (2, "ddp")):
        folder = tmp_path / strategy
        cut = settings | {"train": settings["train"] | {"steps": 3}, "parallel": {"strategy": strategy}}
        run_ranks(world, runs.fit, Indexed(), cut, folder)
        weights, _ = run_ranks(world, runs.fit, Indexed(), cut | {"train": settings["train"]}, folder)[0]
        exported = load_file(Trainer(cut, run_dir=folder, quiet=True).export(folder / "out", Indexed(), program=False))
        index = json.loads((folder / "checkpoints" / "step-00000006" / "index.json").read_text())["tensors"]
        for name in ("indices", "flags", "scale"):
            assert torch.equal(exported[name], weights[name]), (strategy, name)
            assert f"ema.{name}" in index, strategy
        assert weights["scale"] == 1 + 6 / 4, strategy
        trained = exported.keys() - {"indices", "flags", "scale"}
        assert all(not torch.equal(exported[name], weights[name]) for name in trained), strategy


def own_tasks_order(length, step, batch=24):
    import numpy as np

    from lockstep.core.data.order import permute

    epoch, within = divmod(step, length // batch)
    return torch.from_numpy(permute(np.arange(within * batch, (within + 1) * batch), length, 0, epoch))


# ---- starting from weights


def test_training_starts_from_exported_weights_and_names_what_does_not_fit(tmp_path):
    first, _ = runs.fit(own_tasks.Plain(), runs.config(train={"steps": 3}), tmp_path / "first")
    trainer = Trainer(runs.config(), run_dir=tmp_path / "first", quiet=True)
    trainer.export(tmp_path / "weights", own_tasks.Plain(), program=False)
    settings = runs.config(
        train={"steps": 1, "init_from": str(tmp_path / "weights")}, optim={"lr": 1e-30, "weight_decay": 0.0}
    )
    second, _ = runs.fit(own_tasks.Plain(), settings, tmp_path / "second")
    assert runs.difference(second, first) < 1e-12

    class Other(own_tasks.Plain):
        def model(self):
            self.built = torch.nn.Sequential(
                torch.nn.Linear(10, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5, bias=False)
            ).double()
            return self.built

    with pytest.raises(LockstepError, match=r"train\.init_from: .*unknown to the model: 2\.bias"):
        runs.fit(Other(), settings, tmp_path / "third")


# ---- what stays


def test_last_best_and_every_nth_are_kept(tmp_path):
    keep = {"every_steps": 2, "keep_last": 2, "keep_every_steps": 10, "keep_best": "min eval/loss"}
    settings = runs.config(train={"steps": 30, "eval_every_steps": 5}, checkpoint=keep, optim={"lr": 0.3})
    runs.fit(own_tasks.Plain(eval_length=20), settings, tmp_path)
    evaluated = [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "eval/loss" in line
    ]
    best = min(evaluated, key=lambda entry: entry["eval/loss"])["step"]
    steps = {one.step for one in store.listed(tmp_path / "checkpoints")}
    assert steps == {10, 20, 30, 28, best}


def test_unknown_metric_to_keep_by_is_named(tmp_path):
    settings = runs.config(train={"steps": 4, "eval_every_steps": 2}, checkpoint={"keep_best": "max eval/acc"})
    with pytest.raises(LockstepError, match=r"checkpoint\.keep_best: there is no metric eval/acc.*\n.*eval/loss"):
        runs.fit(own_tasks.Plain(eval_length=20), settings, tmp_path)
    with pytest.raises(LockstepError, match="keep_best"):
        Trainer(runs.config(checkpoint={"keep_best": "eval/loss"}))


# ---- when


class Ticking(stop_consensus.StopConsensus):
    """A clock that goes on by a minute with each step."""

    calls = 0

    @property
    def elapsed_s(self):
        return 60.0 * self.calls

    def __call__(self):
        self.calls += 1
        return super().__call__()


def fit_ticking(kind, settings, folder):
    """Steps that are kept in the end."""
    kept, lockstep.trainer.assemble.StopConsensus = lockstep.trainer.assemble.StopConsensus, Ticking
    try:
        runs.fit_kind(kind, {}, settings, folder)
    finally:
        lockstep.trainer.assemble.StopConsensus = kept
    return [one.step for one in store.listed(folder / "checkpoints")]


def test_a_checkpoint_is_due_every_so_many_minutes_or_steps_and_changes_no_result(tmp_path):
    settings = runs.config(checkpoint={"keep_last": 99})
    minutes = settings | {"checkpoint": {"keep_last": 99, "every_minutes": 6.0}}
    never = settings | {"checkpoint": {"keep_last": 99, "every_minutes": None}}
    both = settings | {"checkpoint": {"keep_last": 99, "every_minutes": 6.0, "every_steps": 4}}
    assert fit_ticking("Plain", settings, tmp_path / "default") == [
        20,
        11,
    ]  # every ten minutes, seen after a step, saved after the next
    assert fit_ticking("Plain", minutes, tmp_path / "minutes") == [20, 14, 7]
    assert fit_ticking("Plain", never, tmp_path / "never") == [20]
    assert fit_ticking("Plain", both, tmp_path / "both") == [20, 16, 12, 8, 4]
    states = [saved(tmp_path / name) for name in ("default", "minutes", "never", "both")]
    assert all(same(states[0], state) for state in states)


@pytest.mark.exhaustive
def test_ranks_save_at_the_same_steps_by_the_clock_and_it_changes_no_result(tmp_path):
    settings = runs.config(checkpoint={"keep_last": 99, "every_minutes": 6.0}, parallel={"strategy": "fsdp"})
    never = settings | {"checkpoint": {"keep_last": 99, "every_minutes": None}}
    assert run_ranks(3, fit_ticking, "Deep", settings, tmp_path / "clock") == [[20, 14, 7]] * 3
    run_ranks(3, fit_ticking, "Deep", never, tmp_path / "never")
    assert same(saved(tmp_path / "clock"), saved(tmp_path / "never"))


# ---- evaluations that fail


class Evaluated(own_tasks.Classes):
    """Its `fails_at`-th evaluation after a step raises `error`; with 0, one before any step."""

    def __init__(self, fails_at=None, error=None):
        super().__init__()
        self.fails_at, self.error, self.evaluations, self.trained = fails_at, error or ValueError("bad label"), 0, False

    def loss(self, model, batch):
        self.trained |= model.training
        return super().loss(model, batch)

    def metrics(self):
        self.evaluations += self.trained
        if self.evaluations == self.fails_at:
            raise self.error
        return super().metrics()


EVALUATING = runs.config(train={"steps": 12, "eval_every_steps": 4}, checkpoint={"keep_last": 9, "every_minutes": None})


@pytest.mark.parametrize("mode", mainly(["async"], ["async", "sync"]))
@pytest.mark.parametrize(("fails_at", "kept"), mainly([(1, [4]), (3, [12, 4])], [(1, [4]), (2, [8, 4]), (3, [12, 4])]))
def test_what_was_trained_is_saved_where_an_evaluation_fails(tmp_path, mode, fails_at, kept):
    settings = EVALUATING | {"checkpoint": {"keep_last": 9, "mode": mode}}
    with pytest.raises(ValueError, match="bad label") as caught:
        runs.fit(Evaluated(fails_at), settings, tmp_path)
    assert caught.value.__notes__ == [
        f"The checkpoint of step {kept[0]} is saved, and the same command resumes from there"
    ]
    found = store.listed(tmp_path / "checkpoints")
    assert [one.step for one in found] == kept
    assert [store.check(one) for one in found] == [[]] * len(found)
    assert found[0].metrics == {}
    _, results = runs.fit(Evaluated(), settings, tmp_path)  # resumes from there, and evaluates what was left out
    evaluated = [
        json.loads(line)["step"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
        if "eval/loss" in line
    ]
    assert evaluated == [4, 8, 12]
    assert store.listed(tmp_path / "checkpoints")[0].metrics["eval/accuracy"] == results["eval/accuracy"]


def test_an_error_of_ours_says_too_what_is_saved(tmp_path):
    with pytest.raises(
        DataError, match=r"broken file\n  remedy: repair it\. The checkpoint of step 4 is saved, and the same command"
    ):
        runs.fit(Evaluated(1, DataError("broken file", remedy="repair it")), EVALUATING, tmp_path)
    with pytest.raises(
        DataError, match=r"broken file\n  remedy: The checkpoint of step 4 is saved"
    ):  # also where a start begins with it
        runs.fit(Evaluated(0, DataError("broken file")), EVALUATING, tmp_path)


@rank_cases.impatient()
def fit_failing_evaluation(folder):
    found = []
    for strategy in ("ddp", "fsdp"):
        try:
            runs.fit(Evaluated(1), EVALUATING | {"parallel": {"strategy": strategy}}, folder / strategy)
        except (ValueError, LockstepError) as error:  # its own, or the one of the rank that was first
            found.append(f"{error} {getattr(error, '__notes__', '')}")
    return found


def test_ranks_have_saved_what_they_fail_to_evaluate(tmp_path):
    for answers in run_ranks(2, fit_failing_evaluation, tmp_path):
        assert len(answers) == 2
        assert all("bad label" in answer and "The checkpoint of step 4 is saved" in answer for answer in answers)
    for strategy in ("ddp", "fsdp"):
        (found,) = store.listed(tmp_path / strategy / "checkpoints")
        assert (found.step, found.metrics, store.check(found)) == (4, {}, [])


def test_the_best_by_an_evaluation_that_came_after_a_restart_stays(tmp_path):
    """A kill between the commit and the evaluation: the metrics are added by the next start, and decide what stays."""
    settings = runs.config(
        train={"steps": 12, "eval_every_steps": 4},
        checkpoint={"keep_last": 1, "keep_best": "min eval/loss"},
        optim={"lr": 1e-9},
    )

    class Killed(Evaluated):
        def loss(self, model, batch):
            if self.trained and not model.training:
                raise KeyboardInterrupt
            return super().loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        runs.fit(Killed(), settings, tmp_path)
    (found,) = store.listed(tmp_path / "checkpoints")
    assert (found.step, found.metrics) == (4, {})
    runs.fit(
        Evaluated(), settings | {"optim": {**settings["optim"], "weight_decay": 0.1}}, tmp_path, allow_change=["task"]
    )
    found = store.listed(tmp_path / "checkpoints")
    best = min(found, key=lambda one: one.metrics["eval/loss"])
    assert found[0].step == 12
    assert len(found) == len({12, best.step})
    evaluated = [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "eval/loss" in line
    ]
    assert [entry["step"] for entry in evaluated] == [4, 8, 12]
    assert best.metrics["eval/loss"] == min(entry["eval/loss"] for entry in evaluated)


# ---- what is refused


def test_changed_key_may_be_allowed_by_name(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    changed = runs.config(train={"steps": 8}, optim={"lr": 0.5, "clip_norm": 1.0})
    with pytest.raises(
        LockstepError, match=r"optim\.clip_norm: None there, 1\.0 here\n    optim\.lr: 0\.01 there, 0\.5 here"
    ):
        runs.fit(own_tasks.Plain(), changed, tmp_path)
    with pytest.raises(LockstepError, match=r"optim\.clip_norm") as caught:
        Trainer(changed, run_dir=tmp_path, allow_change=["optim.lr"], quiet=True).fit(own_tasks.Plain())
    assert "optim.lr:" not in str(caught.value)
    with pytest.raises(LockstepError, match=r"did you mean optim\.lr"):
        Trainer(changed, run_dir=tmp_path, allow_change=["optim.lrr"], quiet=True).fit(own_tasks.Plain())
    assert Trainer(changed, run_dir=tmp_path, allow_change=["optim"], quiet=True).fit(own_tasks.Plain())["step"] == 8
    assert (
        runs.fit(own_tasks.Plain(), changed | {"train": {"steps": 9}}, tmp_path)[1]["step"] == 9
    )  # it is the run's now


def test_a_change_that_fails_leaves_the_run_as_it_was(tmp_path, monkeypatch):
    """The record changes when the state is loaded and all checks are made. Until then the old command goes on."""

    class Keeping(own_tasks.Plain):
        def setup(self, folder, trained):
            folder.mkdir(exist_ok=True)
            (folder / f"{type(self).__name__}.txt").write_text(f"{trained}")
            if isinstance(self, Wide):
                (folder / "Keeping.txt").unlink()

    class Wide(Keeping):
        def model(self):
            return torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Linear(7, 5)).double()

    def record():
        parts = [tmp_path / name for name in ("config.yaml", "environment.json")]
        parts += [path for name in ("source", "task") for path in sorted((tmp_path / name).rglob("*"))]
        return {path: path.read_text() for path in parts}

    settings = runs.config(train={"steps": 4}, schedule={"name": "cosine"})
    runs.fit(Keeping(), settings, tmp_path)
    runs.fit(Keeping(), settings, tmp_path)  # the task was trained when this start set it up
    before = record()
    assert tmp_path / "task/Keeping.txt" in before
    changed = {**settings, "optim": {**settings["optim"], "lr": 0.5}}
    best = {"checkpoint": {"keep_best": "max eval/none"}, "train": {"steps": 4, "eval_every_steps": 2}}
    for task, other, allowed, text in (
        (Wide(), changed, ["optim", "task"], "tensors differ from the model's"),
        (Keeping(), {**changed, "train": {"steps": 8}}, ["optim"], "the cosine schedule had 4 steps"),
        (Keeping(), {**changed, **best}, ["optim"], "the evaluation data set is empty"),
    ):
        with pytest.raises(LockstepError, match=text):
            runs.fit(task, other, tmp_path, allow_change=allowed)
        assert record() == before, text
        assert not list(tmp_path.glob(".task*"))

    # Killed before it has gone on: the next start puts back what the task kept.
    shutil.copytree(tmp_path / "task", tmp_path / ".task-before")
    (tmp_path / "task/Keeping.txt").unlink()
    runs.fit(Keeping(), settings, tmp_path)
    assert (tmp_path / "task/Keeping.txt").read_text() == "True"

    # Killed between two files of the record: the same command goes on.
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    for place in ("to_yaml", None):
        with monkeypatch.context() as patch:
            patch.setattr(config_file if place else run_record, place or "write_environment", kill)
            with pytest.raises(Killed):
                runs.fit(Renamed(), changed, tmp_path, allow_change=["optim", "task"])
    runs.fit(Renamed(), changed, tmp_path, allow_change=["optim", "task"])
    runs.fit(Renamed(), changed, tmp_path)


class Renamed(own_tasks.Plain):
    """A task with other code than `Plain`."""


def test_other_training_data_are_refused(tmp_path):
    runs.fit(own_tasks.Plain(length=50), runs.config(train={"steps": 4}), tmp_path)
    with pytest.raises(LockstepError, match="50 samples then, 60 now"):
        runs.fit(own_tasks.Plain(length=60), runs.config(), tmp_path)

    class Altered(own_tasks.Plain):
        def train_data(self):
            data = super().train_data()
            data.tensors[0][0] += 1
            return data

    then = SimpleNamespace(manifest={"data": {"samples": 50, "digest": "a"}}, path=tmp_path)
    resume._check_data(then, {"samples": 50, "digest": "a", "tokens of b.txt": "c"}, [])  # saved before these were
    with pytest.raises(LockstepError, match="samples differ"):
        runs.fit(Altered(length=50), runs.config(), tmp_path, allow_change=["task"])
    assert (
        Trainer(runs.config(), run_dir=tmp_path, allow_change=["data", "task"], quiet=True).fit(Altered(length=50))[
            "step"
        ]
        == 20
    )


@pytest.mark.parametrize("name", mainly(["__0_0.distcp"], ["__0_0.distcp", ".metadata", "index.json", "manifest.json"]))
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
            self.calls += model.training  # not those of the dry run
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if 8 <= self.calls <= 12 else before[0], before[1]))
            return super().loss(model, batch)

    settings = runs.config(checkpoint={"every_steps": 5, "mode": "sync"})
    try:
        with pytest.raises(
            LockstepError, match=r"1 checkpoint could not be written, the newest is of step 20.*step 10 could not"
        ):
            runs.fit(Limited(), settings, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.step for one in store.listed(tmp_path / "checkpoints")] == [20, 15, 5]
    assert "warning: the checkpoint of step 10 could not be written" in (tmp_path / "train.log").read_text()


def test_checkpoint_carries_results_of_its_own_step_only(tmp_path):
    """Evaluation results belong to their own step: a checkpoint between two evaluations has none."""
    settings = runs.config(train={"steps": 12, "eval_every_steps": 6}, checkpoint={"every_steps": 4, "keep_last": 9})
    runs.fit(own_tasks.Plain(eval_length=20), settings, tmp_path)
    assert {one.step: bool(one.metrics) for one in store.listed(tmp_path / "checkpoints")} == {
        4: False,
        6: True,
        8: False,
        12: True,
    }


def test_ranks_that_do_not_share_the_run_directory_are_named_before_anything_is_computed(tmp_path):
    for message in run_ranks(2, rank_cases.fit_in_a_folder_of_its_own, runs.config(), tmp_path):
        assert f"it is {tmp_path}/1 on rank 1" in message


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
                    return {"a": [1, object()]}

            self.built = Extra(10, 5, dtype=torch.float64)
            return self.built

        def loss(self, model, batch):
            raise AssertionError("it trained")

    with pytest.raises(LockstepError, match=r"_extra_state: .* cannot be saved: \['a'\]\[1\] is a builtins\.object"):
        runs.fit(Odd(), runs.config(), tmp_path)


def test_checkpoints_without_a_config_are_not_taken_for_anyones(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 4}), tmp_path)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(LockstepError, match=r"no config\.yaml"):
        runs.fit(own_tasks.Plain(), runs.config(seed=1), tmp_path)
