"""`lockstep replay`: a step again has the numbers of the log and the bits of the checkpoint, on any number of ranks."""

import json
import re
import shutil

import pytest
import torch

from lockstep import Trainer
from lockstep.cli import application as cli
from lockstep.configs import config_file
from lockstep.core.errors import UsageError
from lockstep.trainer import earlier_configs
from lockstep.watch import replay_report
from lockstep.watch.replay_report import Wants
from tests import player_tasks, runs
from tests.own_tasks import Dropout, Masked
from tests.ranks import run_ranks
from tests.selection import mainly

SETTINGS = runs.config(
    train={"steps": 20},
    batch={"global": 24, "micro": 4},
    checkpoint={"every_steps": 10, "keep_last": 5},
    log={"every_steps": 5},
)


class Kept(Masked):
    """A task that the config names."""

    def __init__(self):
        super().__init__()


def trained_and_replayed(folder, strategy, step, wants):
    settings = SETTINGS | {"parallel": {"strategy": strategy}}
    Trainer(settings, run_dir=folder, quiet=True).fit(Masked())
    return replayed(folder, step, wants, settings)


def replayed(folder, step, wants, settings=SETTINGS):
    with Trainer(settings, run_dir=folder, quiet=True).replaying(step, Masked()) as (run, after):
        return replay_report.make(run, step, wants, after, tell=lambda text: None)


def logged(folder, step):
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(entry for entry in entries if entry["step"] == step and "train/loss" in entry)


@pytest.mark.parametrize(("ranks", "strategy"), mainly([(2, "ddp")], [(1, "ddp"), (2, "ddp"), (2, "fsdp"), (3, "ddp")]))
def test_a_step_again_is_the_same_bits_and_as_logged(ranks, strategy, tmp_path, capsys):
    wants = Wants(rank=ranks - 1, samples=True)
    report = run_ranks(ranks, trained_and_replayed, tmp_path / "run", strategy, 20, wants)[0]
    assert (report.began_at, [one.step for one in report.steps]) == (10, list(range(11, 21)))
    assert report.saved == "bitwise equal to checkpoint 20"
    entry = logged(tmp_path / "run", 20)
    assert (report.logged["train/loss"], report.logged_from) == (entry["train/loss"], 16)
    assert report.steps[-1].grad_norm == entry["train/grad_norm"]
    window = report.steps[-5:]
    mean = sum(one.loss * one.units["loss"] for one in window) / sum(one.units["loss"] for one in window)
    assert mean == pytest.approx(entry["train/loss"], rel=1e-14)
    assert "gradient norm: " in replay_report.text(report)

    again = replayed(tmp_path / "run", 20, Wants(), SETTINGS)  # on one rank
    note = f"note: the run was trained on {ranks} ranks, where random numbers"
    assert (note in capsys.readouterr().err) == (ranks > 1)
    assert again.steps[-1].loss == pytest.approx(report.steps[-1].loss, rel=1e-9)
    assert again.steps[-1].grad_norm == pytest.approx(entry["train/grad_norm"], rel=1e-9)


def test_with_virtual_ranks_a_step_again_has_the_same_bits_on_another_number_of_ranks(tmp_path):
    settings = SETTINGS | {"parallel": {"virtual_ranks": 3}, "log": {"every_steps": 1}}
    run_ranks(2, runs.fit_kind, "Masked", {}, settings, tmp_path / "run")
    for ranks in (1, 3):
        report = run_ranks(ranks, replayed, tmp_path / "run", 20, Wants(), settings)[0]
        assert report.saved == "bitwise equal to checkpoint 20"
        assert replay_report.text(report).count(", as logged") == 2
    report.logged["train/grad_norm"] *= 1 + 1e-15
    assert "With parallel.virtual_ranks it must be the same" in replay_report.text(report)


def test_with_virtual_ranks_the_parts_of_a_rank_are_those_of_its_virtual_ranks(tmp_path):
    settings = SETTINGS | {"parallel": {"virtual_ranks": 3}, "train": {"steps": 3}}
    run_ranks(2, runs.fit_kind, "Dropout", {}, settings, tmp_path / "run")
    found = {}
    for ranks in (1, 2, 3):
        reports = [again(tmp_path / "run", Wants(rank=rank, ranks=ranks), settings) for rank in range(ranks)]
        found[ranks] = [part for report in reports for part in report.parts]
    found["on two ranks"] = run_ranks(2, again, tmp_path / "run", Wants(rank=0, ranks=1), settings)[1].parts
    assert found[1] == found[2] == found[3] == found["on two ranks"]
    assert [part.name for part in found[1]] == [f"virtual rank {n}, micro-batch {m}" for n in range(3) for m in (0, 1)]
    step = reports[0].steps[-1]
    total = sum(part.loss["loss"] * sum(part.units.values()) for part in found[1])
    assert total / sum(step.units.values()) == pytest.approx(step.loss, rel=1e-6)  # dropout is that of the step
    with pytest.raises(UsageError, match="4 ranks cannot share 3 virtual ranks"):
        again(tmp_path / "run", Wants(rank=0, ranks=4), settings)


def again(folder, wants, settings):
    """On ranks: step 2 of a task with dropout."""
    with Trainer(settings, run_dir=folder, quiet=True).replaying(2, Dropout()) as (run, after):
        return replay_report.make(run, 2, wants, after, tell=lambda text: None)


def test_parts_of_a_step_add_up_to_the_step_by_plain_torch(tmp_path):
    """The ranks' micro-batches and the samples have the losses and gradient norms that plain torch computes."""
    reports = [trained_and_replayed(tmp_path / "run", "ddp", 15, Wants(rank=0, ranks=2, samples=True))]
    reports.append(replayed(tmp_path / "run", 15, Wants(rank=1, ranks=2)))
    parts = [part for report in reports for part in report.parts]
    assert [len(report.parts) for report in reports] == [3, 3]
    step = reports[0].steps[-1]
    total = sum(part.loss["loss"] * part.units["loss"] for part in parts if part.loss)
    assert total / step.units["loss"] == pytest.approx(step.loss, rel=1e-12)

    with Trainer(SETTINGS, run_dir=tmp_path / "run", quiet=True).replaying(15, task := Masked()) as (run, _):
        from lockstep.watch import replay

        for made in replay.steps(run, 14):
            assert made.step <= 14
        model, data = run.model, task.train_data()
        for part in reports[0].samples:
            if not part.loss:
                continue
            model.zero_grad()
            batch = [tensor[None] for tensor in data[part.indices[0]]]
            loss = task.loss(model, batch) / batch[2].sum()
            loss.backward()
            norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
            assert part.loss["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
            assert part.grad_norm == pytest.approx(float(norm), rel=1e-12)
    losses = [sum(part.loss.values()) for part in reports[0].samples if part.loss]
    assert losses == sorted(losses, reverse=True)
    assert {index for part in reports[0].samples for index in part.indices} == {
        i for part in parts for i in part.indices
    }


def test_steps_of_players_are_made_again_as_logged(tmp_path):
    """Each player has its own losses, and some players have no turn in a step."""
    settings = SETTINGS | {
        "train": {"steps": 8},
        "checkpoint": {"every_steps": 4, "keep_last": 5},
        "log": {"every_steps": 2},
    }
    for kind in ("Critics", "Taught"):
        task, folder = getattr(player_tasks, kind), tmp_path / kind
        runs.fit(task(), settings, folder)
        with Trainer(settings, run_dir=folder, quiet=True).replaying(8, task()) as (run, after):
            wants = Wants(rank=1, ranks=2, samples=True)
            report = replay_report.make(run, 8, wants, after, tell=lambda text: None)
        assert report.saved == "bitwise equal to checkpoint 8", kind
        text = replay_report.text(report)
        loss = re.search(r"  loss: \S+ (as logged|logged \S+ (\d+e-1[5-7]) apart)", text)
        assert loss, text
        turns = {tuple(one.by_head) for one in report.steps}
        expected = {("discriminator",), ("discriminator", "generator")} if kind == "Critics" else {("student",)}
        assert turns == expected, kind
        assert [len(part.indices) for part in report.samples] == [1] * 24, kind
        assert report.parts, kind
        assert all(part.grad_norm > 0 for part in report.parts if part.loss), kind


def test_steps_before_a_change_of_the_config_are_made_again_with_the_config_of_then(tmp_path, monkeypatch, capsys):
    """The new rate accused the run: the state had other bits than its checkpoint."""
    folder, task = tmp_path / "run", f"{__file__}:Kept"

    def fit(steps, rate, allow=()):
        settings = SETTINGS | {"task": {"kind": task}, "train": {"steps": steps}}
        settings["optim"] = SETTINGS["optim"] | {"lr": rate}
        Trainer(settings, run_dir=folder, quiet=True, allow_change=allow).fit()
        return settings

    fit(10, 0.01)
    fit(20, 0.02, ["optim.lr"])
    settings = fit(30, 0.03, ["optim.lr"])
    for step, rate in ((6, 0.01), (10, 0.01), (20, 0.02), (30, 0.03)):
        monkeypatch.setattr("sys.argv", ["lockstep", "replay", str(folder), "--step", str(step)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr().out
        assert ended.value.code == 0, shown
        assert f"  {rate}\n" in shown, (step, shown)
        assert f"bitwise equal to checkpoint {step}" in shown or step == 6, (step, shown)
        assert "logged" not in shown.replace("as logged", "") or "e-1" in shown or step == 6, shown
    with pytest.raises(UsageError, match=r"step 20 was made with a different config: optim\.lr: 0\.02 then, 0\.03 now"):
        replayed(folder, 20, Wants(), settings)
    shutil.rmtree(folder / "checkpoints" / "step-00000010")
    with pytest.raises(UsageError, match="the config changed after step 10, and the nearest checkpoint before step 15"):
        replayed(folder, 15, Wants(), settings)
    shutil.rmtree(folder / "checkpoints" / "step-00000030")
    shutil.rmtree(folder / "checkpoints" / "step-00000020")
    assert sorted(path.name for path in (folder / "configs").iterdir()) == [
        "until-00000010.yaml",
        "until-00000020.yaml",
    ]


def test_configs_of_steps_that_are_made_again_are_let_go_of(tmp_path):
    def config(rate):
        return config_file.parse(SETTINGS | {"optim": {"lr": rate}}, needs_task=False)

    def start(step, rate):
        earlier_configs.keep(tmp_path, config(rate), step)
        (tmp_path / "config.yaml").write_text(config_file.to_yaml(config(rate)))

    for step, rate in ((0, 0.1), (50, 0.1), (100, 0.2), (200, 0.3), (50, 0.3), (60, 0.3)):
        start(step, rate)  # after 200 steps, the run went on from the checkpoint of step 50
    assert [earlier_configs.of_step(tmp_path, step).optim.lr for step in (1, 50, 51, 100, 150, 300)] == [
        0.1, 0.1, 0.3, 0.3, 0.3, 0.3,
    ]  # fmt: skip
    start(0, 0.5)
    assert earlier_configs.of_step(tmp_path, 1).optim.lr == 0.5
    assert not list((tmp_path / "configs").iterdir())


def test_a_step_that_the_run_does_not_have_is_an_error_with_the_steps_that_it_has(tmp_path):
    runs.fit(Masked(), SETTINGS, tmp_path / "run")
    for step in (0, 21):
        with pytest.raises(UsageError, match="the run has the steps 1 to 20"):
            replayed(tmp_path / "run", step, Wants())


def test_nothing_in_the_folder_of_the_run_changes(tmp_path):
    runs.fit(Masked(), SETTINGS, tmp_path / "run")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (tmp_path / "run").rglob("*")}
    replayed(tmp_path / "run", 20, Wants())
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.exhaustive
def test_the_command_shows_a_step_and_writes_numbers_and_a_trace(tmp_path, monkeypatch, capsys):
    settings = [
        "train.epochs=null",
        "train.min_steps=null",
        "train.steps=4",
        "train.eval_every_epochs=null",
        "log.pictures=0",
    ]
    monkeypatch.setattr("sys.argv", ["lockstep", "train", "digits", *settings, "--run-dir", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    files = [str(tmp_path / name) for name in ("step.json", "trace.json")]
    options = ["--step", "4", "--samples", "--json", files[0], "--profile", files[1]]
    monkeypatch.setattr("sys.argv", ["lockstep", "replay", str(tmp_path / "run"), *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "this state: bitwise equal to checkpoint 4" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "step.json").read_text())["samples"]) == 64
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "a run has many steps"),
        (["--step", "5", "--json", "nowhere/x.json"], "cannot be written: there is no such folder"),
        (["--step", "5", "--profile", "nowhere/x.json"], "cannot be written: there is no such folder"),
        (["--step", "5", "--profile", "config.yaml"], "the run has such a file, which would be lost"),
        (["--step", "5", "--json", "./config.yaml"], "the run has such a file, which would be lost"),
        (["--step", "5", "--json", "."], "is a folder"),
        (["--step", "5", "--ranks", "2"], "it says how many ranks there were for --rank"),
        (["--step", "5", "--debugger", "--nproc", "2"], "a debugger needs one rank"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_computed(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("name: mine\n")
    monkeypatch.setattr("sys.argv", ["lockstep", "replay", str(tmp_path), *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert (tmp_path / "config.yaml").read_text() == "name: mine\n"
    assert says in capsys.readouterr().err


def test_a_rank_that_the_run_did_not_have_is_an_error(tmp_path):
    runs.fit(Masked(), SETTINGS, tmp_path / "run")
    with pytest.raises(UsageError, match="there is no rank 2 among 2 ranks"):
        replayed(tmp_path / "run", 20, Wants(rank=2, ranks=2))
