"""`python -m tests.golden.record`: run the golden runs and keep their curves (say in the commit why they moved)."""

import json
import tempfile
from pathlib import Path

import torch

from tests.golden.curves import WATCHED, curve

FILE = Path(__file__).with_name("curves.json")

if __name__ == "__main__":
    torch.set_num_threads(1)
    kept = {}
    for name in WATCHED:
        with tempfile.TemporaryDirectory() as directory:
            kept[name] = curve(name, Path(directory))
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
