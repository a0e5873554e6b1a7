"""What observers write about a script with DDP, and that the script computes the same bits with and without them."""

import functools
import math
import os
import pickle
import socket
import subprocess
import sys
import sysconfig
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy import random

from lockstep_audit.events import EventHistory, read
from lockstep_audit.observe import (
    buffers,
    calls,
    contents,
    data,
    digests,
    frameworks,
    frozen,
    gathered_evaluation,
    gathers,
    gradients,
    means,
    models,
    module_creation,
    orders,
    passes,
    schedules,
    self_test,
    splits,
    torch_private,
    wrapper_bypass,
)
from lockstep_audit.observe.objects import Registry
from packages.audit.tests import forked, processes

SCRIPTS = Path(__file__).parent / "scripts"


def installed(name):
    """The path of a file of an installed package."""
    return os.path.join(sysconfig.get_path("purelib"), name)


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
    return plain, observed, EventHistory(read(folder / "events"))


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


def test_a_digest_is_that_of_the_numbers_whatever_the_strides():
    for one, other in (
        (torch.tensor(1.0).expand(1), torch.ones(1)),
        (torch.arange(6.0)[::2], torch.tensor([0.0, 2.0, 4.0])),
        (torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T.contiguous()),
        (torch.ones(1).expand(4, 3), torch.ones(4, 3)),
    ):
        assert digests.of_tensors({"": one}) == digests.of_tensors({"": other})
    assert digests.of_tensors({"": torch.tensor(1.0)})[""] is not None


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
    turn = data.Pass(data.ObservedLoader(0, None), 0, None, vars(data.recorder.counts).copy(), True, due=due)
    for _ in range(2):
        data._give(turn, torch.zeros(4))
    data.given.clear()
    assert turn.is_complete is is_complete


def test_an_evaluation_that_a_framework_left_early_ends_where_the_next_loop_begins(monkeypatch):
    told = []
    monkeypatch.setattr(data.recorder, "emit", lambda kind, **keys: told.append((kind, keys["batches"])))
    known = data.ObservedLoader(-1, None)

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


def test_weights_where_evaluations_begin_and_before_a_load_are_told(both):
    trained, later, loaded = (list(both[2].of("weights"))[first::3] for first in range(3))
    assert [set(event["digests"]) == set(loaded[0]["digests"]) for event in trained] == [True, True]
    assert [len(event["digests"]) for event in later] == [6, 6]
    assert trained[0]["digests"] == trained[1]["digests"] != later[0]["digests"] == later[1]["digests"]
    assert [event["changed"]["before"] == later[0]["digests"] for event in loaded] == [True, True]
    assert [event["changed"]["at"][0][1] for event in loaded] == [line_of("model.module.load_state_dict")] * 2
    assert [event.get("changed") for event in (*trained, *later)] == [None] * 4
    assert [event["model"] for event in both[2].of("state") if event["what"] == "model"] == [0, 0]


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


def test_what_a_stream_has_of_its_own_is_told_where_one_rank_reads_for_all(monkeypatch, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, files, rank):
            self.files, self.rank, self.seen, self.unused = files, rank, [], [1, 2, 3, 4]

        def __iter__(self):
            yield from (self.seen for number, file in enumerate(self.files) if number % 2 == self.rank)

    told = []
    monkeypatch.setattr(contents.recorder, "folder", tmp_path)
    monkeypatch.setattr(contents.recorder, "emit", lambda kind, limit, **keys: told.append(keys))
    for files in ([Path("a"), Path("b")], [Path("b"), Path("a")], ["c", "d"], [1.0, 2.0], [object()] * 4):
        contents.dispatched(None, Stream(files, rank=1))
    parts = [each["parts"] for each in told]
    assert parts[0] == parts[1] != parts[2]
    assert [[*each] for each in parts] == [["files", "rank"]] * 3 + [["rank"]] * 2
    assert (parts[0]["rank"], len(parts[0]["files"])) == (1, 2)


WORLD = 2


def shares_of_ranks():
    return torch.distributed.get_rank() + int(os.environ["WORLD_SIZE"])


def test_what_a_stream_asks_for_while_it_is_read_is_told(monkeypatch, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        num_processes = 1

        def __iter__(self):
            yield from (shares_of_ranks() % WORLD for _ in self.read())

        def read(self):
            return "RANK" * (self.process_index + self.num_processes)

        @property
        def process_index(self):
            return 0

    told = []
    monkeypatch.setattr(contents.recorder, "folder", tmp_path)
    monkeypatch.setattr(contents.recorder, "emit", lambda kind, limit, **keys: told.append(keys))
    contents.dispatched(None, Stream())
    asks = told[0]["asks"]
    assert {name: value for name, (value, _) in asks.items()} == {"WORLD": 2, "get_rank": "rank", "WORLD_SIZE": "ranks"}
    assert asks["get_rank"][1] == [__file__, shares_of_ranks.__code__.co_firstlineno + 1, "shares_of_ranks"]


def test_gradients_that_are_gone_before_the_next_backward_pass_are_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(gradients.recorder, "folder", tmp_path)
    monkeypatch.setattr(gradients.torch_state, "has_other_ranks", lambda: True)
    weights, bias, seen = (*(torch.nn.Parameter(torch.ones(n)) for n in (3, 1)), gradients.Gradients())
    optimizer = torch.optim.SGD([weights, bias], lr=0.1)
    for registry in (seen.parameters, seen.all):
        registry.put(weights, None)
        registry.put(bias, None)

    def passed(after=lambda: None):
        (weights * torch.tensor([1.0, 2.0, 3.0]) + bias).sum().backward()
        seen.at_backward(is_sampled=True)
        after()
        return seen.gone()[1]

    assert passed() is None  # only a training that accumulates is looked at
    assert passed() is False
    assert [passed(optimizer.zero_grad), passed(lambda: [p.grad.zero_() for p in (weights, bias)])] == [True, True]
    clear = lambda: torch_private.around("zero_grad", optimizer.zero_grad, seen.note_cleared)()  # noqa: E731
    passed(clear)
    assert seen.cleared_at == [__file__, clear.__code__.co_firstlineno, "<lambda>"]
    change = torch.no_grad()(lambda: weights.add_(1))
    assert passed(lambda: [optimizer.zero_grad(), change()]) is None  # sharpness-aware steps
    assert passed(lambda: [optimizer.zero_grad(), weights.data.add_(1)]) is None
    passed(lambda: torch.nn.utils.clip_grad_norm_([weights, bias], 0.5))
    assert not seen.is_rewritten([weights, bias])
    weights.grad[0] = 7
    assert seen.is_rewritten([weights, bias])


def test_all_patches_work_with_the_installed_torch():
    """In a process of its own: observers import much of torch."""
    (done,) = forked.ended([forked.start(forked.script, self_test.__file__)])
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_takes_samples_of_a_data_set_is_told_with_the_call_of_the_script(monkeypatch, tmp_path):
    told, own = [], {"select": torch_private.around("select", lambda dataset, indices: indices, splits.selected)}
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    monkeypatch.setattr(data.recorder, "emit", lambda kind, limit, **keys: told.append((kind, keys)))
    text = "def train_test_split(data):\n    wrapper(data)\ndef wrapper(data):\n    select(data, [2, 0])\n"
    exec(compile(text, installed("datasets/arrow_dataset.py"), "exec"), own)
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


class _Spectra(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.body(x)

    def elbo(self, x):
        return self.body(x).sum()

    def scaled(self, x):
        return (self.scale * x).sum()


def test_an_evaluation_that_calls_parts_of_a_model_counts_as_one(monkeypatch, tmp_path):
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    monkeypatch.setattr(data.recorder, "emit", lambda kind, **keys: None)
    for owner, name, value in ((models, "on_wrapped", []), (models, "at_wrapping", set())):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(models.module_creation, "has_wrapped", True)
    wrapper = torch.nn.Module()
    wrapper.module, before = _Spectra(), data.recorder.counts.forwards_eval
    models._watch("ddp", None, wrapper, None)
    calls.mode_set(wrapper.module.eval(), False)
    try:
        calls._called(wrapper, ())  # whole models are counted where they are called
        calls.mode_set(wrapper.module, False)
        for _ in range(2):
            wrapper.module.elbo(torch.ones(2))
    finally:
        calls.mode_set(wrapper.module.train(), True)
    assert data.recorder.counts.forwards_eval == before + 1


class _Sending(torch.nn.Module):
    """As DDP: it makes the buffers of its module those of rank 0 before a forward pass."""

    def __init__(self, inner):
        super().__init__()
        self.module = inner

    def forward(self, x):
        self.module.running_mean.fill_(7.0)
        return self.module(x)


def test_buffers_at_an_evaluation_are_those_that_the_wrapper_has_sent(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    monkeypatch.setattr(data.recorder, "emit", lambda kind, **keys: told.append((kind, keys)))
    for owner, name, value in ((models, "on_wrapped", []), (models, "at_wrapping", set())):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(models.module_creation, "has_wrapped", True)
    wrapper = _Sending(torch.nn.BatchNorm1d(2))
    forward = torch_private.around("forward", _Sending.forward, calls.forward)
    monkeypatch.setattr(_Sending, "forward", forward)
    models._watch("ddp", None, wrapper, None)
    wrapper(torch.randn(4, 2))  # in training
    wrapper.eval()
    calls.mode_set(wrapper, False)
    with torch.no_grad():
        wrapper(torch.ones(4, 2))
    calls.mode_set(wrapper, True)
    (keys,) = [keys for kind, keys in told if kind == "buffers"]
    assert keys["digests"] == digests.of_tensors(dict(wrapper.module.named_buffers()))


def test_parts_and_parameters_that_train_a_model_past_its_wrapper_are_told_with_the_line_of_the_script(
    monkeypatch, tmp_path
):
    told, x, get = [], torch.ones(2), torch.nn.Module.__getattr__
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    monkeypatch.setattr(data.recorder, "emit", lambda kind, **keys: told.append((kind, keys)))
    for owner, name, value in ((models, "on_wrapped", []), (models, "at_wrapping", set())):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(models.module_creation, "has_wrapped", True)
    monkeypatch.setattr(calls, "_reads", wrapper_bypass.Reads(calls._used))

    def wrapped():
        wrapper = torch.nn.Module()
        wrapper.module, wrapper.require_backward_grad_sync = _Spectra(), True
        models._watch("ddp", None, wrapper, None)
        return wrapper

    def trained(net):
        net.elbo(x) + net.scaled(x)  # the line of the script
        calls.backward_begins()
        net.elbo(x)  # a checkpoint computes it again
        calls.backward_ends()
        return [keys["at"][1:] for kind, keys in told if kind == "bypass"]

    wrapper, line = wrapped(), trained.__code__.co_firstlineno + 1
    with torch.nn.modules.module.register_module_forward_pre_hook(calls._called):
        after = calls.forward(wrapper, x)
        after(wrapper.module(x), None)
        assert trained(wrapper.module) == []  # beside a pass of the wrapper
        assert trained(wrapper.module) == trained(wrapper.module) == [[line, "trained"]]
    told.clear()
    after, wrapper = None, wrapped()  # the first one is gone
    calls.watch_reads()
    calls.after_step()
    assert trained(wrapper.module) == [[line, "trained"]]
    calls.after_step()
    assert torch.nn.Module.__getattr__ is get


def test_the_line_where_a_script_divides_a_loss_is_told_by_the_number(monkeypatch, tmp_path):
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    divide = torch_private.around("divided", lambda loss, by: loss.detach() / by, means.divided)
    loss = torch.ones((), requires_grad=True)
    line = divide(loss, torch.tensor(550)) is None or sys._getframe().f_lineno
    divide(loss, 2.0)
    divide(torch.ones(()), 7)
    assert means.divided_at(550.0)[1:] == [line, "test_the_line_where_a_script_divides_a_loss_is_told_by_the_number"]
    assert means.divided_at(7.0) is None
    means.forget()
    assert means.divided_at(550.0) is None
    with torch.no_grad(), torch._subclasses.FakeTensorMode():
        assert means.divided(torch.ones(()), torch.ones(())) is None  # fake tensors have no numbers


def test_ranks_of_shards_are_those_of_the_mesh(monkeypatch):
    told = []
    monkeypatch.setattr(data.recorder, "emit", lambda kind, **keys: told.append(keys.get("ranks")))
    for owner, name, value in ((models, "on_wrapped", []), (models, "at_wrapping", set())):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(models.module_creation, "has_wrapped", True)
    monkeypatch.setattr(models, "DeviceMesh", types.SimpleNamespace)
    for mesh in (None, types.SimpleNamespace(mesh=torch.tensor([[0, 2], [4, 6]]))):
        shards = torch.nn.Linear(2, 2)
        models.wrapped("fsdp2", shards, mesh=mesh)(shards, None)
        models.tell(models.of(shards))
    assert told == [None, [0, 2, 4, 6]]


def test_labels_that_a_mean_is_taken_over_are_counted_apart_where_some_are_ignored(monkeypatch, tmp_path):
    monkeypatch.setattr(data.recorder, "folder", tmp_path)

    def told(target, **options):
        means.loss(torch.zeros(len(target), 3, requires_grad=True), target, **options)
        return means.last_labels()

    assert told(torch.tensor([0, 1, 2])) == {"rows": 3}
    means.loss(input=torch.zeros(3, 3, requires_grad=True), target=torch.tensor([0, 1, 2]))
    assert means.last_labels() == {"rows": 3}
    assert told(torch.tensor([0, -100, 2])) == {"labels": 2}
    assert told(torch.tensor([0, 1, 1]), ignore_index=1) == {"labels": 1}
    assert (told(torch.tensor([0, 1, 2]), reduction="sum"), told(torch.ones(3))) == ({"summed": 3}, {})
    assert told(torch.ones(3, dtype=torch.int64, device="meta")) == {}  # nothing is read from a device


def test_a_loss_that_ddp_passes_on_is_that_of_the_model():
    """As with find_unused_parameters: all outputs go through one function of DDP's."""

    def sunk(loss, *others):
        owner = types.SimpleNamespace(_ddp_sink_clone=True)
        return torch.nn.parallel.distributed._DDPSink.apply(lambda: owner, *others, loss)[-1]

    def told(loss):
        return {name: passes._loss(loss)[name] for name in ("ops", "divisor")}

    weights = torch.ones(3, requires_grad=True)
    loss, other = weights.mean(), weights.exp()
    assert told(sunk(loss)) == told(sunk(loss, other)) == told(loss)
    assert told(sunk(loss, other) / 2) == told(loss / 2) == {"ops": ["DivBackward0", *told(loss)["ops"]], "divisor": 2}


def test_what_a_script_multiplies_a_loss_with_is_told():
    weights = torch.ones(3, requires_grad=True)
    loss = weights.exp().mean()
    third = torch.tensor(3.0)
    factors = [passes._loss(each)["factor"] for each in (loss, 2 * loss, loss * third, third * loss, loss * 6 / third)]
    assert factors == pytest.approx([1.0, 2.0, 3.0, 3.0, 2.0])
    assert passes._loss((weights * 0.5).sum())["factor"] == 1.0  # of what is summed
    assert passes._loss(weights.sum() / 3)["factor"] == 1.0  # a mean


def test_frozen_modules_skipped_batches_and_padding_are_told(monkeypatch, tmp_path):
    told, net = [], torch.nn.Sequential(torch.nn.Linear(2, 2))
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    monkeypatch.setattr(data.recorder, "emit", lambda kind, limit=None, **keys: told.append((kind, keys)))
    monkeypatch.setattr(frozen.models, "are_all", lambda how: True)
    monkeypatch.setattr(frozen.torch_state, "has_other_ranks", lambda: True)
    monkeypatch.setattr(frozen, "_noted", [])
    frozen.note(net)  # it may be trained
    with torch.no_grad():
        frozen.note(net)
        frozen.note(net[0])  # a part
        torch.func.functional_call(_Noting(), {"weight": torch.ones(2)}, ())
    trained = torch.nn.Linear(2, 2).requires_grad_(False)
    gradients.gradients.all.put(trained.bias, None)
    frozen.note(trained)
    ((kind, event),) = told
    assert (kind, event["class"], event["changes"]) == (
        "frozen",
        "Sequential",
        sum(each._version for each in net.parameters()),
    )

    labels, longer = torch.tensor([0, -100]), torch.tensor([0, -100, 0])
    frameworks.padded(None, (labels, labels.float()))((longer, longer.float()), None)
    assert told[1][1] == {"at": told[1][1]["at"], "index": 0, "ignored": True, "held": True, "added": 1}
    loader = torch.utils.data.DataLoader([1, 2])
    data.first_skipped(loader, 3)(types.SimpleNamespace(base_dataloader=loader), None)
    assert data._skips.get(loader)[0] == 3


class _Noting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self):
        frozen.note(self)


def test_statistics_that_a_script_adds_to_the_log_of_a_trainer_are_told(monkeypatch, tmp_path):
    class Adding:
        def on_log(self, state, logs):
            logs["recall"] = state.log_history[-1]["hits"] = 3

    class Trainer:
        def __init__(self):
            self.callback_handler = types.SimpleNamespace(callbacks=[Adding()])
            self.args = types.SimpleNamespace(world_size=2)
            self.state = types.SimpleNamespace(log_history=[])

        def log(self, logs):
            self.state.log_history.append(logs | {"epoch": 1.0})
            self.callback_handler.callbacks[0].on_log(self.state, logs)

    told, trainer = [], Trainer()
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    monkeypatch.setattr(data.recorder, "emit", lambda kind, limit, **keys: told.append((keys["name"], keys["at"][2])))
    monkeypatch.setattr(frozen.torch_state, "has_other_ranks", lambda: True)
    monkeypatch.setattr(frameworks, "_entries", Registry())
    log = torch_private.around("log", Trainer.log, frameworks.noted)
    log(trainer, {"loss": 1.0, "accuracy": 0.5, "train_runtime": 2.0, "eval_f1": 0.5})
    trainer.state.log_history.append({"step": 1, "sentiment": 0.5})
    log(trainer, {})
    here, added = sys._getframe().f_code.co_name, [("recall", "on_log"), ("hits", "on_log")]
    assert told == [("accuracy", here), ("eval_f1", here), *added, ("sentiment", "on_log"), *added]


def test_what_a_script_asks_of_a_framework_is_told_with_its_line(monkeypatch, tmp_path):
    told, framework = [], types.ModuleType("framework")
    text = """
    class Trainer:
        should_stop = done = False
        def fit(self, callback):
            self.should_stop = self.done
            callback.on_train_epoch_start()
    class Tuning:
        def __init__(self):
            pass
        @staticmethod
        def make_trainable(modules):
            pass
        def on_train_epoch_start(self):
            self.tune()
        def tune(self):
            self.make_trainable([net])
    """
    exec(compile(textwrap.dedent(text), installed("framework.py"), "exec"), vars(framework))
    framework.net = torch.nn.Linear(2, 2)
    monkeypatch.setitem(sys.modules, "framework", framework)
    monkeypatch.setattr(data.recorder, "folder", tmp_path)
    monkeypatch.setattr(data.recorder, "emit", lambda kind, limit, **keys: told.append((kind, keys["at"][1])))
    for name, observer in {
        "Trainer.__setattr__": frameworks.asked,
        "Tuning.__init__": module_creation.callback_made,
        "Tuning.make_trainable": module_creation.freed_by_framework,
    }.items():
        torch_private.apply(torch_private.Patch("framework", name, observer))

    class Own(framework.Tuning):
        def tune(self):
            self.make_trainable(framework.net)

    first, trainer = sys._getframe().f_lineno, framework.Trainer()
    ready = framework.Tuning()
    trainer.fit(ready)
    assert module_creation.freed_at[id(framework.net.weight)][1] == first + 1
    trainer.fit(Own())
    assert module_creation.freed_at[id(framework.net.bias)][1] == first - 2
    trainer.should_stop = trainer.rate = 0
    trainer.done = trainer.should_stop = True
    trainer.should_stop = True
    trainer.fit(ready)
    assert told == [("asked", first + 7)]


def test_samplers_with_an_order_and_generators_are_seen_without_a_draw():
    class ShortFirst(torch.utils.data.Sampler):
        def __iter__(self):
            raise AssertionError("an observer reads a sampler")

    class Buckets(ShortFirst):
        def __iter__(self):
            return iter(sorted(torch.randperm(4).tolist(), key=abs))

    class Balanced(ShortFirst):
        def __iter__(self):
            return self.mixed()

        def mixed(self):
            return iter(torch.randperm(4).tolist())

    def lost(sampler, *around, given=None, other=None):
        stream = torch.utils.data.TensorDataset(torch.zeros(4))
        orders.chosen(stream, [sampler], given, lambda thing: ["train.py", 8, ""])
        if other is not None:
            orders.chosen(stream, [other], None, lambda thing: None)
        return (orders.lost(stream, around) or {}).get("kind")

    sequential, random_order = torch.utils.data.SequentialSampler([0]), torch.utils.data.RandomSampler([0])
    shuffled = torch.utils.data.DistributedSampler([0, 1], 2, 0)
    kept = torch.utils.data.DistributedSampler([0, 1], 2, 0, shuffle=False)
    assert [lost(each(), shuffled) for each in (ShortFirst, Buckets, Balanced)] == ["ShortFirst", "Buckets", None]
    assert lost(sequential, random_order, given=sequential) == "SequentialSampler"
    right = [lost(sequential, shuffled), lost(ShortFirst(), kept), lost(ShortFirst(), shuffled, other=sequential)]
    assert [*right, lost(random_order, shuffled, given=random_order), lost(shuffled, shuffled)] == [None] * 5
    owner = types.SimpleNamespace(rng=torch.Generator().manual_seed(3), own=np.random.default_rng(0), n=1)
    before = owner.rng.get_state()
    assert orders.generators(owner) == orders.generators(types.SimpleNamespace(**vars(owner))) is not None
    assert torch.equal(owner.rng.get_state(), before)
    torch.rand(1, generator=owner.rng)
    assert len({orders.generators(owner), orders.generators(types.SimpleNamespace(rng=owner.rng)), None}) == 3
    assert orders.generators(types.SimpleNamespace(n=1)) is None


EXTRA = os.environ.get("LOCKSTEP_TEST_EXTRA", "")  # a folder of `pip install --target` with Lightning


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fsdp2", "accelerate", "transformers"])
def test_frameworks_train_the_same_bits(name, tmp_path):
    plain, observed = run_both(SCRIPTS / f"with_{name}.py", tmp_path, "FOLDER")
    assert plain[0] == observed[0] != [[], []], (plain[2], observed[2])
    assert plain[1] == observed[1] == [0, 0]
    history = EventHistory(read(tmp_path / "events"))
    assert list(history.of("note")) == []
    assert all(history.by_rank("step").values())


@pytest.mark.exhaustive
@pytest.mark.skipif(not EXTRA, reason="LOCKSTEP_TEST_EXTRA names no folder with Lightning")
def test_lightning_s_own_launcher_is_observed(tmp_path):
    outputs = []
    for observed in ([], ["-m", "lockstep_audit", "--folder", str(tmp_path / "events")]):
        environment = processes.environment(PYTHONPATH=EXTRA)
        command = [sys.executable, *observed, str(SCRIPTS / "with_lightning.py"), str(tmp_path / str(len(observed)))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        hashes = {
            word for line in done.stdout.splitlines() if "HASH" in line for word in line.split() if len(word) == 64
        }
        outputs.append(hashes)
    assert outputs[0] == outputs[1]
    assert outputs[0]
    history = EventHistory(read(tmp_path / "events"))
    assert history.ranks == [0, 1]
    for rank in range(2):
        ends = list(history.of("loader_end", rank=rank))
        told = [(end["batches"], end["backwards"], end["forwards_eval"], end["is_complete"]) for end in ends]
        assert told == [(2, 0, 2, False), *[(5, 5, 0, True), (3, 0, 3, True)] * 2]  # at first 2 of 3, as a check
    assert list(history.of("note")) == []
    assert all(history.by_rank("step").values())


def test_gathered_features_are_found_below_a_loss_whatever_multiplies_them(monkeypatch):
    torch.manual_seed(0)
    told, normalize = [], torch.nn.functional.normalize
    monkeypatch.setattr(gathers.recorder, "emit", lambda kind, **keys: told.append(keys["at"]))
    own, other = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    got = torch.cat([own.detach(), other])
    sent = [pickle.loads(pickle.dumps(each)) for each in (own * 1, other)]  # what all_gather_object gives

    def looked(loss, held=got, given=own):
        told.clear()
        gathers.note((held, given), ["train.py", 7, "main"])
        gathers.at_backward(loss.sum())
        return len(told)

    products = [own @ got.T, torch.einsum("nd,md->nm", own, normalize(got)), torch.cdist(own, got)]
    assert [looked(each) for each in products] == [1, 1, 1]
    assert looked(own @ torch.cat(sent).T, sent) == 1
    both = torch.randn(4, 6, requires_grad=True)
    all_both = torch.cat([both.detach(), torch.randn(4, 6)])
    first, second = all_both.chunk(2, dim=1)
    parts = [first.T, normalize(second, dim=-1).T, torch.cat([second, first]).T]
    assert [looked(both[:, :3] @ each, all_both, both) for each in parts] == [1, 1, 1]
    assert looked(both @ all_both[2:7].T, all_both, both) == 1
    alone = [both.detach()[:, :3].T, all_both[4:, :3].T, torch.randn(3, 8)]  # of one rank, or of none
    assert [looked(both[:, :3] @ each, all_both, both) for each in alone] == [0, 0, 0]
    with_own = torch.cat([own, other])
    right = [own @ with_own.T, own @ torch.randn(3, 8), torch.cat([own, got]) @ torch.eye(3)]
    assert [looked(each) for each in right] == [0, 0, 0]
    assert looked(own @ got.T, given=own.detach()) == 0
    with torch.no_grad():
        gathers.note((got, own), None)
    gathers.at_backward((own @ got.T).sum())
    assert told == []


def test_a_gather_of_lightning_is_told_unless_it_has_gradients(monkeypatch):
    own, noted = torch.ones(4, 3, requires_grad=True), []
    monkeypatch.setattr(gathers, "note", lambda values, at, remedy: noted.append((values[0].shape, at[0], remedy)))
    for sync_grads in (True, False):
        gathers.by_lightning(None, {"image": own}, sync_grads=sync_grads)({"image": torch.ones(2, 4, 3)}, None)
    assert noted == [((2, 4, 3), __file__, "all_gather(..., sync_grads=True)")]


def test_buffers_of_the_script_are_summed_where_ddp_is_about_to_overwrite_them(monkeypatch):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.tensor([1.0, -1.0]))
            self.register_buffer("count", torch.tensor(1))
            self.register_buffer("cache", torch.ones(2), persistent=False)
            self.register_buffer("apart", torch.ones(2))
            self.norm = torch.nn.BatchNorm1d(2)

    told = []
    monkeypatch.setattr(buffers.recorder, "emit", lambda kind, **keys: told.append(keys))
    monkeypatch.setattr(buffers.recorder, "counts", types.SimpleNamespace(optimizer_steps=1))
    monkeypatch.setattr(buffers, "_noted", {})
    wrapper = types.SimpleNamespace(will_sync_module_buffers=lambda: True, parameters_to_ignore={"apart"})
    for number in (7, 7, 8):
        buffers.before_forward(number, Layer(), wrapper)
    wrapper.buffer_hook = None  # the script exchanges buffers in its own way
    buffers.before_forward(9, Layer(), wrapper)
    assert [each["model"] for each in told] == [7, 8]
    assert told[0]["sums"] == {"codes": [pytest.approx(math.cos(1) - math.cos(2)), pytest.approx(math.sqrt(2)), 2]}
    assert (told[0]["files"], told[0]["classes"]) == ({"codes": [__file__]}, {"codes": "Layer"})


def told_by(monkeypatch):
    told = []
    monkeypatch.setattr(
        gathered_evaluation.recorder, "emit", lambda kind, limit=None, **keys: told.append((kind, keys))
    )
    return told


def test_rows_in_the_order_of_ranks_are_told_where_they_stand_beside_others(monkeypatch):
    told, mine = told_by(monkeypatch), torch.arange(8.0).repeat(2)
    parts = [mine, mine + 10]
    turn = types.SimpleNamespace(batches=2, samples=16)
    monkeypatch.setattr(data, "last", turn)
    monkeypatch.setattr(gathered_evaluation, "_gathered", gathered_evaluation.deque())
    assert gathered_evaluation.note("all_gather", [parts, mine], ["train.py", 1, "main"]) == {"given": [16]}
    both, labels = torch.cat(parts), torch.ones(31)
    gathered_evaluation.compared(both[:31], labels)
    kind, keys = told[0]
    assert (kind, keys["gathered_at"], keys["rows"]) == ("lined_up", ["train.py", 1, "main"], 31)
    assert len(told) == 1
    gathered_evaluation.compared(torch.stack(parts, 1).flatten()[:31], labels)
    assert told.pop()[1]["is_dealt"]  # one of each rank in turn
    gathered_evaluation.compared(both, both)
    gathered_evaluation.compared(both, 1.0)
    gathered_evaluation.compared(mine, mine + 1)
    assert len(told) == 1
    scores = [torch.eye(3)[(each.long() + rank) % 3] for rank, each in enumerate(parts)]
    gathered_evaluation.note("all_gather_into_tensor", [torch.cat(scores), scores[0]], None)
    gathered_evaluation.compared(torch.ones(32), torch.cat(scores).argmax(1))
    assert len(told) == 2
    assert gathered_evaluation.note("all_gather_object", [[None, None], [0.5, 0.25]], None) == {"rows": 2}
    assert gathered_evaluation.note("gather_object", [{"ids": [1], "rows": [2]}], None) == {"rows": -1}


def test_a_count_that_grows_from_sum_to_sum_is_told(monkeypatch):
    told = told_by(monkeypatch)

    def report(turns, begins_anew=False, factor=2.0):
        count = torch.zeros(2)
        for _ in range(turns):
            count = torch.zeros(2) if begins_anew == "other" else count.zero_() if begins_anew else count
            count += torch.tensor([3.0, 0.0])
            before = gathered_evaluation.before_sum(count)
            count *= 2
            gathered_evaluation.summed(count, before, ["train.py", turns, factor])
            count *= factor / 2

    for right in ({"turns": 2}, {"turns": 5, "begins_anew": True}, {"turns": 5, "begins_anew": "other"}):
        report(**right)
    report(5, factor=1.0)  # a mean
    assert told == []
    report(3)
    assert [(kind, keys["elements"], keys["added"]) for kind, keys in told] == [("summed_again", 2, True)]
    negative, large = torch.tensor([1.0, -1.0]), torch.ones(2000)
    assert [gathered_evaluation.before_sum(each) for each in (negative, large, torch.zeros(2))] == [None] * 3


def test_more_samples_are_read_of_a_data_set_where_that_is_quick(monkeypatch):
    told = []
    monkeypatch.setattr(contents.recorder, "emit", lambda kind, samples, **keys: told.append(samples))
    monkeypatch.setattr(contents.time, "monotonic", lambda: 0.0)  # on a busy machine nothing is quick
    contents._probe(list(range(1000)), None, {"dataset_size": 1000})
    clock = iter(range(1000))
    monkeypatch.setattr(contents.time, "monotonic", lambda: next(clock))
    contents._probe(list(range(1000)), None, {"dataset_size": 1000})
    assert [len(samples) for samples in told] == [65, 9]
    assert told[1].keys() < told[0].keys()
    assert list(told[0]) == sorted(told[0])
