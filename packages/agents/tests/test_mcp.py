"""Tools of MCP servers: as the policy sees and calls them, and what becomes of their processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from coalign.config.errors import ConfigError
from coalign.types import Status
from coalign_agents.tools import tool_use
from tests.environments.helpers import TOKENIZER, Script, episode, play

pytest.importorskip("mcp")

SERVER = {"mcp": {"command": [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]}}


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def list_results(one) -> list:
    return [message["content"] for message in one.messages if message["role"] == "tool"]


def is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_dead(pid: str) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_episode_calls_tools_of_a_server_of_its_own(capfd):
    episodes = [episode(call("count") + call("add", a=3), call("count") + call("pid"), "5", index=i) for i in range(2)]
    running = play(tool_use, *episodes, tools=["calculator", SERVER])
    assert [c.error for c in running.calls] == [None, None]
    pids = {list_results(one).pop() for one in episodes}
    assert [list_results(one)[:3] for one in episodes] == [["1", "5", "2"]] * 2 and len(pids) == 2
    assert not any(map(is_alive, pids))
    assert "log" not in "".join(capfd.readouterr())


def test_the_policy_sees_descriptions_without_titles():
    one = episode("none")
    play(tool_use, one, tools=[SERVER])
    shown = json.loads(TOKENIZER.decode(one.rows[0].tokens).split("<|im_start|>system\n")[1].split("<|im_end|>")[0])
    assert [tool["function"]["name"] for tool in shown][:2] == ["add", "count"]
    assert shown[0]["function"]["description"] == "Adds two numbers."
    properties = shown[0]["function"]["parameters"]["properties"]
    assert list(properties) == ["a", "title", "b"] and properties["a"] == {"type": "integer"}
    assert properties["title"] == {"default": "x", "enum": ["x", "y"], "type": "string"}
    assert "title" not in shown[0]["function"]["parameters"]


@pytest.mark.parametrize(
    ("asked", "reason", "told"),
    [
        (call("fails"), "raised", "Error executing tool fails"),
        (call("add", b=1), "raised", "Field required"),
        (call("sleeps", seconds=60), "timeout", "no result within 3 s"),
        (call("exits"), "died", "ended"),
        (call("adds"), "unknown_tool", "there are: add, count"),
    ],
)
def test_what_goes_wrong_is_told_and_counted(asked, reason, told):
    one = episode(asked, call("count"), "Sorry")
    running = play(tool_use, one, tools=[SERVER], tool_timeout=3)
    assert running.calls[0].error is None and one.status == Status.OK
    first, second = list_results(one)
    assert first.startswith("Error: ") and told in first and second == "1"
    assert one.counts[f"tool_failed/{reason}"] == 1


def test_images_are_content_for_policies_that_see():
    one = episode(call("draws"), "done")
    running = play(tool_use, one, tools=[SERVER])
    assert "the run reads text alone" in str(running.calls[0].error)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["broken"], "RuntimeError: no key"), (["-c"], "invalid literal")],
)
def test_a_server_that_does_not_start_fails_its_episodes_in_one_line(arguments, told):
    broken = {"mcp": {"command": [*SERVER["mcp"]["command"], *arguments]}}
    running = play(tool_use, episode("done"), tools=[SERVER, broken])
    assert running.calls[0].reason == "RuntimeError"
    message = str(running.calls[0].error)
    assert "mcp_server.py" in message and "does not start: " in message and told in message and "\n" not in message


class Waits(Script):
    """Answers what it has, and then nothing."""

    waits = False

    async def respond(self, tokens, **asked):
        if not self.says:
            self.waits = True
            await asyncio.sleep(60)
        return await super().respond(tokens, **asked)


async def ends_when(episode, *, is_time, **arguments) -> None:
    """In group 0, end when it is time; in others use tools."""
    while episode.group == 0 and not is_time():
        await asyncio.sleep(0.02)
    if episode.group:
        await tool_use(episode, **arguments)


def is_server_process(process):
    try:
        return "mcp_server.py" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended, or just does
        return False


@pytest.mark.parametrize("has_started", [False, True])
def test_an_episode_that_is_cut_leaves_no_server(caplog, recwarn, has_started):
    """Peers' bug 20: cancel scopes that another task has entered (python-sdk 79). Cut while it starts, and later."""
    policy, begun = Waits([call("pid")]), time.monotonic()
    one = episode(policy=policy, group=1)

    def is_time():
        return policy.waits if has_started else time.monotonic() > begun + 0.1

    running = play(ends_when, episode(group=0), one, min_groups=1, is_time=is_time, tools=[SERVER])
    assert [c.error for c in running.calls] == [None, None] and one.status == Status.PARTIAL
    assert len(list_results(one)) == has_started
    deadline = time.monotonic() + 20
    while any(map(is_server_process, psutil.Process().children())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # asyncio says so where the end of a process is noticed after that of the loop.
    assert not [record for record in caplog.records if "that handles pid" not in record.msg] and not recwarn.list


def test_a_shared_server_serves_the_run_and_ends_with_it():
    episodes = [episode(call("count") + call("pid"), "done", index=i) for i in range(3)]
    running = play(tool_use, *episodes, tools=[SERVER | {"share": True}])
    assert [c.error for c in running.calls] == [None] * 3
    assert {list_results(one)[0] for one in episodes} == {"1", "2", "3"}
    pids = {list_results(one)[1] for one in episodes}
    assert len(pids) == 1
    wait_until_dead(pids.pop())


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_server_with_an_address_may_start_late_and_again(port):
    command = [*SERVER["mcp"]["command"], str(port)]
    again = f"import subprocess, sys\nfor _ in range(2): subprocess.run({command!r}, stderr=subprocess.DEVNULL)"
    tool = {"mcp": {"url": f"http://127.0.0.1:{port}/mcp"}}
    process = subprocess.Popen([sys.executable, "-c", again], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        one = episode(call("add", a=1), call("sleeps", seconds=9), call("add", a=2), "done")
        running = play(tool_use, one, tools=[tool], tool_timeout=0.5)
        assert running.calls[0].error is None
        assert list_results(one) == ["3", "Error: no result within 0.5 s", "4"]
        assert one.counts["service_failures"] > 0
        one = episode(call("exits"), "done")
        running = play(tool_use, one, tools=[tool], patience=0)
        assert running.calls[0].reason == "ServiceError" and f":{port}/mcp` " in str(running.calls[0].error)
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([{"mcp": {}}], r"rollout\.tools\[0\]\.mcp: .*expected `command`"),
        ([{"mcp": {"url": "http://x", "cwd": "/"}}], r"expected `command`"),
        ([{"mcp": {"comand": ["x"]}}], r"rollout\.tools\[0\]\.mcp\.comand"),
        ([{"mcp": {"command": []}}], r"rollout\.tools\[0\]\.mcp\.command"),
        (
            ["calculator", {"mcp": {"command": ["no-such-program"]}}],
            r"rollout\.tools\[1\]\.mcp\.command: there is no pro",
        ),
        ([{"mcp": {"url": "http://x"}, "shared": True}], r"rollout\.tools\[0\]\.shared.*did you mean 'share'"),
    ],
)
def test_refusals_start_nothing(tools, told):
    settings = {"parser": "hermes", "tool_timeout": 1.0, "max_result_chars": 10}
    with pytest.raises((ConfigError, ValueError), match=told):
        tool_use.check({}, tools=tools, **settings)
    tool_use.check({}, tools=[SERVER], **settings)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match=r"rollout\.tools\[0\]\.mcp needs mcp.*pip install 'coalign\[mcp\]'"):
        tool_use.check({}, tools=[SERVER], parser="hermes", tool_timeout=1.0, max_result_chars=10)


def test_two_tools_of_one_name_are_refused_when_they_are_known():
    running = play(tool_use, episode("done"), tools=[SERVER, {"fn": "packages.agents.tests.test_mcp:add"}])
    assert "rollout.tools[1]: a second tool is called 'add'" in str(running.calls[0].error)


def add(a: int) -> int:
    return a
