"""One step on one GPU: where the host waits, what runs ahead, random numbers, and recomputation."""

import pytest
import torch

from tests import own_tasks
from tests.gpu import cases

pytestmark = pytest.mark.gpu
ALLOWED_READS = {"fp32": 0, "bf16": 0, "fp16": 1}
"""Reads of the device in a step that writes no log. With fp16 the host must know whether the gradients overflowed."""
STEPS = 6


@pytest.mark.parametrize("precision", ALLOWED_READS)
@pytest.mark.parametrize("kind", ["attention", "convolutions", "two heads"])
def test_step_that_does_not_log_does_not_wait_for_the_device(kind, precision, place, tmp_path):
    make = {"attention": cases.Attention, "convolutions": cases.Convolutions}.get(kind)
    task = make() if make else own_tasks.TwoHeads(dtype=torch.float32)
    settings = place.settings(
        precision=precision,
        batch={"global": 24, "micro": 12},
        optim={"clip_norm": 1.0},
        train={"steps": STEPS, "ema_decay": 0.9},
        log={"every_steps": 100},
    )
    reads, _ = cases.reads_in_steps(place, task, settings, tmp_path / "run")
    assert len(reads) <= ALLOWED_READS[precision] * (STEPS - 2), "\n".join(reads)


def test_batches_are_copied_from_pinned_memory_on_a_queue_of_their_own(gpu, tmp_path):
    settings = gpu.settings(batch={"global": 24}, train={"steps": 6}, data={"workers": 0})
    with cases.prepared(own_tasks.Masked(dtype=torch.float32), settings) as run:
        cases.take_steps(run, 2)
        if gpu.python:
            gpu.python.log.clear()
            cases.take_steps(run, 2)
            streams = {one.stream for one in gpu.python.log if "copy_" in one.name and "device_copies" in one.where}
            assert streams
            assert 0 not in streams
            return
        with gpu.queued(tmp_path / "trace.json") as (copies, kernels):
            cases.take_steps(run, 2)
    assert len(copies) >= 6, "two batches of three tensors each"
    computing = {stream for _, stream, _, _ in kernels}
    batches = [(name, stream) for name, stream, _, _ in copies if stream not in computing]
    assert len(batches) >= 6, copies
    assert all("Pinned" in name for name, _ in batches), copies


def test_copy_of_the_next_batch_runs_beside_the_computation(cuda, tmp_path):
    task = cases.Long()
    settings = cuda.settings(batch={"global": task.samples}, train={"steps": 6}, optim={"name": "SGD", "lr": 1e-4})
    with cases.prepared(task, settings) as run:
        cases.take_steps(run, 2)
        with cuda.queued(tmp_path / "trace.json") as (copies, kernels):
            cases.take_steps(run, 4)
    overlapping = [
        copy
        for _, stream, copy, lasts in copies
        if any(other != stream and begin < copy + lasts and copy < begin + long for _, other, begin, long in kernels)
    ]
    assert overlapping, (copies, kernels)


def disturbed(place):
    """Draw from the device's generator, as a user's code might before a training."""
    torch.rand(100, device=place.device)
    torch.rand(7)


def test_dropout_on_the_device_depends_on_seed_and_step_alone(place):
    settings = place.settings(batch={"global": 24, "micro": 12}, train={"steps": 6})
    expected = cases.weights(cases.Attention(), settings)
    disturbed(place)
    assert not cases.same(cases.weights(cases.Attention(), settings), expected)
    assert cases.same(cases.weights(cases.Attention(), settings | {"seed": 1}), expected)


def test_micro_batches_of_a_step_have_masks_of_their_own(place):
    masks = []

    class Kept(own_tasks.Plain):
        def loss(self, model, batch):
            if model.training:
                masks.append(torch.nn.functional.dropout(torch.ones(64, device=batch[0].device), 0.5).cpu())
            return super().loss(model, batch)

    with cases.prepared(Kept(dtype=torch.float32), place.settings(batch={"global": 24, "micro": 8})) as run:
        cases.take_steps(run, 2)
    assert len(masks) == 6
    assert len({tuple(mask.tolist()) for mask in masks}) == 6


@pytest.mark.parametrize("kind", ["positional", "keywords", "attention"])
def test_recomputed_blocks_draw_the_same_dropout(kind, place):
    def make():
        if kind == "positional":
            return own_tasks.Deep(dropout=0.3)
        return cases.CalledByKeyword() if kind == "keywords" else cases.Attention()

    settings = place.settings(train={"steps": 6})
    expected = cases.weights(make(), settings)
    found = cases.weights(make(), settings | {"compute": {"activation_checkpointing": True}})
    for tensors in (expected, found):
        tensors.pop("calls", None)
    assert not cases.same(found, expected)
