"""What observers write about a script with DDP, and that the script computes the same bits with and without them."""

import functools
import math
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy import random

from lockstep.audit.events import History, read
from lockstep.audit.observe import contents, data, digests, gradients, schedules, self_test, splits, torch_private
from tests import forked, processes

SCRIPTS = Path(__file__).parent / "scripts"


def start(script, *arguments, rank, port, folder=None):
    """A rank of a script, observed if a folder is given."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(port)
    if folder is None:
        return forked.start(forked.script, script, *arguments, **variables)
    return forked.start(forked.observed, folder, script, *arguments, **variables)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run_both(script, folder, *arguments):
    """(outputs, exit codes, errors) of two ranks without observers, and with them; events in `folder`."""
    started = {}
    for is_observed in (False, True):
        port = free_port()
        own = folder / f"observed-{is_observed}"
        own.mkdir()
        events = folder / "events" if is_observed else None
        given = [own if one == "FOLDER" else one for one in arguments]
        started[is_observed] = [start(script, *given, rank=rank, port=port, folder=events) for rank in range(2)]
    done = {}
    for is_observed, ranks in started.items():
        ended = forked.ended(ranks)
        lines = [[line for line in rank.stdout.splitlines() if line.startswith("HASH")] for rank in ended]
        done[is_observed] = lines, [rank.returncode for rank in ended], [rank.stderr for rank in ended]
    return done[False], done[True]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    plain, observed = run_both(SCRIPTS / "with_ddp.py", folder, "FOLDER")
    return plain, observed, History(read(folder / "events"))


def events(both, kind, rank=1):
    return list(both[2].of(kind, rank=rank))


def line_of(text):
    lines = (SCRIPTS / "with_ddp.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_observers_change_no_bit_and_no_exit_code(both):
    plain, observed, _ = both
    assert plain[0] == observed[0] != [[], []], (plain[2], observed[2])
    assert plain[1] == observed[1] == [7, 7]


def test_no_observer_failed(both):
    assert events(both, "note", 0) == events(both, "note", 1) == []


def test_the_start_and_the_end_are_told(both):
    (start_event,), (end,) = events(both, "start"), events(both, "exit")
    assert (start_event["world_size"], start_event["local_rank"]) == (2, 1)
    assert start_event["script"] == str(SCRIPTS / "with_ddp.py")
    assert end["code"] == 7
    assert end["steps"] == {"0": 18, "1": 2}
    assert end["collectives"]["0"] > 10


def test_each_epoch_of_a_loader_is_told_with_its_sampler_and_indices(both):
    first = [event for event in events(both, "loader") if event["loader"] == 0]
    assert [event["epoch"] for event in first] == [0, 1]
    assert first[0]["at"][1] == line_of("in enumerate(loader)")
    assert first[0]["made_at"][1] == line_of("loader = DataLoader(train_part")
    assert first[1]["distributed"] | {"kind": "DistributedSampler", "replicas": 2, "rank": 1} == first[1]["distributed"]
    assert (first[0]["shuffles"], first[0]["batches"], first[0]["dataset_size"]) == (True, 6, 48)
    seen = {}
    for rank in range(2):
        parts = [event for event in events(both, "indices", rank) if (event["loader"], event["epoch"]) == (0, 1)]
        seen[rank] = [index for event in parts for batch in event["batches"] for index in batch]
    assert sorted(seen[0] + seen[1]) == list(range(48))


def test_the_end_of_an_iteration_counts_what_was_done(both):
    train, evaluation = list(events(both, "loader_end"))[:2]
    assert (train["batches"], train["backwards"], train["optimizer_steps"], train["is_complete"]) == (6, 6, 3, True)
    assert (evaluation["forwards_eval"], evaluation["backwards"], evaluation["samples"]) == (4, 0, 16)


def test_a_step_tells_its_backwards_its_clipping_and_its_scaler(both):
    first = events(both, "step")[0]
    assert [told["synced"] for told in first["backwards"]] == [False, True]
    assert all(told["divisor"] == 2 for told in first["backwards"])
    assert [batch["samples"] for batch in first["micro_batches"]] == [4, 4]
    assert first["clips"][0]["limit"] == 1.0
    assert first["scaler"] == {"scale": 16.0, "found_inf": False, "enabled": True, "unscaled_before_clip": True}


def test_replicas_have_equal_digests_until_a_call_past_the_wrapper(both):
    steps = {rank: {e["step"]: e for e in events(both, "step", rank) if e["sampled"]} for rank in range(2)}
    assert steps[0][0]["gradients"] == steps[1][0]["gradients"]
    assert steps[0][3]["parameters"] == steps[1][3]["parameters"]
    assert len(set(steps[0][0]["gradients"].values())) == len(steps[0][0]["gradients"]) == 6
    assert steps[0][0]["gradients"]["0.bias"] is None


def test_a_call_past_the_wrapper_is_told_with_its_line(both):
    (bypass,) = events(both, "bypass")
    assert bypass["at"][1] == line_of("line of the bypass")
    step = next(e for e in events(both, "step") if e["step"] == 6)
    assert [told["synced"] for told in step["backwards"]] == [False]


def test_what_writes_to_wrapped_parameters_beside_optimizers_is_told_with_its_line(both):
    writes = events(both, "write")
    assert {each["name"] for each in writes} == {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}
    assert {each["at"][1] for each in writes} == {line_of("load_state_dict")}
    assert [each["digest"] for each in writes] == [each["digest"] for each in events(both, "write", rank=0)]


def test_a_parameter_unfrozen_after_the_wrapping_is_told(both):
    (unfrozen,) = events(both, "unfrozen")
    assert unfrozen["names"] == ["0.bias"]
    assert "at_step" not in unfrozen


def test_gradients_summed_by_hand_are_told_with_whether_they_were_divided(both):
    undivided, divided = sorted(events(both, "hand_reduce"), key=lambda event: event["step"])
    assert (undivided["divided"], divided["divided"]) == (False, True)
    assert undivided["at"][1] == line_of("            else:") + 1
    (average,) = events(both, "hand_average")
    assert average["at"][1] == line_of("all_reduce(parameter.data)")


def test_the_norm_of_gradients_counts_sparse_ones_too():
    words = torch.nn.Embedding(5, 2, sparse=True)
    words(torch.tensor([1, 1, 3])).sum().backward()
    expected = words.weight.grad.to_dense().norm().item()
    assert gradients.gradient_norm([words.weight]) == pytest.approx(expected)
    assert gradients.gradient_norm([torch.nn.Parameter(torch.ones(2))]) == 0.0


@pytest.mark.parametrize(("due", "is_complete"), [(2, True), (3, False), (None, False)])
def test_an_iteration_of_a_framework_is_complete_with_the_last_batch_that_it_asks_for(due, is_complete):
    """Lightning counts the batches of a loader, and never asks for one more."""
    turn = data.Pass(data.Loader(0, None), 0, None, vars(data.recorder.counts).copy(), True, due=due)
    for _ in range(2):
        data._give(turn, torch.zeros(4))
    data.given.clear()
    assert turn.is_complete is is_complete


def test_an_evaluation_that_a_framework_left_early_ends_where_the_next_loop_begins(monkeypatch):
    told = []
    monkeypatch.setattr(data.recorder, "emit", lambda kind, **keys: told.append((kind, keys["batches"])))
    known = data.Loader(-1, None)

    def begun(**before):
        counts = vars(data.recorder.counts) | before
        known.open = data._open[-1] = data.Pass(known, 0, None, counts, True, batches=2, due=4)

    begun(forwards_eval=-1)
    data.close_complete()
    assert (told, known.open, data._open) == ([("loader_end", 2)], None, {})
    begun(backwards=-1)
    data.close_complete()
    assert data._open.pop(-1) is known.open is not None


def test_what_a_function_of_the_script_makes_of_a_sample_is_read_with_it(monkeypatch):
    told, ids = [], {"a": 5, "b": 7}
    monkeypatch.setattr(contents.recorder, "emit", lambda kind, samples, **keys: told.append(samples))
    contents._probe(
        ["ab", "ba"], lambda rows: torch.tensor([[ids[word] for word in row] for row in rows]), {"dataset_size": 2}
    )
    assert [sample[1:] for sample in told[0].values()] == [[[5, 7]], [[7, 5]]]
    contents._probe(["ab"], lambda rows: rows[7], {"dataset_size": 1})  # one sample is no batch there
    assert len(told[1][0]) == 1


def test_files_and_states_are_told(both):
    saves = {Path(event["path"]).name: event for event in events(both, "save", 0)}
    assert saves["model.pt"]["keys"] == ["model", "step"]
    assert saves["note.txt"]["how"] == "open"
    (text,) = events(both, "text", 0)
    assert (text["path"], text["lines"]) == (saves["note.txt"]["path"], 1)
    assert events(both, "save", 1) == []
    (load,) = events(both, "load")
    assert load["saved_step"] == {"step": 6}
    assert "model" in [event["what"] for event in events(both, "state")]


class _Falls:
    def __init__(self, total):
        self.total, self.size, self.seen = total, 60, 0

    def __call__(self, step):
        return max(0.1, 1 - step / self.total)

    def counts(self, step):
        self.seen += 1
        return max(0.1, 1 - self.seen / self.total)


def _wave(step, warm, total=20):
    return step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def test_the_lengths_of_functions_are_the_numbers_at_which_they_end_to_fall():
    total, size, counted = 96, 32, _Falls(96)
    functions = {
        "closure": lambda step: max(0.0, 1 - step / total) * size,
        "default": functools.partial(_wave, warm=8),
        "partials": functools.partial(functools.partial(_wave, warm=8), total=96.0),
        "root": lambda step: math.sqrt(1 - step / total),
        "object": _Falls(96),
        "method": _Falls(96).__call__,
        "scale": lambda step: size**-0.5 * (step + 1) ** -0.5,
        "state": counted.counts,
    }
    found = {
        name: schedules._lengths(types.SimpleNamespace(lr_lambdas=[function])) for name, function in functions.items()
    }
    expected = {name: [96] for name in functions} | {"default": [20], "scale": [], "state": []}
    assert (found, counted.seen) == (expected, 0)


def test_wrapping_splits_buffers_and_collectives_are_told(both):
    (wrap,) = events(both, "wrap")
    assert (wrap["how"], wrap["parameters"], wrap["ranks"]) == ("ddp", 6, [0, 1])
    splits = [events(both, "split", rank)[0] for rank in range(2)]
    assert splits[0]["lengths"] == [48, 16]
    assert splits[0]["digest"] == splits[1]["digest"]
    assert [event.get("by") for event in events(both, "split")] == [None, "Subset"]
    assert len(events(both, "buffers")) == 2
    assert (
        events(both, "optimizer")[0] | {"owned": 6, "foreign": 0, "gradients_none": 1} == events(both, "optimizer")[0]
    )
    assert "barrier" in [event["op"] for event in events(both, "collective")]
    assert next(event["per_step"] for event in events(both, "scheduler")) == 1


def test_all_patches_work_with_the_installed_torch():
    """In a process of its own: observers import much of torch."""
    (done,) = forked.ended([forked.start(forked.script, self_test.__file__)])
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_takes_samples_of_a_data_set_is_told_with_the_call_of_the_script(monkeypatch, tmp_path):
    told, own = [], {"select": torch_private.around("select", lambda dataset, indices: indices, splits.selected)}
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    monkeypatch.setattr(data.recorder, "emit", lambda kind, limit, **keys: told.append((kind, keys)))
    text = "def train_test_split(data):\n    wrapper(data)\ndef wrapper(data):\n    select(data, [2, 0])\n"
    exec(compile(text, "/a/site-packages/datasets/arrow_dataset.py", "exec"), own)
    own["train_test_split"](None)
    own["select"](None, iter([0]))  # would be used up
    own["select"](None, range(3, 5000))
    (first, split), (_, select) = told
    assert (first, split["by"], split["lengths"], split["at"][0]) == ("split", "train_test_split", [2], __file__)
    assert (select["by"], select["lengths"]) == ("select", [4997])
    assert select["digest"] == digests.of_numbers(range(3, 1003))
    divided = torch_private.around("divided", lambda x, **named: (x[:3], x[3:]), splits.arrays_split)
    before = random.get_state()
    for seed in (None, None, random.RandomState(7), 7, 8):
        divided(range(5), random_state=seed)
    assert all(map(np.array_equal, before, random.get_state()))  # nothing was drawn
    told = [keys for _, keys in told[2:]]
    assert told[0] == {"at": told[0]["at"], "by": "train_test_split", "lengths": [3, 2], "digest": told[1]["digest"]}
    assert len({each["digest"] for each in told}) == 4


EXTRA = os.environ.get("LOCKSTEP_TEST_EXTRA", "")  # a folder of `pip install --target` with Lightning


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fsdp2", "accelerate", "transformers"])
def test_frameworks_train_the_same_bits(name, tmp_path):
    plain, observed = run_both(SCRIPTS / f"with_{name}.py", tmp_path, "FOLDER")
    assert plain[0] == observed[0] != [[], []], (plain[2], observed[2])
    assert plain[1] == observed[1] == [0, 0]
    history = History(read(tmp_path / "events"))
    assert list(history.of("note")) == []
    assert all(history.by_rank("step").values())


@pytest.mark.exhaustive
@pytest.mark.skipif(not EXTRA, reason="LOCKSTEP_TEST_EXTRA names no folder with Lightning")
def test_lightning_s_own_launcher_is_observed(tmp_path):
    outputs = []
    for observed in ([], ["-m", "lockstep.audit", "--folder", str(tmp_path / "events")]):
        environment = processes.environment(PYTHONPATH=EXTRA)
        command = [sys.executable, *observed, str(SCRIPTS / "with_lightning.py"), str(tmp_path / str(len(observed)))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        hashes = {
            word for line in done.stdout.splitlines() if "HASH" in line for word in line.split() if len(word) == 64
        }
        outputs.append(hashes)
    assert outputs[0] == outputs[1]
    assert outputs[0]
    history = History(read(tmp_path / "events"))
    assert history.ranks == [0, 1]
    ends = list(history.of("loader_end"))
    assert {(bool(end["backwards"]), end["is_complete"]) for end in ends} == {(True, True), (False, True)}
    assert list(history.of("note")) == []
    assert all(history.by_rank("step").values())
