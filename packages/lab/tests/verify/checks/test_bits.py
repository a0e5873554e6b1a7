"""The check of the same bits on any number of ranks, on tasks whose result depends on that number."""

import os

import pytest
import torch.distributed as dist

from lockstep.configs import config_file
from lockstep.core.parallel.pretended import pretended_world
from lockstep_lab.verify import command, same_bits
from lockstep_lab.verify.checks import bits as checks_bits
from lockstep_lab.verify.checks.bits import bits
from lockstep_lab.verify.dependence import noted_reads, state_outside
from lockstep_lab.verify.experiments import ExperimentFailed
from lockstep_lab.verify.result import passed
from lockstep_lab.verify.same_bits import BitsOutcome, Way, first_difference
from lockstep_lab.verify.task_probe import TaskProbe
from packages.lab.tests.verify import rank_tasks
from packages.lab.tests.verify.made_up import experiments
from tests import ranks, runs


def verified(folder, kind, checks=("bits",), nproc=2, **sections):
    """The result of each check, by name."""
    settings = runs.config(task={"kind": f"{rank_tasks.__file__}:{kind}"}, **sections)
    config = config_file.parse(settings).model_dump(by_alias=True)
    result = command.verify(config, nproc, folder, checks=checks, steps=6, tell=lambda _: None, workers=ranks._ranks)
    return {check.name: check for check in result.checks}


WAYS = [Way(((1, None),)), Way(((2, None),))]


@pytest.mark.parametrize(
    ("probe", "is_compared"),
    [
        (TaskProbe(), False),
        (TaskProbe(random_without_dropout=["randn_like"]), True),
        (TaskProbe(coupling=0.1, by_statistics="the module 1"), True),
        (TaskProbe(coupling=0.1), False),  # a fault, which the comparison must find
        (TaskProbe(random_without_dropout=["randn_like"], collectives=["all_gather"]), False),
    ],
)
def test_a_right_task_that_depends_on_the_split_is_compared_on_virtual_ranks(probe, is_compared, monkeypatch):
    monkeypatch.setattr(checks_bits, "compared", lambda experiments, ways: passed("the same bits"))
    found = checks_bits.instead(experiments({"task-probe": probe}), WAYS)
    assert (found is not None) == is_compared
    if is_compared:
        assert found.notes[0].startswith("compared with parallel.virtual_ranks, because ")

    def refuse(experiments, ways):
        raise ExperimentFailed("bits", "SyncBatchNorm", refused=True)

    monkeypatch.setattr(checks_bits, "compared", refuse)
    found = checks_bits.instead(experiments({"task-probe": probe}), WAYS)
    assert found is None or found.status == "not shown"


def test_a_right_task_has_the_same_bits_on_1_to_4_ranks(tmp_path):
    found = verified(tmp_path, "Right", batch={"global": 2}, train={"ema_decay": 0.9})["bits"]
    assert found.status == "passed", found.reason
    assert "on 1 rank; 2 ranks; 3 ranks; 4 ranks; 4, then 1, then 3 ranks" in found.reason
    assert len(found.rows) == 5
    assert len({row["sha256 of the checkpoint"] for row in found.rows}) == 1


CAUSES = {
    "ReadsRank": ("the rank is read: rank_tasks.py:", "reads RANK"),
    "Counts": ("state outside of the model's buffers", "the model.calls"),
    "Unseeded": ("virtual rank 0 had a different batch", "draws numbers that the seed does not determine"),
}


@pytest.mark.cases("Counts")
@pytest.mark.parametrize("kind", CAUSES)
def test_the_cause_of_other_bits_is_named(kind, tmp_path):
    found = verified(tmp_path, kind)["bits"]
    assert found.status == "fault"
    assert all(words in found.reason for words in CAUSES[kind]), found.reason
    assert "after step 1 " in found.reason
    assert f"{rank_tasks.__file__}:{kind} --checks {'determinism' if kind == 'Unseeded' else 'bits'}" in found.reason


@pytest.mark.exhaustive  # the engine's tests show that it seeds such generators
def test_a_generator_of_the_task_is_seeded_on_any_number_of_ranks(tmp_path):
    assert verified(tmp_path, "OwnGenerator")["bits"].status == "passed"


@pytest.mark.exhaustive  # the check `bits` demands them above
def test_with_virtual_ranks_other_checks_demand_the_same_bits(tmp_path):
    found = verified(tmp_path, "Right", checks=["ranks", "elastic"], parallel={"virtual_ranks": 2})
    for check in found.values():
        assert (check.status, check.bound) == ("passed", 0.0), check.reason
        assert "2 virtual ranks" in check.reason
    found = verified(tmp_path / "counts", "Counts", checks=["ranks"], parallel={"virtual_ranks": 2})
    assert "the model.calls" in found["ranks"].reason


def test_one_virtual_rank_shows_nothing():
    assert bits(experiments(parallel={"virtual_ranks": 1})).status == "not shown"


def outcome(loss=1.0, batch=7, weight=5, checkpoint="a"):
    return BitsOutcome(
        {1: {"train/loss": 2.0}, 2: {"train/loss": loss}},
        {1: [1, 2], 2: [3, batch]},
        {step: [{"model.a": (0, 4, (0, 5)), "model.b": (0, 4, (0, weight))}] for step in (1, 2)},
        checkpoint,
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (outcome(loss=1.5), "after step 2 train/loss is 1.0 and 1.5"),
        (outcome(weight=6), "after step 1 model.b and 0 other tensors differ"),
        (outcome(batch=8), "after step 2 virtual rank 1 had a different batch"),
        (outcome(checkpoint="b"), "the files of the last checkpoint differ"),
    ],
)
def test_the_first_difference_is_named(other, words):
    assert first_difference(outcome(), outcome(), 2) is None
    assert first_difference(outcome(), other, 2).words == words


def test_a_batch_is_made_to_fit_and_a_mesh_is_left_out():
    made = experiments({"data-sizes": [(240, 9)]}, batch={"global": 2}, parallel={"strategy": "fsdp"})
    config = same_bits._config(made)
    assert config["batch"]["global"] == 8
    assert (config["parallel"]["strategy"], config["parallel"]["virtual_ranks"]) == ("ddp", 4)


def test_reads_of_the_rank_and_state_outside_of_buffers_are_found(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    task = rank_tasks.ReadsRank()
    model = rank_tasks.Counting()
    with noted_reads() as reads:
        task.loss(model, task.train_data()[:4])
        assert os.getenv("WORLD_SIZE", "none")
        with pretended_world(2, 1):
            assert dist.get_rank() == 1
    assert [read.partition(":")[0] for read in reads] == ["rank_tasks.py", "test_bits.py", "test_bits.py"]
    assert [read.rpartition(" ")[2] for read in reads] == ["RANK", "WORLD_SIZE", "get_rank()"]
    before = state_outside(task, task.train_data(), model)
    model(task.train_data()[:4][0])
    after = state_outside(task, task.train_data(), model)
    assert [name for name in after if after[name] != before[name]] == ["the model.calls"]
