"""Memory that does not suffice: the rank says so, all ranks end, and the next start takes smaller micro-batches."""

import json

import pytest
import torch

from lockstep.cli import train as command
from lockstep.core.checkpoint import files, store
from lockstep.core.errors import LockstepError, MemoryShortage
from lockstep.core.parallel.heartbeat import Phase
from lockstep.core.parallel.launched import INTERRUPTED
from lockstep.core.parallel.world import World
from lockstep.trainer import memory_shortage
from tests import own_tasks, rank_cases, runs
from tests.processes import launched
from tests.ranks import run_ranks
from tests.selection import mainly

TASKS = """
import os
import torch
import torch.distributed as dist
from tests.own_tasks import Deep

class TooLarge(Deep):
    calls = 0
    def loss(self, model, batch):
        trains = model.training and torch.is_grad_enabled()
        self.calls += trains
        if len(batch[0]) >= 12 and os.environ["RANK"] == "1" and self.calls > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. (made up)")
        if len(batch[0]) >= 12 and not model.training and self.calls:
            raise torch.OutOfMemoryError("CUDA out of memory. (made up)")
        if trains:  # as within SyncBatchNorm: the other ranks wait for rank 1
            dist.all_reduce(torch.ones(1))
        return super().loss(model, batch)
"""
TRAIN = (
    "train",
    "{folder}/tasks.py:TooLarge",
    "task.eval_length=20",
    "batch.global=48",
    "batch.micro=16",
    "optim.name=AdamW",
    "optim.lr=0.01",
    "optim.weight_decay=0.1",
    "train.steps=8",
    "train.eval_every_steps=8",
    "checkpoint.every_steps=2",
    "log.writers=[text_log]",
    "--nproc",
    3,
    "--max-restarts",
    0,
)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=launched((*TRAIN, "--run-dir", "{folder}/run"))),
        pytest.param(
            "fsdp",
            marks=[
                pytest.mark.exhaustive,
                launched((*TRAIN, "parallel.strategy=fsdp", "--run-dir", "{folder}/run")),
            ],
        ),
    ],
)
def test_the_launcher_goes_on_with_half_the_micro_batch_after_a_shortage_on_one_of_three_ranks(strategy, launch):
    (done,) = launch.done
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("all ranks restart") == 2  # for training, and for the evaluation
    assert "rank 1: out of memory with micro-batches of 16: CUDA out of memory. (made up)" in done.stderr
    note = json.loads((launch.folder / "run" / "micro.json").read_text())
    assert (note["micro"], note["evaluation"]) == (8, 8)
    newest = store.listed(launch.folder / "run" / "checkpoints")[0]
    assert newest.step == 8
    found = {
        name.removeprefix("model."): tensor
        for name, tensor in files.read(newest.path, newest.index)
        if name.startswith("model.")
    }
    expected, _ = runs.by_hand(own_tasks.Deep(), 8, 48)
    expected.pop("calls")
    assert found.keys() >= expected.keys()
    assert runs.difference({name: found[name] for name in expected}, expected) < 1e-10


# Where a micro-batch of 12 samples or more fails on all ranks: number of the pass, kind of the pass.
PLACES = {
    "first forward pass": (1, "forward"),
    "first backward pass": (1, "backward"),
    "late backward pass": (9, "backward"),
    "copy": (5, "copy"),
}
CASES = [(strategy, place) for strategy in ("ddp", "fsdp") for place in PLACES]


@pytest.mark.parametrize(("strategy", "place"), mainly([("ddp", "first backward pass")], CASES))
def test_wherever_memory_is_short_the_next_start_goes_on_with_half_the_micro_batch(strategy, place, tmp_path):
    settings = runs.config(
        batch={"global": 48, "micro": 12},
        parallel={"strategy": strategy},
        checkpoint={"every_steps": 2, "mode": "sync"},
        train={"steps": 10},
    )
    errors = run_ranks(2, rank_cases.fit_out_of_memory, settings, tmp_path, PLACES[place])
    assert "MemoryShortage" in [name for name, _, _ in errors]  # a rank may hear of the other's before its own
    for _, text, retryable in errors:
        assert "out of memory with micro-batches of 12: CUDA error: out of memory" in text
        assert retryable
    note = json.loads((tmp_path / "micro.json").read_text())
    assert note["micro"] == 6
    assert "out of memory" in note["why"]
    expected, _ = runs.by_hand(own_tasks.Deep(), 10, 48)
    expected.pop("calls")
    for weights in run_ranks(2, rank_cases.fit_out_of_memory, settings, tmp_path, (None, "forward")):
        weights.pop("calls")
        assert runs.difference(weights, expected) < 1e-10


def test_micro_batch_of_one_that_does_not_fit_is_an_error(tmp_path):
    settings = runs.config(batch={"micro": 1})
    ((name, text, retryable),) = run_ranks(1, rank_cases.fit_out_of_memory, settings, tmp_path, (None, "forward"), 1)
    assert name == "TrainingError"
    assert "step 1, rank 0: a micro-batch of one sample does not fit into memory" in text
    assert "activation_checkpointing" in text
    assert not retryable


def test_without_leave_to_halve_the_error_is_torchs_own(tmp_path):
    settings = runs.config(batch={"micro": 12}, compute={"halve_on_oom": False})
    with pytest.raises(torch.AcceleratorError):
        rank_cases.fit_out_of_memory(settings, tmp_path, (None, "forward"))


def test_a_note_that_cannot_be_written_is_no_reason_to_start_again_and_again(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_shortage.atomic, "staged_file", full)
    error = shortage(tmp_path, runs.config(batch={"global": 32}), World(0, 1, 0, torch.device("cpu")))
    assert not isinstance(error, MemoryShortage)
    assert "set batch.micro=16" in str(error)
    assert "No space left" in str(error)


def shortage(folder, settings, world, **options):
    with pytest.raises(LockstepError) as caught, memory_shortage.noted(folder, config(settings), world, **options):
        rank_cases.shortage()
    return caught.value


def config(settings):
    from lockstep.configs import config_file

    return config_file.parse(settings, needs_task=False)


def test_note_counts_for_the_sizes_and_ranks_that_it_was_made_for(tmp_path):
    world = World(0, 1, 0, torch.device("cpu"))

    def fitting(batch):
        return memory_shortage.fitting(tmp_path, config(runs.config(batch=batch)), world)

    by_epoch = {"global": 32, "micro": {0: 32, 5: 24}}
    assert fitting(by_epoch) == memory_shortage.Fitting(32, 24)
    shortage(tmp_path, runs.config(batch=by_epoch), world)
    assert fitting(by_epoch) == memory_shortage.Fitting(32, 12)
    shortage(tmp_path, runs.config(batch=by_epoch), world)
    assert fitting(by_epoch) == memory_shortage.Fitting(32, 6)
    assert fitting({"global": 32, "micro": {0: 32, 5: 16}}) == memory_shortage.Fitting(32, 16)
    assert fitting({"global": 16}) == memory_shortage.Fitting(16, 16)
    note = (tmp_path / "micro.json").read_text()
    for damaged in ("{", "[]", note.replace('"evaluation": 6', '"evaluation": "six"')):
        (tmp_path / "micro.json").write_text(damaged)
        assert fitting(by_epoch) == memory_shortage.Fitting(32, 24), damaged


def test_the_command_on_one_rank_begins_again_by_itself(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    starts = []

    class Trainer:
        fresh = True

        def fit(self):
            starts.append(self.fresh)
            if len(starts) < 3:
                raise MemoryShortage("out of memory", remedy="the next start takes micro-batches of 6")

    command._fit(Trainer())
    assert starts == [True, False, False]
    assert capsys.readouterr().err.count("the training starts again") == 2


def test_a_rank_leaves_the_new_start_to_its_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "0")

    class Trainer:
        def fit(self):
            raise MemoryShortage("out of memory")

    with pytest.raises(MemoryShortage):
        command._fit(Trainer())


def test_a_shortage_in_the_first_step_after_an_interruption_is_not_remembered(tmp_path, monkeypatch):
    """Processes of the start before may have held the memory. A second shortage in the first step is remembered."""
    world, settings = World(0, 1, 0, torch.device("cpu")), runs.config(batch={"global": 32, "micro": 8})
    world.heartbeat.phase = Phase.FIRST_STEP
    monkeypatch.setenv(INTERRUPTED, "1")
    first = shortage(tmp_path, settings, world)
    assert isinstance(first, MemoryShortage)
    assert "the next start takes the same sizes" in str(first)
    assert not (tmp_path / "micro.json").exists()
    monkeypatch.setenv(INTERRUPTED, "0")  # as the launcher sets it after a shortage
    assert "the next start takes micro-batches of 4" in str(shortage(tmp_path, settings, world))
    monkeypatch.setenv(INTERRUPTED, "1")
    world.heartbeat.phase = Phase.TRAINING
    assert "the next start takes micro-batches of 2" in str(shortage(tmp_path, settings, world))
