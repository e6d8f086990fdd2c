"""`python -m tests.golden.record [NAME …]`: run the golden runs (all, or these) and keep their curves and rollouts.

Say in the commit why they moved.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden.curves import WATCHED, curve
from tests.golden.rollouts import recorded

FILE = Path(__file__).with_name("curves.json")


def rollouts_file(name: str) -> Path:
    """Where the rollouts of a run are kept; not there for one without any."""
    return Path(__file__).with_name("rollouts") / f"{name}.safetensors"


if __name__ == "__main__":
    torch.set_num_threads(1)
    kept = json.loads(FILE.read_text())
    for name in sys.argv[1:] or WATCHED:
        with tempfile.TemporaryDirectory() as directory, recorded() as rollouts:
            kept[name] = curve(name, Path(directory))
        if rollouts.calls:
            rollouts.save(rollouts_file(name))
        FILE.write_text(json.dumps({name: kept[name] for name in WATCHED if name in kept}, indent=1) + "\n")
