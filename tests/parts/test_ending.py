import json
from types import SimpleNamespace

import pytest

from lockstep import Trainer
from lockstep.core.stopping import StopRule
from lockstep.parts import ending
from tests import own_tasks, runs

RESULTS = [(10, 0.5, 0.8), (20, 0.3, 0.9), (30, 0.4, 0.95)]
"""Step, loss and accuracy of three evaluations."""


def text(folder, compared=None, kept=(20, 30), latest=None, since=0, rule=None, per_epoch=10):
    """The lines of a run of 30 steps in 3 epochs of 1,000 samples, which took 3700 s, 2 s of them in this start."""
    checkpoint = SimpleNamespace(keep_best=compared)
    run = SimpleNamespace(
        by_loop=False,
        config=SimpleNamespace(
            checkpoint=checkpoint,
            train=SimpleNamespace(stop_when=rule),
            task={"kind": "toy"},
        ),
        folder=folder,
        state=SimpleNamespace(step=30),
        plan=SimpleNamespace(steps_per_epoch=per_epoch, length=1000),
        first_step=since,
        stopping=SimpleNamespace(earlier_s=3698.0),
    )
    with pytest.MonkeyPatch.context() as patched:
        listed = [SimpleNamespace(step=step) for step in kept]
        patched.setattr(ending.manifest, "listed", lambda path: listed if path == folder / "checkpoints" else [])
        return ending.lines(run, latest or {}, 2.0)


@pytest.fixture
def run(tmp_path):
    entries = [{"step": step, "eval/loss": loss, "eval/accuracy": accuracy} for step, loss, accuracy in RESULTS]
    lines = [json.dumps({"step": 5, "train/loss": 1.0}), *map(json.dumps, entries), '{"step": 40, "eval/lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_one_epoch_is_an_epoch(run):
    assert text(run, per_epoch=30).startswith("done: 30 steps, 1 epoch, in ")


def test_the_end_names_last_and_best_results_with_their_steps(run):
    first, last, best, has, *following = text(run).splitlines()
    assert first == "done: 30 steps, 3 epochs, in 1 h 01 min, 1,500 samples/s with evaluations and saves"
    assert last == "last result, of step 30: loss 0.4  accuracy 0.95"
    assert best == "best result by min eval/loss, of step 20: loss 0.3  accuracy 0.9"
    assert has == f"{run} has: metrics.jsonl, checkpoints of steps 20, 30"
    assert f"next: lockstep report {run} " in following[0]
    assert f"lockstep predict {run} INPUT" in following[1]
    assert f"lockstep export {run} OUT " in following[2]


def test_of_equal_results_an_early_stop_names_the_first_and_keep_best_the_one_that_it_keeps(tmp_path):
    rows = [{"step": step, "eval/loss": loss} for step, loss in ((10, 0.5), (20, 0.3), (30, 0.3), (40, 0.3))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rule = StopRule(metric="eval/loss", mode="min", patience=2)
    assert "has not improved on 0.3 (step 20) for 2 evaluations" in rule.reason([0.5, 0.3, 0.3, 0.3], [10, 20, 30, 40])
    assert "best result by min eval/loss, of step 20: loss 0.3" in text(tmp_path, rule=rule)
    assert "best result by min eval/loss: the last" in text(tmp_path, "min eval/loss", rule=rule)


class Predicting(own_tasks.Masked):
    def predict(self, model, batch):
        return model(batch[0])


def test_a_script_that_gave_its_own_task_is_told_what_works_in_python(tmp_path):
    """No command can make the task. The printed lines are executed."""
    settings = runs.config(train={"steps": 2}, name="mine")
    task = Predicting(eval_length=24)
    trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    trainer.fit(task)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "lockstep predict" not in log
    assert "lockstep export" not in log
    lines = [line.strip() for line in log.splitlines() if line.strip().startswith("trainer.")]
    assert [line.partition("(")[0] for line in lines] == ["trainer.predict", "trainer.export"]
    found = [
        eval(line.replace("OUT", str(tmp_path / "out")), {"trainer": trainer, "task": task, "data": task.eval_data()})
        for line in lines
    ]
    assert len(found[0]) == 24
    assert found[1].is_file()


def test_the_speed_of_a_run_that_went_on_is_that_of_its_last_start(run):
    assert "in 1 h 01 min, 500 samples/s since step 20 with evaluations and saves" in text(run, since=20)


def test_a_best_result_without_its_checkpoint_names_the_key_that_keeps_it(run):
    assert "; its checkpoint was not kept: checkpoint.keep_best='min eval/loss' keeps it" in text(run, kept=(30,))
    assert "best result by max eval/accuracy: the last\n" in text(run, "max eval/accuracy", kept=(30,))


def test_a_run_without_metrics_file_has_its_last_result(tmp_path):
    lines = text(tmp_path, latest={"train/loss": 2.0, "eval/loss": 0.25}, kept=(), since=30).splitlines()
    assert lines == [
        "done: 30 steps, 3 epochs, in 1 h 01 min",
        "last result, of step 30: loss 0.25",
        f"{tmp_path} has: ",
    ]


def test_no_best_result_where_the_result_is_never_a_number_or_stands_alone(run):
    assert "best result" not in text(run, "min eval/other")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 10, "eval/loss": 0.5}))
    assert "best result" not in text(run)
