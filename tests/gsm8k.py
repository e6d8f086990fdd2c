"""Where the files of GSM8K are: in the directory that the environment variable GSM8K names, or beside the checkout."""

import os
from pathlib import Path

import pytest

DIRECTORY = Path(os.environ.get("GSM8K") or Path(__file__).resolve().parents[2] / "shared" / "data")
TRAIN, TEST = DIRECTORY / "gsm8k_train.jsonl", DIRECTORY / "gsm8k_test.jsonl"
needs_gsm8k = pytest.mark.skipif(not DIRECTORY.exists(), reason=f"{DIRECTORY} is not here; GSM8K says where else")
