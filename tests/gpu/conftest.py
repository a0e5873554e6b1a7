import os

import pytest

from tests.gpu.place import VARIABLE, Place, gpus, wanted

WITHOUT = f"needs a GPU with torch's CUDA interface; {VARIABLE}=cpu runs the same test on the CPU"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            # What a library says on a GPU was never seen when the tests were written: it must not fail them.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def _place():
    if not gpus():
        pytest.skip(WITHOUT)
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # of deterministic trainings; CUDA reads it as it starts
    return Place(wanted())


@pytest.fixture
def place(_place, request):
    """The device of a test. Memory of earlier tests is given back."""
    parameters = getattr(request.node, "callspec", None)
    if _place.python and parameters and parameters.params.get("precision", "fp32") != "fp32":
        pytest.skip("the device in Python has no autocast")
    _place.free()
    return _place


@pytest.fixture
def gpu(place):
    """As `place`, for what a CPU does not have."""
    if place.kind == "cpu":
        pytest.skip("the CPU has no such thing")
    return place


@pytest.fixture
def cuda(place):
    """As `place`, for what only CUDA has."""
    if place.kind != "cuda":
        pytest.skip("only CUDA has it")
    return place


@pytest.fixture
def processes_place(place):
    """As `place`, for tests whose processes find the device by themselves."""
    if place.kind == "pygpu":
        pytest.skip("other processes do not have the device in Python")
    return place


@pytest.fixture
def two():
    """The config's key `device` of tests with two ranks on two GPUs."""
    if gpus() < 2:
        pytest.skip(f"needs two GPUs with torch's CUDA interface; {VARIABLE}=cpu runs the same test on two CPU ranks")
    return wanted()
