"""A plugin of pytest, `-p tests.cpu_time`: its XML report says how many seconds of CPU time each test took.

They include the processes that the test started, and the warm ranks. No commands run in the background meanwhile.
Unlike seconds of a clock, they are about the same on a machine that is busy with other work.
"""

import contextlib
import os
from pathlib import Path

import pytest

from tests import in_shards

_TICKS = os.sysconf("SC_CLK_TCK")
_USED = slice(11, 15)
"""In a line of /proc/PID/stat, after the name: time of the process and of its children that have ended."""
_before = [0.0]


def used(pid):
    """Seconds of CPU time of a process and all that it has started."""
    seconds = 0.0
    with contextlib.suppress(OSError):  # it has ended just now
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(int, fields[_USED])) / _TICKS
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            seconds += sum(used(child) for child in children.read_text().split())
    return seconds


def pytest_collection_finish():
    _before[0] = used(os.getpid())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    now = used(os.getpid())
    item.user_properties.append((in_shards.CPU_S, max(0.0, now - _before[0])))
    _before[0] = now
