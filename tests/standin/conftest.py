"""Tests on the simulated device. They run in processes of their own: `make test-device`."""

import pytest

from tests.standin import device


@pytest.fixture(scope="session", autouse=True)
def _device():
    """The device, registered before the first backward of this process."""
    if device.find_compiler() is None:
        pytest.skip("no C++ compiler, which builds the simulated device (set CXX, or install g++)")
    device.load()


@pytest.fixture(autouse=True)
def _waits_for_everything(request):
    """No test may use bytes of another stream without having waited for them, but for those that show it."""
    device.read_races()
    yield
    races = device.read_races()
    if "races" not in request.keywords:
        assert not races, "\n".join(races)
