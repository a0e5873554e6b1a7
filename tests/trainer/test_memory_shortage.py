"""Memory that does not suffice outside of the passes of a step; and what a step costs in memory and reads."""

import json
import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core import devices
from lockstep.core.errors import MemoryShortage
from lockstep.core.parallel import world as worlds
from lockstep.core.parallel.precision import Precision
from lockstep.trainer.joining import Recorder
from lockstep.trainer.trainer import Trainer
from tests import own_tasks, rank_cases, runs
from tests.python_device import NAME
from tests.ranks import run_on_python_device, run_ranks
from tests.selection import mainly

CPU = devices.of(torch.device("cpu"))


# ---- which errors are shortages


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.distributed.DistBackendError(
            "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"
        ),
    ],
    ids=lambda error: str(error)[:40],
)
def test_a_shortage_is_known_whichever_library_reports_it(error):
    assert CPU.is_shortage(error)
    wrapped = RuntimeError("backend compiler failed")
    wrapped.__cause__ = error
    assert CPU.is_shortage(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("the shop is out of memory sticks"),
        MemoryShortage("out of memory: again"),
        RuntimeError("NCCL error: unhandled system error"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_other_errors_are_no_shortages(error):
    assert not CPU.is_shortage(error)


# ---- the update


@pytest.mark.parametrize(
    ("where", "step"), [("optimizer", 1), pytest.param("averages", 5, marks=pytest.mark.exhaustive)]
)
def test_an_update_that_does_not_fit_ends_all_ranks_and_the_next_start_takes_less(where, step, tmp_path):
    settings = runs.config(
        batch={"micro": 12},
        train={"steps": 8, "ema_decay": 0.9},
        checkpoint={"every_steps": 2, "mode": "sync"},
    )
    errors = run_ranks(2, rank_cases.update_out_of_memory, settings, tmp_path, None, step, where)
    assert "MemoryShortage" in [name for name, _, _ in errors]  # a rank may hear of the other's before its own
    for _, text, retryable in errors:
        assert f"step {step}, rank " in text
        assert "out of memory with micro-batches of 12: CUBLAS_STATUS_ALLOC_FAILED" in text
        assert retryable
    assert json.loads((tmp_path / "micro.json").read_text())["micro"] == 6
    expected, _ = runs.by_hand(own_tasks.Deep(), 8)
    for weights in run_ranks(2, rank_cases.update_out_of_memory, settings, tmp_path, None, 0, where):
        weights.pop("calls")
        assert runs.difference(weights, {name: tensor for name, tensor in expected.items() if name != "calls"}) < 1e-10


@pytest.mark.exhaustive  # as test_an_evaluation_that_does_not_fit_ends_the_ranks_and_is_smaller_at_the_next_start
def test_an_update_that_does_not_fit_with_one_sample_is_not_tried_again(tmp_path):
    settings = runs.config(batch={"global": 4, "micro": 1})
    ((_, error, retryable),) = run_ranks(1, rank_cases.update_out_of_memory, settings, tmp_path, 0, 1, "optimizer")
    assert "a micro-batch of one sample does not fit" in error
    assert not retryable


# ---- evaluation


@pytest.mark.parametrize("strategy", mainly(["ddp"], ["ddp", "fsdp"]))
def test_an_evaluation_that_does_not_fit_ends_the_ranks_and_is_smaller_at_the_next_start(strategy, tmp_path):
    settings = runs.config(
        batch={"micro": 6}, parallel={"strategy": strategy}, train={"steps": 2, "eval_every_steps": 2}
    )
    for name, text, retryable in run_ranks(2, rank_cases.evaluation_out_of_memory, settings, tmp_path, 5):
        assert name in ("MemoryShortage", "RankError")
        assert "out of memory in an evaluation with micro-batches of 6: CUDA error" in text
        assert retryable
    note = json.loads((tmp_path / "micro.json").read_text())
    assert (note["evaluation"], note.get("micro")) == (3, None)
    (expected,) = run_ranks(1, rank_cases.evaluation_out_of_memory, settings, tmp_path / "one", 99)
    for found in run_ranks(2, rank_cases.evaluation_out_of_memory, settings, tmp_path, 5):
        found = {name: value for name, value in found.items() if name.startswith("eval/")}
        assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-9)
        assert found["eval/samples"] == 24


class NeverEvaluates(own_tasks.Plain):
    """Its loss needs too much memory in evaluation mode, for more than three samples."""

    def loss(self, model, batch):
        if not model.training and len(batch[0]) > 3:
            rank_cases.shortage()
        return super().loss(model, batch)


def test_a_loss_that_needs_too_much_memory_in_evaluation_mode_alone_leaves_the_training_as_it_is(tmp_path):
    settings = runs.config(batch={"micro": 12}, train={"steps": 2, "eval_every_steps": 2})
    for evaluated in (6, 3):
        with pytest.raises(MemoryShortage, match="out of memory in an evaluation"):
            Trainer(settings, run_dir=tmp_path, quiet=True).fit(NeverEvaluates(eval_length=24))
        note = json.loads((tmp_path / "micro.json").read_text())
        assert (note["evaluation"], note.get("micro")) == (evaluated, None)
    assert Trainer(settings, run_dir=tmp_path, quiet=True).fit(NeverEvaluates(eval_length=24))["eval/samples"] > 0


# ---- on the device in Python


class Wide(lockstep.Task):
    """Batches are large beside the model, and so is a buffer that never changes."""

    def __init__(self, buffer=1):
        self.buffer = buffer

    def model(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 2), nn.BatchNorm1d(2))
        model.register_buffer("mask", torch.ones(self.buffer))
        return model

    def train_data(self):
        x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x.sum(1) > 0).long())

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x) * model.mask[0], y, reduction="sum")


def train(device, changes, buffer, limit=None, clear_after=None):
    """Train on the device. Returns the error, its peak in bytes, and its reads by the host after some steps."""
    worlds.pick_device = lambda *_, **__: torch.device(NAME, 0)
    device.reset_peak_memory_stats()
    before, device.limit = device.bytes, limit
    sections = {"batch": {"global": 64, "micro": 8}, "train": {"steps": 6}, "log": {"every_steps": 6, "writers": []}}
    config = {"name": "wide", "data": {"workers": 0}, "optim": {"name": "SGD", "lr": 0.1}, **sections, **changes}

    class Watch(Recorder):
        def __init__(self):
            pass

        def before_step(self, training):
            if training.step in (3, 5):
                peaks.append(device.most - before)
                reads.append(len(device.reads()))
                device.reset_peak_memory_stats()

    peaks, reads = [], []

    with tempfile.TemporaryDirectory() as folder:
        Trainer(lockstep.core.config.sections.RunConfig(**config), run_dir=folder, quiet=True).fit(
            Wide(buffer), Watch()
        )
    device.limit = None
    return peaks[1], reads[1] - reads[0]


def test_only_the_batch_in_use_and_the_next_are_on_the_device():
    peak, _ = run_on_python_device(train, {}, 1)
    batch = 8 * 256 * 4
    assert peak < 4 * batch  # of 8 micro-batches in each step


@pytest.mark.parametrize(("precision", "reads"), mainly([("fp16", 1)], [("fp32", 0), ("fp16", 1), ("bf16", 0)]))
def test_the_host_reads_the_device_at_most_once_in_a_step(precision, reads):
    _, found = run_on_python_device(train, {"precision": precision}, 1)
    assert found == 2 * reads  # in two steps


# ---- the loss scale


def test_a_step_of_fp16_is_that_of_grad_scaler():
    def run(step):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        precision = Precision("fp16", torch.device("cpu"))
        precision.scaler.set_growth_interval(3)
        applied = []
        for number in range(12):
            loss = precision.scaler.scale(model(torch.randn(4, 3)).sum())
            loss.backward()
            if number in (0, 4, 5):
                model.weight.grad[0, 0] = float("inf")
            precision.scaler.unscale_(optimizer)
            applied.append(step(precision, optimizer))
            optimizer.zero_grad()
        return model.weight.tolist(), precision.state(), applied

    def torchs_own(precision, optimizer):
        scale = precision.scaler.get_scale()
        precision.scaler.step(optimizer)
        precision.scaler.update()
        return precision.scaler.get_scale() >= scale

    assert run(Precision.step) == run(torchs_own)
