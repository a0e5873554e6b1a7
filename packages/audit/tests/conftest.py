import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # ranks record their collectives

import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _removes_what_forked_processes_printed():
    yield
    from packages.audit.tests import forked

    forked.folder.cleanup()
