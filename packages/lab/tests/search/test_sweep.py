"""Sweeps with trainings that are functions of their values; then real ones, which are killed."""

import json
import os
import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep import locks
from lockstep.configs import config_file
from lockstep.core.checkpoint import manifest
from lockstep.core.errors import Preempted, TrainingError, UsageError
from lockstep_lab.search import grid, processes, study, sweep, sweep_page
from tests import processes as commands

KEYS = "keys:\n  optim.lr: {low: 1e-4, high: 0.1, log: true}\n  batch.global: [32, 64]\n"
AIM = "metric: eval/accuracy\ndirection: max\n"
EVALUATIONS = 4
QUICK = ["train.epochs=4", "train.eval_every_epochs=1", "device=cpu"]


class Killed(BaseException):
    """The sweep's process ends here."""


class FakeTraining:
    """Writes an evaluation at each look, as a training would, and goes on where the file ends."""

    def __init__(self, arguments, log, environment, result, ends=lambda keys, count: None):
        self.arguments = arguments
        self.keys = dict(one.split("=", 1) for one in arguments if "=" in one)
        self.folder, self.log, self.environment = Path(arguments[-1]), log, environment
        self.result, self.ends, self.asked = result, ends, False
        self.folder.mkdir(exist_ok=True)
        self.path = self.folder / "metrics.jsonl"

    def poll(self):
        count = len(self.path.read_text().splitlines()) if self.path.exists() else 0
        code = self.ends(self.keys, count)
        if code is not None:
            return code
        if self.asked:
            return 75
        if count == EVALUATIONS:
            return 0
        entry = {"step": 10 * (count + 1), **self.result(self.keys, count + 1)}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return None

    def stop(self):
        self.asked = True


def accuracy(keys, count):
    """Best near a rate of 0.01, and better with each evaluation."""
    rate = float(keys["optim.lr"])
    return {"eval/accuracy": 1 / (1 + abs(rate - 0.01) * 50) - 0.1 / count + 1e-4 * int(keys["batch.global"])}


class Run:
    """A folder with sweeps of fake trainings."""

    def __init__(self, folder, text=KEYS + AIM, overrides=QUICK, result=accuracy, ends=lambda keys, count: None):
        folder.mkdir(exist_ok=True)
        path = folder / "grid.yaml"
        path.write_text(text)
        self.config = config_file.load("digits", overrides)
        self.grid = grid.read(path, "digits", overrides, self.config)
        self.folder, self.overrides, self.result, self.ends = folder / "sweep", overrides, result, ends
        self.begun, self.lines, self.most, self.preset = [], [], 0, None

    def order(self, trials=12, parallel=1):
        return sweep.SweepRequest(
            "digits", self.overrides, self.config, self.grid, self.folder, trials, parallel, preset=self.preset
        )

    def go(self, pause=lambda: None, **options):
        """Run the sweep, and return its records."""
        order = self.order(**options)

        def start(arguments, log, environment):
            self.begun.append(FakeTraining(arguments, log, environment, self.result, self.ends))
            return self.begun[-1]

        with sweep.claimed(order):
            running = sweep.Sweep(order, start=start, tell=self.lines.append, pause=pause)

            def look():
                self.most = max(self.most, len(running.running))
                pause()

            running.pause = look
            running.run()
        return running.study.records()

    def records(self):
        return study.Study(self.folder, self.grid, 0).records()


def after(looks, act):
    """A pause that acts at one of the looks."""
    count = iter(range(10**6))

    def pause():
        if next(count) == looks:
            act()

    return pause


def die():
    raise Killed


def test_a_sweep_is_the_same_twice_also_where_it_was_killed(tmp_path):
    whole = Run(tmp_path / "whole")
    expected = whole.go()
    assert len(expected) == 12
    assert {one.state for one in expected} == {study.DONE, study.PRUNED}
    assert len({one.values["optim.lr"] for one in expected}) == 12
    broken = Run(tmp_path / "broken")
    for looks in (0, 3, 1, 9, 14, 2):
        with pytest.raises(Killed):
            broken.go(pause=after(looks, die))
        with (broken.folder / study.FILE).open("ab") as file:  # it was killed while it wrote
            file.write(b'{"op_code":5,"work')
    assert broken.go() == expected
    assert len({one.folder for one in broken.begun}) == 12
    count = len(broken.begun)
    assert broken.go() == expected  # nothing is left to do
    assert len(broken.begun) == count


def test_another_seed_draws_other_values(tmp_path):
    first = [one.values for one in Run(tmp_path / "a").go(trials=2)]
    assert first != [one.values for one in Run(tmp_path / "b", overrides=[*QUICK, "seed=1"]).go(trials=2)]


def test_a_bad_trial_is_pruned_by_its_evaluations_and_asked_to_stop(tmp_path):
    rates = [0.011, 0.012, 0.009, 0.0105, 0.01, 0.09, 0.0101]
    run = Run(tmp_path, f"sampler: grid\nkeys: {{optim.lr: {rates}, batch.global: [32]}}\n{AIM}")
    states = [one.state for one in run.go(trials=len(rates))]
    assert states == [study.DONE] * 5 + [study.PRUNED, study.DONE]
    pruned = run.begun[5]
    assert pruned.asked
    assert len(pruned.path.read_text().splitlines()) < EVALUATIONS
    assert any(line.startswith("trial 0005 pruned: eval/accuracy 0.1") for line in run.lines)


def test_a_trial_that_was_pruned_does_not_go_on_where_the_sweep_was_killed(tmp_path):
    rates = [0.011, 0.012, 0.009, 0.0105, 0.01, 0.09]
    run = Run(tmp_path, f"sampler: grid\nkeys: {{optim.lr: {rates}, batch.global: [32]}}\n{AIM}")
    with pytest.raises(Killed):
        run.go(trials=6, pause=lambda: die() if run.begun[-1].asked else None)
    assert run.records()[5].state == study.OPEN
    assert run.go(trials=6)[5].state == study.PRUNED
    assert len(run.begun) == 6


def test_a_grid_is_made_in_its_order_several_at_once(tmp_path):
    text = f"sampler: grid\npruner: none\nkeys: {{optim.lr: [0.1, 0.01], batch.global: [32, 64]}}\n{AIM}"
    run = Run(tmp_path, text)
    records = run.go(trials=4, parallel=3)
    assert [tuple(one.values.values()) for one in records] == [(0.1, 32), (0.1, 64), (0.01, 32), (0.01, 64)]
    assert run.most == 3
    assert {one.state for one in records} == {study.DONE}
    assert max(records, key=lambda one: one.value).values == {"optim.lr": 0.01, "batch.global": 64}


def test_the_result_is_that_of_the_weights_that_the_run_keeps(tmp_path):
    def peaks(keys, count):
        return {"eval/accuracy": [0.1, 0.9, 0.5, 0.4][count - 1]}

    text = f"keys: {{optim.lr: [0.1]}}\n{AIM}"
    assert Run(tmp_path / "last", text, result=peaks).go(trials=1)[0].value == 0.4
    kept = [*QUICK, "checkpoint.keep_best=max eval/accuracy"]
    assert Run(tmp_path / "best", text, kept, result=peaks).go(trials=1)[0].value == 0.9


def test_a_failure_is_noted_and_three_alike_end_the_sweep(tmp_path):
    def fails(keys, count):
        return 1 if float(keys["optim.lr"]) > 0.05 and count == 1 else None

    text = f"sampler: grid\nkeys: {{optim.lr: [0.09, 0.01, 0.08, 0.07, 0.06, 0.02]}}\n{AIM}"
    run = Run(tmp_path, text, [*QUICK, "batch.global=32"], ends=fails)
    (run.folder).mkdir()
    (run.folder / ".keep").touch()
    for number in range(6):
        message = f"step 1{number}\n[rank 0] error: step 1{number}, rank 0: the loss is nan\n  remedy: lower optim.lr\n"
        (run.folder / sweep.SPEC).write_text(json.dumps(run.order(trials=6).spec()))
        run.order().log_of(number).write_text(message)
    with pytest.raises(TrainingError, match="3 consecutive trials failed with the same error"):
        run.go(trials=6)
    assert [one.state for one in run.records()] == [study.FAILED, study.DONE] + [study.FAILED] * 3
    assert run.records()[0].error == "step 10, rank 0: the loss is nan\n  remedy: lower optim.lr"
    assert run.go(trials=6)[5].state == study.DONE  # the same command goes on


def test_a_full_disk_ends_the_sweep_and_its_trial_is_made_again(tmp_path, monkeypatch):
    codes = [1]
    run = Run(tmp_path, ends=lambda keys, count: codes.pop() if count == 1 and codes else None)
    run.order().folder.mkdir()
    run.order().log_of(0).write_text("error: checkpoints: step 4: [Errno 28] No space left on device\n")
    (run.folder / sweep.SPEC).write_text(json.dumps(run.order().spec()))
    with pytest.raises(TrainingError, match=r"trial 0000 failed on a full disk(.|\n)*free disk space"):
        run.go(trials=2)
    assert [one.state for one in run.records()] == [study.OPEN]
    assert [one.state for one in run.go(trials=2)] == [study.DONE, study.DONE]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(study.Open, "report", full)
    with pytest.raises(TrainingError, match="cannot be written: No space left on device"):
        run.go(trials=3)


def test_a_training_that_was_killed_goes_on_with_the_same_values(tmp_path):
    codes = [-9, -9]
    run = Run(tmp_path, ends=lambda keys, count: codes.pop() if count == 2 and codes else None)
    records = run.go(trials=1)
    assert records[0].state == study.DONE
    assert len(run.begun) == 3
    assert len({one.keys["optim.lr"] for one in run.begun}) == 1
    often = Run(tmp_path / "often", ends=lambda keys, count: -9 if count == 2 else None)
    assert often.go(trials=1)[0].error == "killed by signal 9"
    assert len(often.begun) == 4


def test_a_trial_that_has_a_checkpoint_goes_on_from_its_step(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(Killed):
        run.go(trials=1, pause=after(1, die))
    newest = run.folder / "trial-0000" / "checkpoints" / "step-00000020"
    newest.mkdir(parents=True)
    (newest / manifest.MANIFEST).write_text(manifest.signed({"step": 20, "files": {}, "metrics": {}}))
    run.go(trials=1)
    first, again, done = run.lines
    assert again == first.replace("starts", "resumes from step 20")
    assert "done" in done


def test_results_that_are_no_numbers_prune_without_a_warning(tmp_path):
    def diverges(keys, count):
        return {"eval/loss": None if keys["optim.lr"] == "0.09" else 1 / count}

    rates = [0.011, 0.012, 0.009, 0.0105, 0.01, 0.09]
    text = f"sampler: grid\nkeys: {{optim.lr: {rates}}}\nmetric: eval/loss\ndirection: min"
    records = Run(tmp_path, text, result=diverges).go(trials=6)
    assert [one.state for one in records] == [study.DONE] * 5 + [study.PRUNED]


def test_of_a_traceback_the_error_is_told_first(tmp_path):
    frames = [f'  File "a.py", line {number}' for number in range(40)]
    log = tmp_path / "log"
    log.write_text("\n".join(["step 1", "error: Traceback (frames are left out):", *frames, "KeyError: 'a'", "", "x"]))
    lines = processes.error_in(log).splitlines()
    assert (lines[0], lines[-1]) == ("KeyError: 'a'", frames[-1])
    assert processes.kind_of("\n".join(lines)) == "KeyError: 'a'"


def test_a_preset_is_that_of_each_trial_and_of_the_best(tmp_path):
    run = Run(tmp_path)
    run.preset = "local"
    run.go(trials=1)
    assert run.begun[0].arguments[-4:-2] == ["--preset", "local"]
    results = sweep_page.ranked(run.order(), study.Study(run.folder, run.grid, 0))
    told = sweep_page.command(results).split()
    assert told[3:-2] == [*QUICK, *grid.overrides_of(results.best.values), "--preset", "local"]


def test_a_signal_stops_all_trials_and_the_same_command_goes_on(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(Preempted, match="stopped by SIGTERM"):
        run.go(trials=4, parallel=2, pause=after(1, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert [one.asked for one in run.begun] == [True, True]
    before = run.records()
    assert {one.state for one in before} == {study.OPEN}
    records = run.go(trials=4, parallel=2)
    assert [one.values for one in records[:2]] == [one.values for one in before]
    assert {one.state for one in records} == {study.DONE}


def test_a_trial_that_something_else_stopped_stops_the_sweep(tmp_path):
    codes = [75]
    run = Run(tmp_path, ends=lambda keys, count: codes.pop() if count == 1 and codes else None)
    with pytest.raises(Preempted, match="another program stopped trial 0000"):
        run.go(trials=2)
    assert len(run.go(trials=2)) == 2


def test_a_metric_that_is_not_logged_ends_the_sweep_at_the_first_evaluation(tmp_path):
    run = Run(tmp_path, KEYS + "metric: eval/acuracy\ndirection: max")
    with pytest.raises(UsageError, match=r"no 'eval/acuracy'(.|\n)*did you mean eval/accuracy\?"):
        run.go(trials=3)
    assert len(run.begun) == 1
    assert run.begun[0].asked


def test_a_folder_of_something_else_is_refused(tmp_path):
    run = Run(tmp_path)
    run.go(trials=1)
    with (
        locks.locked(run.folder / ".lock", wait_s=0),
        pytest.raises(UsageError, match=r"a sweep is running there: process \d+"),
    ):
        run.go(trials=2)
    other = Run(tmp_path, overrides=[*QUICK, "optim.weight_decay=0.5"])
    with pytest.raises(UsageError, match=r"config: optim\.weight_decay: 0\.01 there, 0\.5 here"):
        other.go(trials=2)
    wider = Run(tmp_path, KEYS.replace("0.1", "0.2") + AIM)
    with pytest.raises(UsageError, match="a different sweep"):
        wider.go(trials=2)
    (run.folder / sweep.SPEC).unlink()
    with pytest.raises(UsageError, match="not a sweep's"):
        run.go(trials=2)


class Balanced(HTMLParser):
    """Each element is closed in its order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_the_table_and_the_best_config(tmp_path):
    run = Run(tmp_path)
    run.go()
    order = run.order()
    results = sweep_page.ranked(order, study.Study(run.folder, run.grid, 0))
    done = [one for one in results.records if one.state == study.DONE]
    assert [one.value for one in done] == sorted((one.value for one in done), reverse=True)
    first = sweep_page.table(results).splitlines()[1].split()
    assert first == [f"{done[0].number:04}", f"{done[0].values['optim.lr']:.4g}", str(done[0].values["batch.global"]),
                     f"{done[0].value:.4g}", "40", "done"]  # fmt: skip
    page, best = sweep_page.write(results)
    parser = Balanced()
    parser.feed(page.read_text())
    assert parser.open == []
    assert parser.seen.count("circle") == 2 * len(results.records)  # a dot for each trial and key
    text = best.read_text()
    assert text.splitlines()[-1] == f"# {sweep_page.command(results)}"
    assert config_file.load(str(best)) == config_file.load("digits", [*QUICK, *grid.overrides_of(done[0].values)])


def test_trainings_get_gpus_of_their_own(monkeypatch):
    monkeypatch.setattr("lockstep.core.devices.gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = processes.environments(2, 2, "auto")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in processes.environments(4, 1, "cuda")] == ["7", "5", "3", "1"]
    with pytest.raises(UsageError, match="need 6 GPUs, but there are 4"):
        processes.environments(3, 2, "auto")
    assert "CUDA_VISIBLE_DEVICES" not in processes.environments(2, 1, "cpu")[0]


# ---- real trainings


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_real_sweep_goes_on_after_a_signal(tmp_path, number):
    (tmp_path / "grid.yaml").write_text(f"sampler: random\npruner: none\n{KEYS}{AIM}")
    keys = ["train.epochs=6", "train.eval_every_epochs=1", "device=cpu", "log.pictures=0"]
    folder = tmp_path / "sweep"
    arguments = ["sweep", "digits", tmp_path / "grid.yaml", *keys, "--trials", "2", "--run-dir", folder]
    process = commands.start(*arguments)
    commands.wait_for(lambda: commands.has_logged(folder / "trial-0000"))
    os.kill(process.pid, number)
    _, errors = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 75
        assert "the same command resumes from there" in errors
    done = commands.lockstep(*arguments)
    assert done.returncode == 0, done.stderr
    assert "resuming" in (folder / "trial-0000.log").read_text()
    whole = commands.lockstep(*arguments[:-1], tmp_path / "whole")
    table = [one.split("written")[0].rpartition("done:")[2].partition("\n\n")[2] for one in (done.stdout, whole.stdout)]
    assert table[0] == table[1] != ""
