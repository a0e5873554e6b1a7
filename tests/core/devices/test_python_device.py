"""Trainings on the device in Python: what they do on a GPU, as far as this shows without one."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core.errors import TrainingError
from lockstep.core.parallel import world
from lockstep.trainer.trainer import Trainer
from tests.python_device import NAME
from tests.ranks import run_on_python_device
from tests.selection import mainly


class Lines(lockstep.Task):
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))

    def train_data(self):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x.sum(1) > 0).long())

    def eval_data(self):
        return self.train_data()

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum")


def train(device, folder, changes):
    """Train on the device. Returns its reads by the host, and the names of its operations."""
    world.pick_device = lambda *_, **__: torch.device(NAME, 0)
    sections = {"batch": {"global": 16, "micro": 8}, "train": {"steps": 4}, "log": {"every_steps": 4, "writers": []}}
    config = {"name": "lines", "data": {"workers": 0}, **sections, **changes}
    Trainer(lockstep.core.config.sections.RunConfig(**config), run_dir=folder).fit(Lines())
    return device.reads(), [one.name for one in device.log]


def test_the_host_reads_the_device_where_it_logs_or_saves_and_nowhere_else(tmp_path):
    changes = {"optim": {"lr": 0.1, "clip_norm": 1.0}, "train": {"steps": 4, "ema_decay": 0.9}}
    reads, operations = run_on_python_device(train, str(tmp_path / "run"), changes)
    files = {where.split(":")[0] for _, where in reads}
    # The last two: passes beside the training look at what they have changed.
    assert files <= {
        "core/checkpoint/finite.py",
        "parts/checks/dry_run.py",
        "core/log_window.py",
        "core/loss_sums.py",
        "core/checkpoint/saver.py",
        "parts/operations.py",
        "core/parallel/buffers.py",
    }
    assert any("addmm" in name for name in operations)


def window_with_offloaded_norm(device):
    """What a window says of a step whose loss is on the device, and whose norm of gradients is on the host."""
    from lockstep.core.log_window import LogWindow
    from lockstep.core.parallel.world import World
    from lockstep.core.step import StepResult

    place = torch.device(NAME, 0)
    window = LogWindow(World(0, 1, 0, place), {}, 1)
    sums = {"step": 0, "samples": 4, "totals": {"": 4.0}, "indices": [(0,)], "counted": [True], "places": [0]}
    for norm in (1.0, float("inf")):
        result = StepResult(**sums, losses=[{"loss": torch.ones((), device=place)}], applied=True)
        result.grad_norm = torch.tensor(norm)
        window.add(result, (None, None))
        try:
            window.check_finite()
        except TrainingError as error:
            return norm, error.what
    return None


def test_a_norm_of_offloaded_gradients_is_checked_with_losses_on_the_device():
    assert run_on_python_device(window_with_offloaded_norm) == (float("inf"), "the gradient norm is inf")


class Slow:
    """A clock that stands still, except where the host reads the device: this takes as long as all queued steps."""

    step_s = 0.25

    def __init__(self, device, log_window, data_s=0.0):
        self.now = self.done = 0.0  # of the host; when the device will have done all that is queued
        self.device, self.data_s = device, data_s
        note, events = device.note, {}

        def noted(name):
            what, _, number = name.partition(" ")
            if what == "record_event":
                events[number] = max(self.now, self.done)
            elif what == "host_waits_for_event":
                self.now = max(self.now, events[number])
            elif what == "read":
                self.now = max(self.now, self.done)
            note(name)

        device.note, device.clock = noted, lambda: max(self.now, self.done)
        log_window.time = self

    def perf_counter(self):
        return self.now

    def queue_step(self):
        self.done = max(self.now, self.done) + self.step_s

    def wait_for_data(self):
        self.now += self.data_s


def log_on_slow_device(device, folder, data_s):
    """The log of 8 steps of 16 samples, each of which takes the device 0.25 s."""
    from lockstep.core import build, log_window
    from lockstep.core.data import loader

    clock = Slow(device, log_window, data_s)
    read, step = loader.MicroBatches.__getitem__, build.train_step

    def read_slowly(micro_batches, plan):
        clock.wait_for_data()
        return read(micro_batches, plan)

    def queued(*arguments, **options):
        clock.queue_step()
        return step(*arguments, **options)

    loader.MicroBatches.__getitem__, build.train_step = read_slowly, queued
    try:
        sections = {"batch": {"global": 16, "micro": 8}, "train": {"steps": 8}, "log": {"every_steps": 4}}
        train(device, folder, sections | {"log": {"every_steps": 4, "writers": ["json_lines"]}})
    finally:
        loader.MicroBatches.__getitem__, build.train_step, log_window.time = read, step, time
        del device.note
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [(line["train/samples_per_s"], line["train/wait_share"]) for line in lines if "train/loss" in line]


@pytest.mark.parametrize(
    ("data_s", "samples_per_s", "wait_share"),
    mainly(
        [(0.1, 64 / 1.2, 0.2 / 1.2)],
        [
            # Four steps of 0.25 s.
            (0.0, 64 / 1.0, 0.0),
            # The data of a step take 0.2 s. The device waits for the first, and computes while the host reads others.
            (0.1, 64 / 1.2, 0.2 / 1.2),
            # The data of a step take 0.4 s. The device waits for the first, and for 0.15 s of each of the others.
            (0.2, 64 / 1.85, 0.85 / 1.85),
        ],
    ),
)
def test_speed_is_that_of_the_device_and_waiting_is_that_of_the_device(tmp_path, data_s, samples_per_s, wait_share):
    log = run_on_python_device(log_on_slow_device, str(tmp_path / "run"), data_s)
    for found, waited in log:
        assert found == pytest.approx(samples_per_s, abs=0.1)
        assert waited == pytest.approx(wait_share, abs=1e-3)
