"""The memory that a start waits for, because processes of the start before may hold it."""

import json

import pytest
import torch

from lockstep.core import devices
from lockstep.core.parallel.launched import FOLDER
from lockstep.core.parallel.world import World
from lockstep.launch import left_behind

SIZE = 1000 << 20


class Device(devices.Device):
    """A device whose free memory is what a test says, a figure for each question."""

    def __init__(self, *free):
        self.free = list(free)

    def free_memory(self):
        return self.free.pop(0), SIZE

    def users(self):
        return ["process 7 (python) holds 900 MiB"]


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Start a rank on a device, with the notes of the starts before."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(left_behind.FREE, "{}")
    monkeypatch.setattr(left_behind, "_LOOK_AGAIN_S", 0.0)

    def start(device):
        monkeypatch.setattr(devices, "of", lambda _: device)
        left_behind.wait_for_memory(World(0, 1, 0, torch.device("cpu")))
        left_behind.keep_notes(tmp_path)

    return start


def test_a_restart_waits_until_as_much_memory_is_free_as_at_the_first_start(starts, capfd):
    starts(Device(900 << 20))
    again = Device(100 << 20, 500 << 20, 895 << 20, 7)
    starts(again)
    assert again.free == [7], "a hundredth of the memory may be missing"
    starts(Device(950 << 20))
    assert capfd.readouterr().err == ""


def test_memory_that_others_keep_is_told_with_their_names(starts, monkeypatch, capfd):
    starts(Device(900 << 20))
    monkeypatch.setattr(left_behind, "_FREED_S", -1.0)
    starts(Device(100 << 20))
    said = capfd.readouterr().err
    assert "100 MiB of cpu are free, but 900 MiB were at the first start: process 7 (python) holds 900 MiB" in said


def test_nothing_is_noted_without_a_launcher_or_a_memory_of_its_own(starts, monkeypatch, tmp_path):
    starts(devices.Cpu(torch.device("cpu")))
    monkeypatch.delenv(FOLDER)
    left_behind.wait_for_memory(World(0, 1, 0, torch.device("cpu")))
    assert not list(tmp_path.iterdir())
    assert json.loads(left_behind.os.environ[left_behind.FREE]) == {}
