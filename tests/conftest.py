"""Settings, hooks and fixtures of the tests of the engine, the recipes and the lab."""

import functools
import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

gc.disable()  # until all tests are imported: collecting garbage takes a fifth of that time
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # ranks record their collectives
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # under nohup, or in the background of a script
        signal.signal(number, handler)
_cache = tempfile.TemporaryDirectory(prefix="lockstep-cache-")
os.environ["LOCKSTEP_CACHE"] = _cache.name  # ranks and commands that tests start inherit it

_started = [0]
sys.addaudithook(lambda event, _: _started.__setitem__(0, _started[0] + (event == "subprocess.Popen")))

import torch  # noqa: E402
import typer.testing  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests import ranks  # noqa: E402
from tests.processes import background  # noqa: E402

torch.set_num_threads(1)
typer.testing._get_command = functools.cache(typer.testing._get_command)  # it builds all commands for each call
# The same examples each time, and no limit on the time of one: hypothesis would take 0.2 s.
settings.register_profile("any speed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


_frozen_modules = [0]
COSTLY = Path(__file__).with_name("costly.txt")
"""Tests that are left to `make test-all`: `in_shards.py --record` writes their names."""


def pytest_runtest_logfinish():
    """Tests collect garbage, which takes long where all of torch and transformers is looked through."""
    if len(sys.modules) != _frozen_modules[0]:
        gc.collect()
        gc.freeze()
        _frozen_modules[0] = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    costly = set(COSTLY.read_text().splitlines()) if COSTLY.is_file() else set()
    for item in items:
        if item.nodeid in costly:
            item.add_marker("exhaustive")
        if (kept := item.get_closest_marker("cases")) and not item.callspec.id.startswith(kept.args):
            item.add_marker("exhaustive")
    done = yield  # pytest leaves out what `-m` does not select
    # Tests that wait for commands come last: the commands run meanwhile.
    items.sort(key=lambda item: item.get_closest_marker("launched") is not None)
    return done


def pytest_collection_finish(session):
    background.plan(session.items)
    gc.collect()
    gc.freeze()  # torch and the tests stay, so collecting garbage need not look through them
    gc.enable()
    if not session.config.option.collectonly:
        background.start()


def pytest_sessionfinish():
    ranks.close()
    background.close()


def pytest_terminal_summary(terminalreporter):
    commands = sum(len(launch.mark.args) for launch in background.launches.values())
    terminalreporter.write_line(f"{commands} commands ran in the background; tests started {_started[0]} programs more")


@pytest.fixture
def launch(request):
    """The results of the commands of `@launched`, when they have ended."""
    return background.wait(request.node)


@pytest.fixture
def shared_data():
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data is not next to this checkout (../shared/data)")
    return folder
