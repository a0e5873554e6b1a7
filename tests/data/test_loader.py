"""Samples are prepared the same wherever and whenever they are prepared; bad ones are named."""

import gc
import random

import numpy as np
import pytest
import torch

from lockstep import LockstepError, Trainer
from lockstep.data.loader import Loader, MicroBatches, StepIterator
from lockstep.data.order import MicroBatchPlan, StepPlan
from lockstep.training_run import TrainingRun
from tests import own_tasks, runs
from tests.ranks import run_ranks

CPU = torch.device("cpu")


class Noisy(own_tasks.FromFiles):
    """Draws from all three random number generators."""

    def prepare(self, sample, epoch, training):
        return sample[0][:1], torch.rand(1), np.random.rand(), random.random()


def prepared(workers, micro, start, world=1):
    """What each sample became, by (step, index)."""
    task = Noisy(24)
    plan = StepPlan(24, 8, micro, world, seed=3)
    found = {}
    for rank in range(world):
        loader = Loader(MicroBatches(task.train_data(), task, 3, training=True), workers, CPU)
        for step, micros in enumerate(StepIterator(loader, plan, rank=rank, start=start, stop=6), start):
            for item in micros:
                _, torch_draw, numpy_draw, python_draw = item.batch
                for place, index in enumerate(item.indices):
                    found[step, index] = (float(torch_draw[place]), float(numpy_draw[place]), float(python_draw[place]))
    return found


def test_randomness_of_a_sample_depends_on_nothing_but_seed_epoch_and_index():
    reference = prepared(workers=0, micro=8, start=0)
    assert len(set(reference.values())) == len(reference) == 48  # two epochs of 24: all draws differ
    assert prepared(workers=2, micro=3, start=0, world=2) == reference
    resumed = prepared(workers=0, micro=5, start=4)
    assert resumed == {key: value for key, value in reference.items() if key[0] >= 4}


def test_preparing_leaves_the_training_rng_to_the_step():
    """The forward pass is seeded by the step: dropout is the same whatever was drawn while loading."""
    one, _ = runs.fit(own_tasks.Dropout(), runs.config(data={"workers": 0}))
    other, _ = runs.fit(own_tasks.Dropout(), runs.config(data={"workers": 2}))
    assert runs.difference(one, other) == 0


def test_tensors_read_at_once_are_those_read_one_by_one():
    class OneByOne(own_tasks.Plain):
        def collate(self, samples):
            return super().collate(samples)

    quick, slow = (MicroBatches(task.train_data(), task, 0, training=True) for task in (own_tasks.Plain(), OneByOne()))
    assert quick.at_once
    assert not slow.at_once
    micro_batch = MicroBatchPlan((7, 3, 200), 0, False)
    for one, other in zip(quick[micro_batch].batch, slow[micro_batch].batch, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    assert type(quick[micro_batch].batch) is type(slow[micro_batch].batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_sample_names_its_file(workers):
    task = own_tasks.FromFiles(8, broken=[5])
    loader = Loader(MicroBatches(task.train_data(), task, 0, training=True), workers, CPU)
    with pytest.raises(
        LockstepError, match=r"folder/005\.png: sample 5 cannot be read: OSError: truncated file"
    ) as caught:
        list(loader.run(lambda: [MicroBatchPlan((4, 5, 6), 0, False)]))
    assert "data.on_error=skip" in str(caught.value)


def test_skipped_samples_weigh_nothing_and_are_reported(tmp_path):
    """Training without the broken samples is training on the others: the mean is over those that count."""
    broken = [3, 11, 12, 13]
    settings = runs.config(
        data={"on_error": "skip"}, batch={"global": 40, "micro": 4}, train={"steps": 3}, log={"every_steps": 3}
    )

    torch.manual_seed(0)
    task = own_tasks.FromFiles(40, broken)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    batch = [
        torch.stack(part)
        for part in zip(*(task.files[index] for index in range(40) if index not in broken), strict=True)
    ]
    for _ in range(3):
        optimizer.zero_grad()
        (task.loss(model, batch) / 36).backward()
        optimizer.step()

    for world in (1, 2):
        for weights, results in run_ranks(
            world, runs.fit_kind, "FromFiles", {"length": 40, "broken": broken}, settings, None
        ):
            assert runs.difference(weights, model.state_dict()) < 1e-10
            assert results["data/bad"] == 3 * len(broken)
    Trainer(settings, run_dir=tmp_path, quiet=True).fit(own_tasks.FromFiles(40, broken))
    log = (tmp_path / "train.log").read_text()
    assert all(f"folder/{index:03d}.png" in log for index in broken)


def test_micro_batch_of_nothing_but_bad_samples_becomes_a_filler():
    task = own_tasks.FromFiles(8, broken=[2, 3])
    micro_batches = MicroBatches(task.train_data(), task, 0, training=True, on_error="skip")
    micro = micro_batches[MicroBatchPlan((2, 3), 0, False)]
    assert micro.filler
    assert micro.samples == 0
    assert [index for index, _ in micro.bad] == [2, 3]


def test_data_without_any_readable_sample_is_an_error():
    task = own_tasks.FromFiles(5, broken=range(5))
    with pytest.raises(LockstepError, match="none of"):
        MicroBatches(task.train_data(), task, 0, training=True, on_error="skip")[MicroBatchPlan((2,), 0, False)]


def test_training_run_is_freed_at_its_end_without_a_garbage_collection(tmp_path):
    """It holds the evaluation's loader, whose workers would live on."""
    gc.collect()
    gc.disable()
    try:
        Trainer(runs.config(train={"steps": 2}), run_dir=tmp_path, quiet=True).fit(own_tasks.Plain())
        assert not any(isinstance(found, TrainingRun) for found in gc.get_objects())
    finally:
        gc.enable()
