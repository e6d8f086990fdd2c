"""What a check of a plain local model does without: transformers, model classes, compilers, the search of layouts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.runs import settings

HEAVY = ("transformers", "datasets", "sympy", "torch._dynamo", "torch.distributed.tensor", "accelerate", "matplotlib")
PLANNER = ("prediction", "simulation", "training", "generation", "job", "network", "layouts.search", "gpus")
OWN = ("engine.hooks.kept_rollouts", "backends.megatron", "backends.deepspeed")
CODE = """
import json, re, sys
from pathlib import Path
sys.argv[1:] = ["check", sys.argv[1]]
from coalign import cli
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
status = Path("/proc/self/status")  # getrusage counts what the parent had when it forked
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) // 1024 if status.exists() else 0
print(json.dumps({"loaded": [*sys.modules], "MiB": peak}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
@pytest.mark.parametrize("template", ["none", "auto"])
def test_a_check_of_a_plain_model_loads_neither_transformers_nor_the_planner(tmp_path, algorithm, template):
    config = settings(tmp_path, algorithm)
    config["data"]["chat_template"] = template
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-c", CODE, str(tmp_path / "run.yaml")]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "no problem found" in shown
    found = json.loads(shown.splitlines()[-1])
    unwanted = {*HEAVY, *(f"coalign_plan.{name}" for name in PLANNER), *(f"coalign.{name}" for name in OWN)}
    assert not unwanted.intersection(found["loaded"])
    assert len([name for name in found["loaded"] if name.startswith("coalign")]) <= 240
    assert found["MiB"] <= 300
