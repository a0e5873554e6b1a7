"""Experiments: their configs, failures, and that each is made once."""

import pytest

from lockstep_lab.verify.experiments import ExperimentFailed
from lockstep_lab.verify.task_probe import TaskProbe
from lockstep_lab.verify.worker_functions import Answer
from lockstep_lab.verify.workers import WorkerEnded
from packages.lab.tests.verify.made_up import experiments, recording


def test_a_rank_that_ended_or_failed_is_a_failed_experiment():
    made = experiments(
        {
            "dead": [1, WorkerEnded(1, -9)],
            "failed": [Answer(1), Answer(error="oh no")],
            "refused": [Answer(error="no way", known=True, refused=True)],
        }
    )
    with pytest.raises(ExperimentFailed, match="dead: the process of rank 1 ended with exit code -9"):
        made.run("dead", 2, None)
    with pytest.raises(ExperimentFailed, match="failed: oh no") as caught:
        made.run("failed", 2, None)
    assert not caught.value.refused
    with pytest.raises(ExperimentFailed) as caught:
        made.run("refused", 1, None)
    assert (caught.value.refused, caught.value.error) == (True, "no way")


def test_an_experiment_is_made_once_and_so_is_one_that_fails():
    asked = []

    class Counting:
        def run(self, world, wrap, function, *arguments):
            asked.append(function.__name__)
            return [Answer(error="oh no") if function.__name__ == "data_sizes" else Answer(TaskProbe())] * world

    made = experiments(workers=Counting())
    made.answers = {}
    assert made.probe() is made.probe()
    for _ in range(2):
        with pytest.raises(ExperimentFailed, match="data-sizes: oh no"):
            made.data_sizes()
    assert asked == ["probe_task", "data_sizes"]


def test_trainings_of_other_lengths_are_other_experiments():
    made = experiments({"learned-1": recording([1.0]), "learned-4": recording([2.0])})
    assert made.learned_folder() == made.folder / "learned-1"
    assert made.learned(1)[0].losses == [1.0]
    assert made.learned(4)[0].losses == [2.0]
    assert made.learned(1)[0].losses == [1.0]
    assert made.learned_folder() == made.folder / "learned-4"


def test_a_short_training_is_the_users_but_for_its_length():
    made = experiments(
        schedule={"name": "cosine", "warmup_steps": 100},
        checkpoint={"every_steps": 7},
        parallel={"strategy": "single"},
        precision="bf16",
    )
    config = made.short_config(train__steps=20, batch__micro=5)
    assert config["train"]["steps"] == 20
    assert config["schedule"]["warmup_steps"] == 5
    assert config["batch"] == {"global": 24, "micro": 5, "per_rank": None, "accumulate": None}
    assert (config["checkpoint"]["every_steps"], config["log"]["every_steps"]) == (0, 1)
    assert (config["parallel"]["strategy"], config["precision"], config["optim"]["lr"]) == ("ddp", "bf16", 0.01)
    assert made.exact_config()["precision"] == "fp32"
    assert made.config["schedule"]["warmup_steps"] == 100
    assert made.config["precision"] == "bf16"


def test_epochs_end_within_few_steps_and_micro_batches_are_uneven():
    for batch in (4, 20, 24, 32, 100):
        for nproc in (1, 2, 3):
            made = experiments(batch={"global": batch}, nproc=nproc)
            assert 4 * batch < made.train_samples < 5 * batch
            assert 1 <= made.small_micro_batch < batch
            assert made.train_samples % batch
