"""`python -m tests.golden.record [NAME …]`: run the golden runs (all, or these) and keep their curves.

Say in the commit why they moved.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden.curves import WATCHED, curve

FILE = Path(__file__).with_name("curves.json")

if __name__ == "__main__":
    torch.set_num_threads(1)
    kept = json.loads(FILE.read_text())
    for name in sys.argv[1:] or WATCHED:
        with tempfile.TemporaryDirectory() as directory:
            kept[name] = curve(name, Path(directory))
        FILE.write_text(json.dumps({name: kept[name] for name in WATCHED if name in kept}, indent=1) + "\n")
