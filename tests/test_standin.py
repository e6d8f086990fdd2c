"""The quick part of the tests on the simulated device (tests/standin), in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin.device import find_compiler

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler, which builds the simulated device")
@pytest.mark.timeout(600)  # the first time it compiles the device
def test_the_quick_part_on_the_simulated_device():
    command = [sys.executable, "-m", "pytest", "-m", "device and quick", "-p", "no:cacheprovider", "tests/standin"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
