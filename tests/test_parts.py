"""Parts: their events, gradients, states, requests to end, and failures; and the examples of the page on Parts."""

import contextlib
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lockstep import LockstepError, Part, Trainer
from lockstep.core.checkpoint import manifest
from tests import own_tasks, part_cases, runs
from tests.ranks import RankFailed, run_ranks
from tests.selection import mainly

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "parts"


def entries(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log_of(folder):
    return (folder / "train.log").read_text()


def same(one, other):
    """Whether nested values are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


# ---- events


def test_events_come_in_their_order_and_change_nothing(tmp_path):
    settings = runs.config(train={"steps": 6, "eval_every_steps": 4}, log={"every_steps": 3})
    weights, _, (seen,) = part_cases.fit(tmp_path / "with", [part_cases.Recording()], settings)
    without, _, _ = part_cases.fit(tmp_path / "without", [], settings)
    assert same(weights, without)
    of_step = {step: [event for event, at in seen["seen"] if at == step] for step in range(7)}
    step = ["before_update", "after_step"]
    assert of_step == {
        0: ["start", "before_step"],
        1: [*step, "before_step"],
        2: [*step, "before_step"],
        3: [*step, "log_entry", "before_step"],
        4: [*step, "before_save", "after_evaluation", "before_step"],
        5: [*step, "before_step"],
        6: [*step, "log_entry", "before_save", "after_evaluation", "end"],
    }
    part = part_cases.Recording()
    part_cases.fit(tmp_path / "with", [part], settings)  # the run is complete
    assert part.seen == []


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_gradients_are_those_of_a_plain_loop(tmp_path, strategy):
    _, norms = runs.by_hand(own_tasks.Plain(), steps=8)
    settings = runs.config(train={"steps": 8}, parallel={} if strategy == "single" else {"strategy": strategy})
    for _, _, (found,) in run_ranks(
        1 if strategy == "single" else 2, part_cases.fit, tmp_path, [part_cases.Norms()], settings
    ):
        assert found["norms"] == pytest.approx(norms, rel=1e-9)


def test_numbers_of_a_part_are_in_the_entries_of_the_log(tmp_path):
    class Logs(Part):
        def after_step(self, training):
            training.log("own/step", torch.tensor(float(training.step)))

        def after_evaluation(self, training):
            training.log("own/evaluated", training.results["eval/loss"])

        def end(self, training):
            training.log("own/end", training.epoch)
            training.tell("this is the end")

    settings = runs.config(train={"steps": 6, "eval_every_steps": 4}, log={"every_steps": 3})
    _, results, _ = part_cases.fit(tmp_path, [Logs()], settings)
    found = [{key: value for key, value in entry.items() if key.startswith("own/")} for entry in entries(tmp_path)]
    evaluated = [entry["eval/loss"] for entry in entries(tmp_path) if "eval/loss" in entry]
    assert found == [
        {"own/step": 3},
        {"own/step": 4, "own/evaluated": evaluated[0]},
        {"own/step": 6},
        {"own/evaluated": evaluated[1]},
        {"own/end": 0.6},
    ]
    assert results["own/step"] == 6
    assert "this is the end" in log_of(tmp_path)


# ---- states


@pytest.mark.parametrize(("before", "after"), mainly([(2, 1)], [(1, 1), (2, 2), (2, 1)]))
def test_a_part_with_a_state_is_killed_and_goes_on_bit_for_bit(tmp_path, before, after):
    whole = run_ranks(before, part_cases.fit, tmp_path / "whole", [part_cases.Counting()])
    with pytest.raises(RankFailed):
        run_ranks(before, part_cases.fit, tmp_path / "run", [part_cases.Counting(kill=(before - 1, 13))])
    assert manifest.listed(tmp_path / "run" / "checkpoints")[0].step == 10
    resumed = run_ranks(after, part_cases.fit, tmp_path / "run", [part_cases.Counting()])
    assert resumed[0][2][0]["loaded"]["steps"] == list(range(1, 11))
    assert resumed[0][2][0]["loaded"]["bytes"] == b"\0\1"
    for weights, results, (state,) in resumed:
        expected = whole[0][2][0]
        assert same(state["steps"], expected["steps"])
        assert same(state["total"], expected["total"])
        assert same(
            state["loaded"]["losses"], {"of": expected["losses"]["of"][:2], "best": min(expected["losses"]["of"][:2])}
        )
        assert results["counting/total"] == whole[0][1]["counting/total"]
        if before == after:
            assert same(state["losses"], expected["losses"])
            assert same(weights, whole[0][0])
        else:  # another number of ranks adds in another order
            assert state["losses"]["of"] == pytest.approx(expected["losses"]["of"], rel=1e-9)


def test_what_a_part_learns_of_an_evaluation_is_in_the_checkpoint_that_was_saved_before_it(tmp_path):
    part_cases.fit(tmp_path, [part_cases.Counting()])
    longer = runs.config(train={"steps": 25, "eval_every_steps": 5}, checkpoint={"every_steps": 5})
    _, _, (state,) = part_cases.fit(tmp_path, [part_cases.Counting()], longer)
    assert len(state["loaded"]["losses"]["of"]) == 4
    assert len(state["losses"]["of"]) == 5


def test_states_that_nobody_takes_and_parts_without_a_state_are_told(tmp_path):
    part_cases.fit(tmp_path, [part_cases.Counting()])
    longer = runs.config(train={"steps": 22})
    part_cases.fit(tmp_path, [], longer)
    assert "note: the checkpoint's state of Counting is left out, because there is no Part of this name" in log_of(
        tmp_path
    )
    part_cases.fit(tmp_path, [part_cases.Counting()], runs.config(train={"steps": 24}))
    assert "note: the checkpoint has no state of the Part Counting, which starts from the beginning" in log_of(tmp_path)


def test_ranks_with_different_states_are_refused(tmp_path):
    error = run_ranks(2, part_cases.error_of, tmp_path, [part_cases.Uneven()])[0]
    assert "Uneven.state_dict, step 5: rank 1 has a different state from rank 0" in error
    assert "training.gather" in error


def test_a_state_that_cannot_be_saved_is_named(tmp_path):
    class Odd(Part):
        def state_dict(self):
            return {"a": [1, Part]}

    with pytest.raises(LockstepError, match=r"Odd.state_dict: the state cannot be saved: \['a'\]\[1\] is a "):
        part_cases.fit(tmp_path, [Odd()])


# ---- requests to end


@pytest.mark.parametrize(
    ("ranks", "event"),
    mainly(
        [(1, "log_entry"), (2, "after_evaluation")],
        [(1, "log_entry"), (2, "log_entry"), (2, "after_evaluation"), (2, "after_step")],
    ),
)
def test_one_rank_ends_the_training_on_all_ranks_after_the_same_step(tmp_path, ranks, event):
    part = part_cases.Asking(rank=ranks - 1, event=event)
    settings = runs.config(train={"eval_every_steps": 10}, log={"every_steps": 5 if event == "log_entry" else 10})
    for _, results, _ in run_ranks(ranks, part_cases.fit, tmp_path, [part], settings):
        assert results["step"] == 10
        assert "eval/loss" in results
    newest = manifest.listed(tmp_path / "checkpoints")[0]
    assert newest.step == 10
    assert newest.metrics
    assert f"the training ended at step 10 of 20: Asking: rank {ranks - 1} asked at step 10" in log_of(tmp_path)
    if (ranks, event) == (1, "log_entry") or event == "after_evaluation":
        (_, results, _), *_ = run_ranks(ranks, part_cases.fit, tmp_path, [part], settings)
        assert results["step"] == 10
        assert f"is complete at step 10: Asking: rank {ranks - 1} asked at step 10. Leave this Part out" in log_of(
            tmp_path
        )
        (_, results, _), *_ = run_ranks(ranks, part_cases.fit, tmp_path, [], settings)
        assert results["step"] == 20


def test_a_request_between_two_entries_ends_one_rank_at_this_step(tmp_path):
    settings = runs.config(train={"eval_every_steps": 20}, log={"every_steps": 10})
    _, results, _ = part_cases.fit(tmp_path, [part_cases.Asking(event="after_step", step=7)], settings)
    assert results["step"] == 7
    assert [entry["step"] for entry in entries(tmp_path)] == [7, 7]
    assert "eval/loss" in results
    assert manifest.listed(tmp_path / "checkpoints")[0].step == 7


# ---- failures


@pytest.mark.parametrize("ranks", mainly([1], [1, 2]))
def test_failure_of_a_required_part_names_it(tmp_path, ranks):
    with contextlib.suppress(RankFailed):  # the other rank is ended
        run_ranks(ranks, part_cases.error_of, tmp_path, [part_cases.Failing(rank=ranks - 1)])
    error = (tmp_path / f"error of rank {ranks - 1}").read_text()
    file = re.escape(part_cases.__file__)
    assert re.match(
        rf"step 7, rank {ranks - 1}, {file}:\d+: the Part Failing failed in after_step: KeyError: 'a reas", error
    )
    assert "required = False" in error


class Setting(Part):
    """Changes the optimizer in one way."""

    def __init__(self, change, required=True):
        self.change, self.required = change, required

    def after_step(self, training):
        groups = training.optimizer.param_groups
        if self.change == "group":
            new = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
            training.optimizer.add_param_group({"params": [new]})
        elif self.change == "params":
            groups[0]["params"].pop()
        else:
            groups[0][self.change] = 0.5


class SettingAndRaising(Setting):
    def after_step(self, training):
        super().after_step(training)
        raise RuntimeError("its own reason")


def test_a_part_that_changes_the_optimizer_is_named_with_the_remedy(tmp_path):
    """A rate that a Part set had no effect, another setting had; a new group was a KeyError of the schedule."""
    for change, words in {
        "lr": "it changed lr of the optimizer's group 'default' from 0.01 to 0.5. Learning rates are those of the sch",
        "weight_decay": "it changed weight_decay of the optimizer's group 'default' from 0.1 to 0.5.",
        "params": "it changed params of the optimizer's group 'default'.",
        "new": "it changed new of the optimizer's group 'default' from None to 0.5.",
        "group": "it added or removed groups of the optimizer. Let Task.model make all parameters",
    }.items():
        with pytest.raises(
            LockstepError, match=re.escape(f"the Part Setting failed in after_step: RuntimeError: {words}")
        ):
            part_cases.fit(tmp_path / change, [Setting(change)])
    line = Setting.after_step.__code__.co_firstlineno  # a Part that has returned is at no line; its method is
    with pytest.raises(LockstepError, match=re.escape(f"{__file__}:{line}: the Part Setting failed")):
        part_cases.fit(tmp_path / "line", [Setting("lr")])
    with pytest.raises(LockstepError, match="RuntimeError: its own reason"):
        part_cases.fit(tmp_path / "raising", [SettingAndRaising("lr")])
    plain = part_cases.fit(tmp_path / "plain", [])
    for change in ("weight_decay", "group"):  # a Part that is left out has changed nothing
        found = part_cases.fit(tmp_path / f"{change} left", [Setting(change, required=False)])
        assert same(found[0], plain[0]), change


def test_failure_of_another_part_is_one_warning_and_changes_nothing(tmp_path):
    without = run_ranks(2, part_cases.fit, tmp_path / "without", [])
    parts = [part_cases.Failing(rank=1, required=False), part_cases.Counting()]
    found = run_ranks(2, part_cases.fit, tmp_path / "with", parts)
    assert [of_rank[2][0]["calls"] for of_rank in found] == [20, 7]
    assert all(same(of_rank[0], without[0][0]) for of_rank in found)
    parts = [part_cases.Failing(rank=0, required=False), part_cases.Alone(required=False)]
    run_ranks(2, part_cases.fit, tmp_path / "alone", parts)
    log = log_of(tmp_path / "alone")
    assert log.count("the Part Failing failed in after_step: KeyError: 'a reason'; the training continues without") == 1
    assert log.count("the Part alone failed in after_step: RuntimeError: a Part with required=False may not comm") == 1


def test_a_part_with_a_state_that_fails_on_one_rank_is_not_saved_and_nobody_waits(tmp_path):
    for name, part, what in (
        (
            "fails",
            part_cases.Stateful(rank=1),
            "the Part has failed, or its state cannot be saved, on rank 1; its state is no longer saved",
        ),
        ("differs", part_cases.Stateful(rank=9, differs=True), "has a different state from rank 0 on rank 1"),
    ):
        settings = runs.config(checkpoint={"every_steps": 5})
        run_ranks(2, part_cases.fit, tmp_path / name, [part, part_cases.Counting()], settings)
        assert log_of(tmp_path / name).count(what) == 1
        kept = manifest.listed(tmp_path / name / "checkpoints")[-1].manifest["parts"]["states"]
        assert kept.keys() == {"Counting"}


class Unsaveable(Part):
    required = False

    def state_dict(self):
        return object()

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_that_cannot_be_saved_is_one_warning_where_the_part_is_not_required(tmp_path, ranks):
    run_ranks(ranks, part_cases.fit, tmp_path, [Unsaveable()], runs.config(checkpoint={"every_steps": 5}))
    assert (
        log_of(tmp_path).count("Unsaveable.state_dict, step 5: the Part has failed, or its state cannot be saved,") == 1
    )
    assert manifest.listed(tmp_path / "checkpoints")[-1].manifest["parts"]["states"] == {}


def test_what_is_no_number_is_not_logged(tmp_path):
    run_ranks(2, part_cases.fit, tmp_path, [part_cases.Vector()])
    text = (
        "the Part Vector failed in after_step: ValueError: log('own/vector') takes a number, and got a tensor of shape"
    )
    assert log_of(tmp_path).count(text) == 1


@pytest.mark.exhaustive
def test_a_part_that_exits_is_a_part_that_fails(tmp_path):
    without = run_ranks(2, part_cases.fit, tmp_path / "without", [])
    found = run_ranks(2, part_cases.fit, tmp_path / "with", [part_cases.Leaving(rank=1, required=False)])
    assert all(same(of_rank[0], without[0][0]) for of_rank in found)
    with contextlib.suppress(RankFailed):
        run_ranks(2, part_cases.error_of, tmp_path / "run", [part_cases.Leaving(rank=1)])
    error = (tmp_path / "run" / "error of rank 1").read_text()
    assert "step 7, rank 1" in error
    assert "the Part Leaving failed in after_step: SystemExit: 3" in error


@pytest.mark.parametrize("required", [True, False])
def test_a_part_that_leaves_the_model_in_evaluation_mode_is_named(tmp_path, required):
    class Evaluates(Part):
        def after_step(self, training):
            training.model.eval()

    part = Evaluates()
    part.required = required
    task = own_tasks.Dropout()
    trainer = Trainer(runs.config(), run_dir=tmp_path, quiet=True, parts=[part])
    what = "the Part Evaluates failed in after_step: RuntimeError: it left the model in a different mode"
    if required:
        with pytest.raises(LockstepError, match=what):
            trainer.fit(task)
        return
    assert trainer.fit(task)["train/loss"] == runs.fit(own_tasks.Dropout(), runs.config())[1]["train/loss"]
    assert log_of(tmp_path).count(what) == 1


def test_a_part_that_fails_in_evaluation_mode_leaves_the_model_in_training_mode(tmp_path):
    class Evaluates(Part):
        required = False

        def after_step(self, training):
            training.model.eval()
            raise ValueError

    trainer = Trainer(runs.config(), run_dir=tmp_path, quiet=True, parts=[Evaluates()])
    assert (
        trainer.fit(own_tasks.Dropout())["train/loss"] == runs.fit(own_tasks.Dropout(), runs.config())[1]["train/loss"]
    )
    assert log_of(tmp_path).count("the Part Evaluates failed in after_step: ValueError") == 1


def test_an_evaluation_that_ends_the_training_between_entries_knows_the_norm_of_the_gradient(tmp_path):
    stop_when = {"metric": "eval/loss", "mode": "min", "target": 1e9}
    settings = runs.config(train={"steps": 20, "eval_every_steps": 3, "stop_when": stop_when}, log={"every_steps": 50})
    settings["checkpoint"] = {"every_steps": 1000}
    part_cases.fit(tmp_path, [], settings)
    (last,) = [entry for entry in entries(tmp_path) if "train/loss" in entry]
    assert (last["step"], last["train/grad_norm"] > 0) == (3, True)


class Slow(Part):
    def after_evaluation(self, training):
        time.sleep(0.2)


def test_the_time_of_a_part_after_an_evaluation_is_left_out_once(tmp_path):
    settings = runs.config(train={"eval_every_steps": 5}, log={"every_steps": 10, "flops": True})
    part_cases.fit(tmp_path, [Slow()], settings)
    shares = [entry["train/wait_share"] for entry in entries(tmp_path) if "train/wait_share" in entry]
    assert all(0 <= share <= 1 for share in shares)


def test_what_is_no_part_is_refused():
    for parts, what in (
        ([3], "a int is not a Part"),
        ([Part], "the class Part is not a Part"),
        ([Part(), Part()], "two Parts"),
    ):
        with pytest.raises(LockstepError, match=what):
            Trainer("digits", parts=parts)
    with pytest.raises(LockstepError, match=r"give a list: parts=\[\.\.\.\]"):
        Trainer("digits", parts=Part())
    for parts, what in ((Slow, "the class Slow"), (object(), "a object")):
        with pytest.raises(LockstepError, match=rf"parts is {what}\n  remedy: give a list: parts=\[\.\.\.\]"):
            Trainer("digits", parts=parts)


def test_a_part_that_cannot_be_sent_to_ranks_is_named(tmp_path):
    part = part_cases.Recording()
    part.lock = threading.Lock()
    with pytest.raises(LockstepError, match=r"Recording\.lock, of type lock: the Part cannot be sent to the ranks"):
        Trainer(runs.config(), run_dir=tmp_path, quiet=True, parts=[part]).fit(own_tasks.Plain(), nproc=2)


def test_names_of_lockstep_are_refused(tmp_path):
    class Logs(Part):
        def after_step(self, training):
            training.log("train/loss", 1.0)

    with pytest.raises(LockstepError, match="the name 'train/loss' may be Lockstep's own"):
        part_cases.fit(tmp_path, [Logs()])


# ---- the config


def test_parts_of_the_config_come_first_and_take_arguments(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lockstep import Part\n"
        "class Says(Part):\n"
        "    def __init__(self, text='nothing'):\n        self.name = text\n"
        "    def start(self, training):\n        training.tell(f'says {self.name}')\n"
    )
    kind = f"{tmp_path}/mine.py:Says"
    settings = runs.config(train={"steps": 2, "parts": [kind, {"kind": kind, "text": "much"}]})
    part_cases.fit(tmp_path / "run", [part_cases.Recording()], settings)
    assert re.findall("says .*", log_of(tmp_path / "run")) == ["says nothing", "says much"]
    for parts, what in (
        ([{"kind": kind, "word": "much"}], "Says cannot be made: TypeError"),
        ([f"{tmp_path}/mine.py:Sas"], "no Part class 'Sas'"),
        (["absent"], "train.parts: there is no part 'absent'"),
        ([{"text": "much"}], "has no kind"),
    ):
        with pytest.raises(LockstepError, match=what):
            part_cases.fit(tmp_path / "other", [], runs.config(train={"steps": 2, "parts": parts}))


def test_an_installed_part_is_found_by_its_entry_point(tmp_path, monkeypatch):
    about = tmp_path / "their_parts-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-parts\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[lockstep.parts]\ntheirs = tests.part_cases:Asking\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    settings = runs.config(train={"parts": [{"kind": "theirs", "step": 5}]})
    _, results, _ = part_cases.fit(tmp_path / "run", [], settings)
    assert results["step"] == 5


# ---- the page


def test_examples_of_the_page_run(tmp_path):
    sent = tmp_path / "sent.txt"
    parts = [
        {"kind": f"{EXAMPLES}/best_message.py:BestMessage", "command": ["sh", "-c", f'echo "$0" >> {sent}']},
        {"kind": f"{EXAMPLES}/gradient_histograms.py:GradientHistograms", "every": 5},
        {"kind": f"{EXAMPLES}/own_stop.py:EndsWhenLossRises", "factor": 1e-6},
    ]
    settings = runs.config(train={"eval_every_steps": 2, "parts": parts})
    run_ranks(2, part_cases.fit, tmp_path / "run", [], settings | {"parallel": {"strategy": "fsdp"}})
    found = entries(tmp_path / "run")
    assert found[-1]["step"] == 5  # at the first entry of the log
    losses = [entry["eval/loss"] for entry in found if "eval/loss" in entry]
    best = [loss for number, loss in enumerate(losses) if loss < min(losses[:number], default=float("inf"))]
    assert [re.search("eval/loss (.*) after", line)[1] for line in sent.read_text().splitlines()] == [
        f"{loss:.4g}" for loss in best
    ]
    (line,) = (tmp_path / "run" / "gradients.jsonl").read_text().splitlines()
    counts = json.loads(line)["counts"]
    assert {name: sum(bins) for name, bins in counts.items()} == {
        name: parameter.numel() for name, parameter in own_tasks.Plain().model().named_parameters()
    }
    assert any("gradients/tiny_share" in entry for entry in found)
