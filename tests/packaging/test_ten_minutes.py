"""docs/ten_minutes.md: its prompts, reward and run are as short as it says, and work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import find_model
from tests.packaging.licences import ROOT

TEXT = (ROOT / "docs" / "ten_minutes.md").read_text(encoding="utf-8")


def read_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_task_is_as_short_as_the_page_says():
    [reward], [run] = read_blocks("python"), read_blocks("yaml")
    assert len(reward.splitlines()) <= 5 and len(run.splitlines()) <= 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_from_its_prompts_to_its_model(tmp_path):
    _, prompts, run = read_blocks("bash")
    (tmp_path / "my_reward.py").write_text(read_blocks("python")[0])
    (tmp_path / "run.yaml").write_text(read_blocks("yaml")[0])
    short = "runtime.steps=1 runtime.prompts_per_step=2 runtime.samples_per_prompt=2 runtime.plots=false"
    program = Path(sys.executable).parent
    environment = {**os.environ, "SMOLLM2": str(find_model()), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{program}:{environment['PATH']}"
    script = prompts + run.replace("train run.yaml", f"train run.yaml {short}")
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [step] = [json.loads(line) for line in (tmp_path / "runs/brief/metrics.jsonl").read_bytes().splitlines()]
    assert 0 <= step["reward/mean"] <= 1 and (tmp_path / "runs/brief/model/model.safetensors").exists()
