"""Memory by rank and purpose: figures computed by hand, peaks that belong to one part, and a readable table."""

import json
import re
import resource
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.core.devices import host_memory
from lockstep.core.parallel.world import World, join_world
from lockstep.parts import memory as engine_memory
from lockstep.parts.entry_line import entry_line
from lockstep.parts.figures import Memory
from lockstep.parts.memory import MB, MemoryGauge, MemoryMonitor, mib, table
from tests import own_tasks, part_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly

# Deep in float64. Rows of 7 or 9 features in two parts: the first rank's are rounded up, and FSDP pads the second's.
BLOCK = 7 + 7 + 9 * 7 + 9 + 7 * 9
WHOLE = 7 * 10 + 7 + 3 * BLOCK + 5 * 7 + 5 + 1
FIRST_SHARD = 4 * 10 + 4 + 3 * (4 + 4 + 5 * 7 + 5 + 4 * 9) + 3 * 7 + 3 + 1
BUFFERS = 5 * 8 + 8
STEPS = 4 * (2 + 3 * 5 + 2 + 1)  # AdamW's counter for each parameter, a float32
BY_HAND = {
    "ddp": [(WHOLE * 8 + BUFFERS, WHOLE * 8, WHOLE * 16 + STEPS)] * 2,
    "fsdp": [
        (FIRST_SHARD * 8 + BUFFERS, FIRST_SHARD * 8, FIRST_SHARD * 16 + STEPS),
        (FIRST_SHARD * 8 + BUFFERS, FIRST_SHARD * 8, (WHOLE - FIRST_SHARD) * 16 + STEPS),
    ],
}


@pytest.mark.parametrize("strategy", BY_HAND)
def test_figures_of_two_ranks_are_those_computed_by_hand(strategy):
    settings = runs.config(parallel={"strategy": strategy}, batch={"micro": 6})
    answers = [results for _, results in run_ranks(2, runs.fit_kind, "Deep", {}, settings)]
    names = ("parameters", "gradients", "optimizer")
    for results in answers:
        rows = [tuple(round(results[f"memory/{name}_mb/rank{rank}"] * MB) for name in names) for rank in (0, 1)]
        assert rows == BY_HAND[strategy]
        for name, column in zip(names, zip(*BY_HAND[strategy], strict=True), strict=True):
            assert round(results[f"memory/{name}_mb"] * MB) == max(column)
    alike = [{name: value for name, value in results.items() if name.startswith("memory/")} for results in answers]
    assert alike[0] == alike[1]


class Hungry(own_tasks.Plain):
    """Takes 200 MiB for a moment, in training or in evaluation."""

    def __init__(self, in_training, **options):
        super().__init__(eval_length=4, **options)
        self.in_training = in_training

    def loss(self, model, batch):
        if model.training == self.in_training:
            torch.ones(200, MB, dtype=torch.uint8)
        return super().loss(model, batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_training", mainly([True], [False, True]))
def test_memory_belongs_to_the_part_that_took_it(tmp_path, in_training):
    settings = runs.config(train={"eval_every_steps": 10}, log={"memory": "table"})
    _, results = runs.fit(Hungry(in_training), settings, tmp_path)
    hungry, modest = ("activations", "evaluation") if in_training else ("evaluation", "activations")
    assert 190 < results[f"memory/{hungry}_mb"] < 300
    assert results[f"memory/{modest}_mb"] < 100
    logged = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged] == [5, 10, 10, 15, 20, 20]
    assert [position for position, entry in enumerate(logged) if "memory/parameters_mb" in entry] == [0, 5]
    assert "memory/evaluation_mb" not in logged[0]
    peaks = [entry["memory/peak_mb"] for entry in logged if "memory/peak_mb" in entry]
    assert peaks == sorted(peaks)  # setting marks back loses none
    assert peaks[-1] > 0.9 * (results["memory/other_mb"] + results[f"memory/{hungry}_mb"])
    log = (tmp_path / "train.log").read_text()
    assert log.count("memory at step") == 2
    assert log.count("memory: at most") == 1
    assert log.index("step 20/20") < log.index("memory at step 20 in MiB, resident:")


def test_lines_of_the_log_show_no_more_of_memory_than_the_peak():
    entry = {
        "step": 5,
        "epoch": 1,
        "memory/peak_mb": 300,
        "memory/peak_mb/rank0": 300,
        "memory/gradients_mb": 1,
        "memory/reserved_mb": 400,
    }
    assert entry_line(entry, 10) == "step 5/10  epoch 1.00  peak MB 300"


@pytest.fixture
def counted(monkeypatch):
    """The steps whose memory was counted by purpose; 0 before the first."""
    steps, count = [], MemoryMonitor._count
    monkeypatch.setattr(MemoryMonitor, "_count", lambda self: steps.append(self.state.step) or count(self))
    return steps


@pytest.mark.parametrize("evaluated", [19, 20])
def test_last_step_is_counted_also_where_an_evaluation_comes_before_it(counted, evaluated):
    settings = runs.config(train={"steps": 20, "eval_every_steps": evaluated}, log={"every_steps": 19})
    runs.fit(own_tasks.Plain(eval_length=4), settings)
    assert counted == [0, 1, 20]


def test_steps_that_do_not_log_measure_nothing(monkeypatch, counted):
    measured, status = [], host_memory._status
    monkeypatch.setattr(host_memory, "_status", lambda name: measured.append(name) or status(name))
    runs.fit(own_tasks.Plain(), runs.config())  # 20 steps, an entry after each 5th
    assert counted == [0, 1, 20]
    few = len(measured)
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 200}, log={"every_steps": 50}))
    assert len(measured) == 2 * few


# ---- without a training


def training(model, device="cpu", optimizer=None, **options):
    """What `MemoryMonitor` looks at of a training."""
    world = options.pop("world", None) or World(
        0, 1, 0, torch.device(device, 0) if device == "cuda" else torch.device(device)
    )
    return SimpleNamespace(
        forward=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
        world=world,
        step=0,
        **options,
    )


def step(run, memory, loss=None):
    memory.count_in_next_step()
    run.step += 1
    (loss() if loss else sum(p.sum() for p in run.forward.parameters())).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def test_ties_and_views_count_once_and_so_does_nested_state():
    model = nn.Module()
    model.one, model.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model.other.weight = model.one.weight
    flat = torch.zeros(100)
    model.register_buffer("head", flat[:10])
    model.register_buffer("tail", flat[10:])
    run = training(model)
    run.optimizer.state[model.one.weight] = {
        "pairs": [(torch.zeros(5), [torch.zeros(7), flat])],
        "count": 3,
        "name": "words",
    }
    memory = MemoryMonitor(run, stop=9, evaluates=False)
    step(run, memory)
    assert memory.counted == {"parameters": 64 * 4 + 100 * 4, "gradients": 64 * 4, "optimizer": 12 * 4}


def test_sparse_gradient_counts_what_it_holds():
    model = nn.Embedding(1000, 4, sparse=True)
    run = training(model)
    memory = MemoryMonitor(run, stop=9, evaluates=False)
    step(run, memory, lambda: model(torch.tensor([1, 2, 5])).sum())
    assert memory.counted["gradients"] == 3 * 4 * 4 + 3 * 8


def test_step_that_is_repeated_is_counted_once():
    run = training(nn.Linear(2, 2))
    memory = MemoryMonitor(run, stop=9, evaluates=False)
    memory.count_in_next_step()
    step(run, memory)
    assert memory.report()[1]
    assert not run.optimizer._optimizer_step_post_hooks


def test_update_that_was_skipped_is_made_up_for_at_the_next_entry():
    run = training(nn.Linear(2, 2))
    memory = MemoryMonitor(run, stop=9, evaluates=False)
    memory.count_in_next_step()
    run.step += 1
    assert memory.report() == ({}, [])
    assert not run.optimizer._optimizer_step_post_hooks  # or a step that does not log would count
    step(run, memory)
    entries, lines = memory.report()
    assert entries["memory/gradients_mb"] == mib(6 * 4)
    assert lines
    assert not run.optimizer._optimizer_step_post_hooks


def report_where_one_rank_skipped():
    with join_world("cpu") as world:
        run = training(nn.Linear(2, 2), world=world)
        memory = MemoryMonitor(run, stop=9, evaluates=False)
        reports = []
        for skips in (True, False):
            if not (skips and world.rank == 1):
                step(run, memory)
            reports.append(memory.report()[0])
        return reports


def test_no_rank_shows_anything_before_all_have_counted():
    for first, second in run_ranks(2, report_where_one_rank_skipped):
        assert first == {}
        assert second["memory/gradients_mb/rank1"] == mib(6 * 4)


class Allocator:
    """Stands in for torch.cuda's, whose tensors this machine has not."""

    def __init__(self, monkeypatch):
        self.now = self.most = self.slabs = 0
        for name, get in {
            "memory_allocated": lambda _: self.now,
            "max_memory_allocated": lambda _: self.most,
            "max_memory_reserved": lambda _: self.slabs,
        }.items():
            monkeypatch.setattr(torch.cuda, name, get)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(engine_memory, "_highest", {})

    def reset(self, _):
        self.most, self.slabs = self.now, 0

    def hold(self, mb):
        self.now = mb * MB
        self.most = max(self.most, self.now)
        self.slabs = max(self.slabs, 2 * self.most)


def test_on_cuda_peaks_are_the_allocators(monkeypatch):
    device = Allocator(monkeypatch)
    device.hold(50)  # before training: in the peak of the process alone
    device.hold(10)
    run = training(nn.Linear(2, 2), "cuda")  # its tensors are in host memory, as if offloaded

    def take_30(*_):
        device.hold(42)
        device.hold(12)

    run.optimizer.register_step_pre_hook(take_30)
    memory = MemoryMonitor(run, stop=2, evaluates=True)

    step(run, memory)
    entries, lines = memory.report()
    expected = {
        "parameters": 0,
        "gradients": 0,
        "optimizer": 0,
        "activations": 30,
        "other": 12,
        "peak": 50,
        "reserved": 100,
    }
    assert entries == {f"memory/{name}_mb": value for name, value in expected.items()}
    assert lines[0] == "memory at step 1 in MiB, allocated on the device:"
    with memory.apart("saving"):
        device.hold(70)
        device.hold(12)
    assert memory.report() == ({}, [])  # once
    step(run, memory)
    assert memory.report() == ({}, [])  # the evaluation comes yet
    with memory.apart("evaluation"):
        device.hold(99)
        device.hold(12)
    entries, lines = memory.report(evaluated=True)
    expected |= {"evaluation": 87, "peak": 99, "reserved": 198}
    assert entries == {f"memory/{name}_mb": value for name, value in expected.items()}


def test_at_the_end_only_news_is_told(monkeypatch):
    device = Allocator(monkeypatch)
    run = training(nn.Linear(2, 2), "cuda")
    memory = MemoryMonitor(run, stop=2, evaluates=False)
    device.hold(100)
    step(run, memory)
    assert memory.report()[1]
    device.hold(105)
    step(run, memory)
    assert memory.report() == ({}, [])
    run.step = 1
    device.hold(140)
    step(run, memory)
    assert memory.report()[0]["memory/peak_mb"] == 140


def test_entry_on_cuda_has_what_was_reserved(monkeypatch):
    device = Allocator(monkeypatch)
    device.hold(30)
    run = training(nn.Linear(2, 2), "cuda")
    part = Memory(evaluates=False, shows_tables=False)
    seen = part_cases.inside(run, model=run.forward)
    part.start(seen)
    part.log_entry(seen)
    assert (seen._logged["memory/peak_mb"], seen._logged["memory/reserved_mb"]) == (30, 60)


def test_where_the_system_has_no_proc_a_part_shows_what_it_added(tmp_path, monkeypatch):
    mark = SimpleNamespace(ru_maxrss=100 * 1024)
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "absent")
    monkeypatch.setattr(host_memory.sys, "platform", "linux")
    monkeypatch.setattr(resource, "getrusage", lambda _: mark)
    monkeypatch.setattr(engine_memory, "_highest", {})
    run = training(nn.Linear(2, 2))
    memory = MemoryMonitor(run, stop=9, evaluates=True)

    def grow(mb):
        mark.ru_maxrss = mb * 1024

    step(run, memory, lambda: (grow(130), run.forward.weight.sum())[1])
    with memory.apart("evaluation"):
        grow(180)
    entries, _ = memory.report()
    assert entries["memory/activations_mb"] == pytest.approx(30, abs=0.01)
    assert entries["memory/evaluation_mb"] == 50
    assert entries["memory/peak_mb"] == 180
    grow(200)  # by training
    assert memory._gather()[0]["activations"] == pytest.approx(100 * MB, abs=10000)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process set its own mark back")
def test_peak_begins_anew_and_the_most_is_remembered():
    gauge = MemoryGauge(torch.device("cpu"))
    gauge.reset_peak()
    before = gauge.current()
    torch.ones(200, MB, dtype=torch.uint8)
    assert before + 190 * MB < gauge.peak() < before + 300 * MB
    highest = gauge.highest_peak()
    assert gauge.reset_peak() < before + 100 * MB
    assert gauge.peak() < before + 100 * MB
    assert gauge.highest_peak() == highest


def test_marks_that_cannot_be_set_back_do_no_harm(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    (tmp_path / "clear_refs").mkdir()  # cannot be written
    monkeypatch.setattr(host_memory, "_PROC", tmp_path)
    monkeypatch.setattr(engine_memory, "_highest", {})
    gauge = MemoryGauge(torch.device("cpu"))
    assert (gauge.reset_peak(), gauge.peak(), gauge.current(), gauge.highest_peak(), gauge.highest_reserved()) == (
        2 * MB,
        2 * MB,
        MB,
        2 * MB,
        0,
    )


def test_without_tables_a_line_stands_at_the_end(tmp_path):
    runs.fit(own_tasks.Plain(), runs.config(train={"steps": 10}), tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert "memory at step" not in log
    assert len(re.findall(r"memory: at most [\d,]+ MiB resident\n", log)) == 1


# ---- the table


def rows(peaks, **columns):
    row = {"paragauges": 10.0, "activations": 5.0, "peak": 0.0}
    return [
        {name: value * MB for name, value in (row | columns | {"peak": peak, "activations": peak / 2}).items()}
        for peak in peaks
    ]


def test_table_has_a_line_for_each_rank():
    assert table(rows([100, 110]), 50, False) == [
        "memory at step 50 in MiB, resident:",
        "rank  paragauges  activations        peak",
        "   0        10.0         50.0       100.0",
        "   1        10.0         55.0       110.0",
    ]


def test_table_of_many_ranks_shows_the_extremes():
    lines = table(rows([1000 + (17 * rank) % 40 for rank in range(40)]), 50, True)
    assert lines == [
        "memory at step 50 in MiB, allocated on the device:",
        "  rank  paragauges  activations        peak",
        "     0        10.0        500.0     1,000.0",
        "     7        10.0        519.5     1,039.0",
        "   min        10.0        500.0     1,000.0",
        "median        10.0        509.8     1,019.5",
        "   max        10.0        519.5     1,039.0",
    ]


@pytest.mark.parametrize(
    ("peaks", "hint"),
    [([100, 119, 110], None), ([100, 110, 130], "at its peak, rank 2 held 30.0 MiB more than rank 0: ")],
)
def test_imbalance_is_told_from_a_fifth_on(peaks, hint):
    last = table(rows(peaks), 50, False)[-1]
    assert last.startswith(hint) if hint else last.split() == ["2", "10.0", "55.0", "110.0"]


def test_imbalance_names_the_column_that_makes_most_of_it():
    light, heavy, elsewhere = (
        {"paragauges": 10.0 * MB, "activations": size * MB, "peak": peak * MB}
        for size, peak in ((5, 100), (85, 200), (6, 200))
    )
    assert (
        table([heavy, light], 50, False)[-1]
        == "at its peak, rank 0 held 100.0 MiB more than rank 1: mostly in activations"
    )
    assert table([elsewhere, light], 50, False)[-1].endswith(": before training, in saving, or in several columns")


def test_the_memory_before_and_after_an_evaluation(monkeypatch):
    """Of 40 MB that an evaluation takes, it keeps 5."""
    device = Allocator(monkeypatch)
    device.hold(30)
    memory = MemoryMonitor(training(nn.Linear(2, 2), "cuda"), stop=9, evaluates=True)

    def evaluate():
        device.hold(70)
        device.hold(35)

    with memory.apart("evaluation"):
        evaluate()
    figures = memory.highest_of("evaluation")
    names = ("memory/before_evaluation_mb", "memory/after_evaluation_mb", "memory/evaluation_mb")
    assert [figures[name] for name in names] == [30, 35, 40]


def test_lines_leave_out_the_ends_of_intervals_and_no_other_results():
    entry = {"step": 5, "epoch": 1, "eval/auc": 0.5, "eval/auc_low": 0.4, "eval/auc_high": 0.6}
    entry |= {"eval/recall": 0.2, "eval/recall_high": 0.1}  # a result, because there is no recall_low
    assert entry_line(entry, 10) == "step 5/10  epoch 1.00  eval/auc 0.5  eval/recall 0.2  eval/recall_high 0.1"
