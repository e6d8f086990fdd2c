"""Programs in boxes: they reach the policy and nothing else, are graded, stopped, and their failures told apart."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys

import pytest

from coalign.config import ConfigError
from coalign.config.functions import bind
from coalign.types import Status
from coalign_agents.agent import agent
from coalign_agents.program import list_variables, program
from coalign_graders.boxes import SandboxConfig
from tests import runs
from tests.environments.helpers import Script, chosen, episode, play
from tests.runs import ROOT
from tests.tiny import tiny_model_dir

ASKS = """
import json, os, sys, urllib.request
history = [{"role": "user", "content": sys.argv[1]}]
for _ in range(int(sys.argv[2])):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": history}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20))
    history += [answer["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
open("answer.txt", "w").write(history[-2]["content"])
"""
HOST = SandboxConfig(type="coalign_agents.host_box:HostBox")
BOXES = [
    HOST,
    pytest.param(SandboxConfig(type="bwrap"), marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap")),
]
ASK = {"files": {"ask.py": ASKS}, "command": ["python3", "ask.py", "{prompt}", "2"]}


def run(*says, policy=None, timeout=60.0, **settings):
    one = episode(*says, policy=policy, prompt="What is 2+3?")
    return one, play(program, one, timeout=timeout, **settings).calls[0]


@pytest.mark.parametrize("sandbox", BOXES)
@pytest.mark.parametrize("answer", ["5", "6"])
def test_a_program_asks_and_is_graded_by_what_it_leaves(sandbox, answer):
    grade = ["sh", "-c", "[ $(cat answer.txt) = {answer} ]"]
    one, outcome = run("maybe", answer, sandbox=sandbox, grade=grade, **ASK)
    assert outcome.error is None and one.status == Status.OK
    assert chosen(one) == f"maybe<|im_end|>{answer}<|im_end|>" and one.messages[0]["content"] == "What is 2+3?"
    assert one.rows[0].turn_rewards[-1] == float(answer == "5") and one.counts["grade_failed"] == (answer == "6")


def test_a_full_context_fails_the_program_and_keeps_its_turns():
    one, outcome = run(policy=Script(["word " * 8] * 3, capacity=80), sandbox=HOST, grade=["true"], **ASK)
    assert outcome.error is None and one.status == Status.TRUNCATED
    assert one.counts["program_failed"] == 1 and one.rows[0].turn_rewards[-1] == 1.0


def test_a_program_that_takes_too_long_is_graded():
    """miles 2802: to drop the time-outs of agents teaches time-outs. rllm 710: code and time-out are told apart."""
    command = ["sh", "-c", "python3 ask.py x 1; sleep 60 | tee log"]
    one, outcome = run("5", sandbox=HOST, seconds=3.0, grade=["false"], **(ASK | {"command": command}))
    assert outcome.error is None and one.status == Status.OK
    assert one.counts["program_timeout"] == 1 and not one.counts["program_failed"] and not any(one.rows[0].turn_rewards)


@pytest.mark.parametrize("command", [["no-such-program"], ["sh", "-c", "no-such-program"]])
def test_a_program_that_is_not_there_says_nothing_about_the_policy(command):
    """Gym 2015 and others: failures of the infrastructure became rewards of 0."""
    one, outcome = run(sandbox=HOST, command=command)
    assert one.status == Status.ERROR and "no-such-program" in str(outcome.error)


async def asks_nothing(client, row):
    await asyncio.sleep(30)


def test_a_program_that_asks_nothing_is_empty_and_not_a_timeout():
    """verifiers 1170: a time-out without a turn was taken for an empty answer."""
    one, _ = run(sandbox=HOST, command=["true"])
    assert one.status == Status.ERROR and one.counts["empty"] == 1
    one = episode()
    outcome = play(agent, one, timeout=0.5, run="packages.agents.tests.test_program:asks_nothing").calls[0]
    assert outcome.reason == "timeout" and one.status == Status.ERROR and not one.counts["empty"]


def test_the_example_trains_a_program_as_it_is(tmp_path, monkeypatch):
    subprocess.run([sys.executable, "examples/agents/tasks.py", tmp_path / "tasks.jsonl"], cwd=ROOT, check=True)
    monkeypatch.setenv("PWD", str(ROOT))
    monkeypatch.setenv("MODEL", str(tiny_model_dir(tmp_path / "model", max_position_embeddings=1024)))
    overrides = ["runtime.steps=2", "runtime.prompts_per_step=2", "runtime.samples_per_prompt=2", "runtime.threads=1"]
    overrides += [f"output={tmp_path / 'run'}", f"data.train={tmp_path / 'tasks.jsonl'}"]
    overrides += ["models.policy.sampling.stop=[e,a,t]", "models.trainer.max_tokens_per_micro=2048"]
    assert runs.run(ROOT / "examples" / "agents" / "program.yaml", *overrides) == 0
    for line in runs.metrics({"output": tmp_path / "run"}):
        assert 1 < line["episode/turns"] <= 2 and line["episode/rows"] == 1 and line["loss/mismatch"] < 1e-4
        assert line["samples/count"] == 4


def test_variables_of_agents():
    variables = list_variables("http://x:1", "k")
    assert variables["ANTHROPIC_BASE_URL"] == "http://x:1/k" and variables["OPENAI_BASE_URL"] == "http://x:1/k/v1"
    assert json.loads(variables["OPENCODE_CONFIG_CONTENT"])["small_model"] == "coalign/aux"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sandbox": {"type": "bubble"}}, r"rollout\.sandbox.*type is 'bubble'"),
        ({"sandbox": {"type": "bwrap", "cpus": 2}}, r"rollout\.sandbox.*no effect in bwrap"),
        ({"gateway": {"prot": 1}}, r"rollout\.gateway\.prot"),
        ({"seconds": 0}, r"rollout\.seconds: is 0"),
        ({"parser": "hermez"}, "did you mean 'hermes'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_run(settings, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        program.check({}, **bind(program, {"command": ["true"], **settings}, "rollout"))


def test_settings_become_a_box_and_a_gateway():
    bound = bind(program, {"command": ["true"], "gateway": {"keepalive": 2}}, "rollout")
    assert bound["gateway"].keepalive == 2 and bound["sandbox"].type == "bwrap"
