import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests import ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _warm_ranks():
    yield
    ranks.close()


@pytest.fixture
def shared_data():
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data is not beside this checkout (../shared/data)")
    return folder
