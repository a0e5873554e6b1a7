"""A clock that moves only while somebody sleeps: what tests measure then does not depend on how quick a machine is."""

import contextlib
import time
from unittest import mock


@contextlib.contextmanager
def only_sleep_takes_time():
    """In this process, `time.perf_counter` tells the sum of all `time.sleep`, which take no time of the machine."""
    slept = [0.0]
    with mock.patch.multiple(time, perf_counter=lambda: sum(slept), sleep=slept.append):
        yield
