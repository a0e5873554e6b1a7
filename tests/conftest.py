import gc
import os
import tempfile
from pathlib import Path

import pytest

gc.disable()  # until everything is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
_cache = tempfile.TemporaryDirectory(prefix="lockstep-cache-")
os.environ["LOCKSTEP_CACHE"] = _cache.name  # of all ranks and commands that tests start, too

import torch  # noqa: E402

from tests import ranks  # noqa: E402
from tests.processes import beside  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _processes():
    beside.start()
    yield
    ranks.close()
    beside.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(
        key=lambda item: item.get_closest_marker("launched") is not None
    )  # the last to need what runs beside them


def pytest_collection_finish(session):
    beside.plan(session.items)
    gc.collect()
    gc.freeze()  # torch and the tests stay: collecting garbage need not look through them
    gc.enable()


@pytest.fixture
def launch(request):
    """What `@launched` asked for, when it has ended."""
    return beside.wait(request.node)


@pytest.fixture
def shared_data():
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data is not beside this checkout (../shared/data)")
    return folder
