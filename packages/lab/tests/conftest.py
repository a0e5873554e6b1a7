"""The fixtures and hooks of the tests of the engine."""

from tests import conftest
from tests.conftest import launch as launch
from tests.conftest import shared_data as shared_data


def pytest_configure(config):
    if not config.pluginmanager.is_registered(conftest):  # only the tests of this package run
        config.pluginmanager.register(conftest, conftest.__file__)
