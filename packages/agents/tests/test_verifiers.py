"""A taskset of verifiers in its own interpreter: rows of data, GRPO, the same weights twice, failures of the hub."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coalign.types import Status
from coalign_agents.verifiers import VerifiersError, _share_worker, verifiers
from tests.environments.helpers import chosen, episode, play
from tests.environments.test_training import calculating
from tests.runs import ROOT, metrics, run, run_in_two_parts, weights_hash

ENV = {
    "taskset": {"id": "adding_taskset"},
    "agent": {"harness": {"id": "adding_taskset"}, "runtime": {"type": "subprocess"}},
}
VERSION = "verifiers==0.4.0"
TASK = {"prompt": "2+2=", "answer": "4", "system_prompt": "Say the sum.", "idx": 2}

FAKE = """#!%s
import json, sys
env = json.loads(sys.stdin.readline())["env"]
if env == "broken": sys.exit(3)
print(json.dumps({"ready": 2}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "play" and request["data"] == "die": sys.exit(4)
    print(json.dumps({"id": request["id"], "traces": [], "error": "TaskError: no image"}), flush=True)
"""


@pytest.fixture
def broken_hub(tmp_path):
    """A program that speaks the worker's lines, and fails where it is told to."""
    path = tmp_path / "python"
    path.write_text(FAKE % sys.executable)
    path.chmod(0o755)
    return str(path)


def fail(hub, env, task):
    one = episode("5", task=task)
    outcome = play(verifiers, one, python=hub, env=env).calls[0]
    assert one.status == Status.ERROR
    return str(outcome.error)


def test_a_hub_that_fails_is_one_line_and_drops_the_episode(broken_hub):
    assert "ended with exit code 3 at its start" in fail(broken_hub, "broken", "x")
    assert "TaskError: no image" in fail(broken_hub, {}, "fail")
    assert "ended with exit code 4" in fail(broken_hub, {}, "die")
    assert "no file /nowhere" in fail("/nowhere", {}, "x")


def test_the_next_episode_has_another_worker_when_one_has_died(broken_hub):
    async def ask_twice():
        worker = await _share_worker(broken_hub, {})
        assert await _share_worker(broken_hub, {}) is worker and worker.tasks == 2
        with pytest.raises(VerifiersError, match="exit code 4"):
            await worker.ask(do="play", data="die")
        other = await _share_worker(broken_hub, {})
        assert other is not worker
        other.close()
        await other.process.wait()

    asyncio.run(ask_twice())


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The interpreter that has verifiers, and the taskset of these tests. From PyPI, unless a variable names one."""
    python = os.environ.get("COALIGN_VERIFIERS_PYTHON")
    if python is None:
        folder = tmp_path_factory.mktemp("verifiers")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(folder / "bin" / "python")
        installed = subprocess.run([python, "-m", "pip", "install", "--quiet", VERSION], capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"no {VERSION} from PyPI: {installed.stderr[-200:]}")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    yield python


@pytest.mark.slow
def test_grpo_on_a_taskset_of_verifiers(hub, tmp_path):
    command = [sys.executable, "-m", "coalign_agents.verifiers", hub, json.dumps(ENV)]
    rows = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(rows.splitlines()) == 8 and json.loads(rows.splitlines()[2])["task"]["answer"] == "4"
    (tmp_path / "tasks.jsonl").write_text(rows)

    def configure(name):
        (tmp_path / name).mkdir()
        config = calculating(tmp_path / name, steps=2, save_every=1)
        config["data"] |= {"train": str(tmp_path / "tasks.jsonl")}
        config["rollout"] = {"fn": "verifiers", "python": hub, "env": ENV}
        config["reward"] = {"fn": "episode"}
        sampling = {"max_new_tokens": 90, "stop": list("abcdefghijklmnopqrstuvwxyz")}  # no turn ends by itself
        config["models"]["policy"] |= {"sampling": sampling, "max_tokens_per_micro": 4096}
        return config

    first, second = configure("a"), configure("b")
    assert run(first) == 0
    for line in metrics(first):
        assert line["loss/mismatch"] <= 1e-6
        assert 2 <= line["episode/turns"] <= 3 and line["episode/rows"] >= 1
        assert line["episode/verifiers/length"] > 0
    assert weights_hash(run_in_two_parts(second, 1), 2) == weights_hash(first, 2)


@pytest.mark.slow
def test_a_task_of_verifiers(hub):
    one = episode("4", "4", prompt="2+2=", task=TASK)
    outcome = play(verifiers, one, timeout=120.0, python=hub, env=ENV).calls[0]
    assert outcome.error is None and one.rows[0].turn_rewards[-1] == 1.0
    assert chosen(one) == "4<|im_end|>4<|im_end|>" and one.counts["verifiers/length"] == 1
    crashed = play(verifiers, episode(task=TASK | {"prompt": "7+7="}), timeout=120.0, python=hub, env=ENV).calls[0]
    assert "the harness has crashed" in str(crashed.error)


def test_what_is_no_interpreter_is_refused_before_a_run():
    with pytest.raises(ValueError, match=r"rollout.python: '/nowhere' is no program"):
        verifiers.check({}, python="/nowhere", parser="hermes")
