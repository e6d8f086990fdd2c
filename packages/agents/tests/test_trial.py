"""`coalign agent-test`: what it says of an agent, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from coalign.cli import app
from coalign_agents.trial import read_answers

ASKS = """
import json, os, urllib.request
def ask(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode())
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return error.code
user = {"role": "user", "content": "2+3?"}
tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}, {"type": "web_search"}]
first = ask("/chat/completions", {"model": "policy", "messages": [user], "tools": tools, "seed": 1, "n": 2})
said = first["choices"][0]["message"]
assert said["tool_calls"][0]["function"]["name"] == "add"
more = [user, said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}]
ask("/chat/completions", {"model": "policy", "messages": more, "tools": tools, "stop": "x"})
ask("/messages", {"model": "aux", "messages": [user], "max_tokens": 9})
assert ask("/responses", {"input": []}) == 400
"""


def invoke(*arguments):
    return CliRunner().invoke(app, ["agent-test", *arguments])


def test_it_says_what_an_agent_uses_and_what_would_be_trained(tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"name": "add", "arguments": {"a": 2}}\n"or not"\n"It is 5"\n')
    said = invoke("--answers", str(tmp_path / "answers.jsonl"), "--", sys.executable, "-c", ASKS)
    assert said.exit_code == 0, said.output
    lines = dict(line.split(maxsplit=1) for line in said.output.splitlines() if not line.startswith(" "))
    assert lines["questions"] == "2 ChatCompletions, 1 Messages"
    assert lines["with"] == "2 tools, 1 several answers, 1 stop strings" and lines["models"] == "2 policy, 1 aux"
    assert "no effect   seed 1, tools.web_search 2" in said.output
    assert "refused     1 400 input: is []" in said.output
    assert lines["rows"] == "2" and "of 4 turns" in lines["trained"]


def test_an_agent_that_fails_or_asks_nothing_ends_with_1():
    said = invoke("--", sys.executable, "-c", "raise SystemExit('no luck')")
    assert said.exit_code == 1 and "the agent ended with exit code 1" in said.output and "no luck" in said.output
    assert invoke("--", "true").exit_code == 1
    said = invoke("--seconds", "1", "--", "sleep", "30")
    assert said.exit_code == 1 and "was stopped after 1 s" in said.output


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "there is no answer"), ("oops", "answers.jsonl:1: .*a line is a JSON text"), ("3", "3; expected")],
)
def test_answers_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_answers(path)


def test_a_model_says_its_last_line_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps("a") + "\n\n" + json.dumps({"name": "f", "arguments": {}}) + "\n")
    assert read_answers(path) == ["a", '<tool_call>{"name": "f", "arguments": {}}</tool_call>']
