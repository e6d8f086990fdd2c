"""Agents that other people wrote, against the gateway: how many turns and rows each gives. Slow: they are installed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coalign_agents.trial import try_agent
from packages.agents.tests.test_program import HOST

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "clients"
PACKAGES = ("openai-agents==0.24.0", "langgraph==1.2.24", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10",
            "smolagents==1.26.0", "mini-swe-agent==2.4.6")  # fmt: skip
PROGRAMS = ("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.171.0", "opencode-ai@1.18.33")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ADD, FIVE = call("add", a=2, b=3), "It is 5."
HELLO, SAID = call("Bash", command="echo hello", description="say hello"), "It printed hello."
DONE = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
CODEX = 'model_providers.coalign={name="coalign",base_url="{url}",env_key="OPENAI_API_KEY",wire_api="responses"}'


def install(variable: str, command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of clients that a variable names, or into which a command installs them from PyPI or npm."""
    if variable in os.environ:
        return Path(os.environ[variable])
    folder = tmp_path_factory.mktemp("clients")
    installed = subprocess.run([word.format(folder) for word in command], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"not installed: {installed.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with agents from PyPI."""
    line = f"{sys.executable} -m venv {{0}} && {{0}}/bin/python -m pip install --quiet {' '.join(PACKAGES)}"
    return str(install("COALIGN_TEST_CLIENTS", ["sh", "-c", line], tmp_path_factory) / "bin" / "python")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of programs from npm."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    command = ["npm", "install", "--prefix", "{0}", *PROGRAMS]
    return install("COALIGN_TEST_NPM", command, tmp_path_factory) / "node_modules" / ".bin"


def attempt(command, *says, **settings):
    one, session, result = asyncio.run(try_agent(command, says, HOST, 120.0, **settings))
    assert result.code == 0, result.err[-2000:]
    return one, session


@pytest.mark.parametrize(
    ("script", "says", "turns", "rows", "dialect"),
    [
        (["openai_agents.py"], [ADD, FIVE], 2, 1, "Responses"),
        (["openai_agents.py", "handoff"], [call("transfer_to_critic"), "It is bad."], 2, 2, "Responses"),
        (["langgraph_agent.py"], [ADD, FIVE], 2, 1, "ChatCompletions"),
        (["langgraph_agent.py", "anthropic"], [ADD, FIVE], 2, 1, "Messages"),
        (["smolagents_agent.py"], [ADD, call("final_answer", answer="5")], 2, 2, "ChatCompletions"),
        (["mini_swe_agent.py"], [call("bash", command="echo hello"), DONE], 2, 1, "ChatCompletions"),
    ],
)
def test_agents_from_pypi(python, script, says, turns, rows, dialect):
    one, session = attempt([python, str(SCRIPTS / script[0]), *script[1:]], *says)
    assert (len(one.tree.turns), len(one.rows)) == (turns, rows)
    assert session.uses["dialect", dialect] == turns and all(turn.trained for turn in one.tree.turns)


def test_claude_code(programs):
    command = [str(programs / "claude"), "-p", "say hello", "--dangerously-skip-permissions"]
    one, session = attempt(command, HELLO, SAID)
    assert (len(one.tree.turns), len(one.rows)) == (2, 1) and session.uses["feature", "streams"] == 2
    assert "hello" in one.rows[0].leaf.messages[-2]["content"]  # the tool has run


def test_codex(programs):
    settings = ["-c", 'model="policy"', "-c", 'model_provider="coalign"', "-c", CODEX]
    command = [str(programs / "codex"), "exec", "--skip-git-repo-check", *settings, "say hello"]
    one, session = attempt(command, call("exec_command", cmd="echo hello"), SAID)
    assert (len(one.tree.turns), len(one.rows)) == (2, 1) and session.uses["dialect", "Responses"] == 2
    assert "hello" in one.rows[0].leaf.messages[-2]["content"] and one.counts["ignored/tools.web_search"] == 2


def test_opencode(programs):
    one, session = attempt([str(programs / "opencode"), "run", "say hello"], SAID)
    assert session.uses["model", "aux"] == 1  # the title, which is not trained
    assert [turn.trained for turn in one.tree.turns].count(True) == 1 == len(one.rows)
