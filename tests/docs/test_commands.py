"""The commands of the documentation, run as they stand: page by page in their order, in a copy of the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import CodeBlock, list_pages, read_page
from tests.runs import ROOT

SHORT = "runtime.steps=2 runtime.eval_prompts=4 runtime.eval_at_start=false runtime.plots=false"
NOT_RUN = ("source ", "make ")  # the environment is there already; what make does is run by those who call it


def list_runnable(page: str) -> list[str]:
    """Return the commands of a page's blocks of shell that have no mark."""
    blocks = [block for block in read_page(page).blocks if block.language == "bash" and not block.mark]
    return [line for block in blocks for line in split_lines(block) if not line.startswith(NOT_RUN)]


def split_lines(block: CodeBlock) -> list[str]:
    """Return the commands of a block; one that writes a file has all of its lines."""
    text = re.sub(r"\\\n", " ", block.text)
    found = [match[0] for match in re.finditer(r"^.*<<'(\w+)'.*\n(?:.*\n)*?\1\n|^.*\n", text, re.MULTILINE)]
    return [command.strip("\n") for command in found if command.strip() and not command.startswith("#")]


PAGES = [page for page in list_pages() if list_runnable(page)]


def test_the_first_pages_are_run():
    assert {"docs/commands.md", "docs/tutorials/rlhf.md"} <= set(PAGES)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_in_their_order(tmp_path, page):
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=tmp_path, input=tracked, check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("GSM8K", "MODEL")}
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {"PATH": path, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for command in list_runnable(page):
        command = command if "<<" in command else command.partition(" #")[0].strip()
        if command == "python examples/gsm8k.py":
            command += " --made"  # no network here
        if "examples/gsm8k_" in command:
            environment["MODEL"] = "runs/gsm8k/model"
            command += " models.policy.sampling.max_new_tokens=8"
        if command.startswith("coalign train"):
            command += f" {SHORT}"
        said = "\n/quit\n" if " chat " in command else None
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, input=said, text=True, capture_output=True, timeout=900
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, f"{command}\n{done.stderr[-3000:]}"
