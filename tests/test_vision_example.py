"""The example that learns to read pictures, in a process of its own: it does learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.runs import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tiny_model_learns_to_read_pictures_it_never_saw(tmp_path):
    environment = os.environ | {"PICTURES": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "examples.vision"]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    untrained, taught, rewarded = (
        float(share) for share in re.findall(r"([\d.]+) %", done.stdout.split("pictures:")[-1])
    )
    assert untrained < 10 and taught > 50 and rewarded > taught
