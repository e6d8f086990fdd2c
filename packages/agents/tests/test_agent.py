"""An agent written against OpenAI's chat completions, trained."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from hypothesis import strategies as st

from coalign.types import Status
from coalign_agents.agent import agent
from tests.environments.helpers import TOKENIZER, chosen, episode, play
from tests.fuzzing import CASES, JSON, damage, make_requests, send_raw, try_requests

HERE = "packages.agents.tests.test_agent"
QUESTION = [{"role": "user", "content": "2+3?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def agents(name: str, *says, **settings):
    one = episode(*says)
    running = play(agent, one, run=f"{HERE}:{name}", **settings)
    return one, running.calls[0]


async def tool_agent(client, row, *, temperature: float = 0.3):
    """As in OpenAI's own examples: the answer's message object goes back into the messages."""
    messages = list(QUESTION)
    for _ in range(3):
        answer = await client.chat.completions.create(
            model="gpt", messages=messages, tools=TOOLS, temperature=temperature, max_tokens=200
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            numbers = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
        if answer.choices[0].finish_reason == "stop":
            return float(message.content == row["answer"])
    return 0.0


def test_an_agent_runs_unchanged_and_its_tokens_are_recorded():
    one, outcome = agents("tool_agent", "Let me see. " + CALL, "5")
    assert outcome.error is None and one.status == Status.OK
    assert chosen(one) == f"Let me see. {CALL}<|im_end|>5<|im_end|>"
    text = TOKENIZER.decode(one.rows[0].tokens)
    assert text.startswith("<|im_start|>system\n[{") and "<|im_start|>tool\n5<|im_end|>" in text
    assert one.rows[0].turn_rewards[-1] == 1.0
    assert [m["role"] for m in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert one.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}


def plain_agent(client, row):
    """Blocking, and with dicts of its own instead of the objects."""
    first = client.chat.completions.create(messages=QUESTION)
    said = first.choices[0].message.content
    again = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
    second = client.chat.completions.create(messages=again, max_completion_tokens=4)
    assert second.usage.completion_tokens == 4 and second.choices[0].finish_reason == "length"
    assert second.usage.prompt_tokens + 4 == second.usage.total_tokens


def test_a_plain_function_runs_in_a_thread():
    one, outcome = agents("plain_agent", "5", "Yes of course")
    assert outcome.error is None
    assert chosen(one) == "5<|im_end|>Yes "
    assert one.status == Status.TRUNCATED and not any(one.rows[0].turn_rewards)


async def rewrites(client, row):
    await client.chat.completions.create(messages=QUESTION)
    await client.chat.completions.create(
        messages=[*QUESTION, {"role": "assistant", "content": "6"}, {"role": "user", "content": "Sure?"}]
    )


async def asks_again(client, row):
    for _ in range(2):
        await client.chat.completions.create(messages=QUESTION)


async def invents(client, row):
    first = await client.chat.completions.create(messages=QUESTION)
    said = [first.choices[0].message, {"role": "assistant", "content": "And more"}]
    await client.chat.completions.create(messages=[*QUESTION, *said])


async def changes_tools(client, row):
    first = await client.chat.completions.create(messages=QUESTION)
    said = [first.choices[0].message, {"role": "user", "content": "Go on"}]
    await client.chat.completions.create(messages=[*QUESTION, *said], tools=TOOLS)


async def wants_two(client, row):
    answer = await client.chat.completions.create(messages=QUESTION, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage.completion_tokens == 4


async def two_at_once(client, row):
    await asyncio.gather(*(client.chat.completions.create(messages=QUESTION) for _ in range(2)))


@pytest.mark.parametrize("agent_function", [rewrites, asks_again, changes_tools, wants_two, two_at_once])
def test_another_history_is_another_row(agent_function):
    one, outcome = agents(agent_function.__name__, "5", "6")
    assert outcome.error is None and one.status == Status.OK
    assert [chosen(row) for row in one.rows] == ["5<|im_end|>", "6<|im_end|>"]


def test_words_that_the_policy_did_not_say_are_context():
    one, outcome = agents("invents", "5", "6")
    assert outcome.error is None
    [row] = one.rows  # rendered anew, its tokens begin with those of the first turn
    assert chosen(row) == "5<|im_end|>6<|im_end|>" and "And more" in TOKENIZER.decode(row.tokens)


async def wants_a_stream(client, row):
    await client.chat.completions.create(messages=QUESTION, stream=True)


def test_a_stream_is_refused():
    one, outcome = agents("wants_a_stream", "5")
    assert one.status == Status.ERROR and re.search("gives whole answers", str(outcome.error))


def broken_call_agent(client, row):
    answer = client.chat.completions.create(messages=QUESTION, tools=TOOLS)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None
    assert "{oops" in answer.choices[0].message.content


def test_a_call_that_cannot_be_read_stays_text():
    deep = '<tool_call>{"name": "add", "arguments": {"{oops": ' + "[" * 90 + "]" * 90 + "}}</tool_call>"
    for call in ("<tool_call>{oops</tool_call>", deep):
        one, outcome = agents("broken_call_agent", call)
        assert outcome.error is None and one.counts["tool_failed/bad_json"] == 1


def post(address: str, body: dict) -> dict:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


def http_agent(address, row):
    assert address.startswith("http://127.0.0.1:") and address.endswith("/v1")
    url = f"{address}/chat/completions"
    first = post(url, {"model": "m", "messages": QUESTION})["choices"][0]["message"]
    second = post(url, {"model": "m", "messages": [*QUESTION, first, {"role": "user", "content": "Sure?"}]})
    assert second["object"] == "chat.completion"
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(url, {})
    assert refused.value.code == 400 and b"messages: missing" in refused.value.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        post(f"{address}/completions", {})
    return float(second["choices"][0]["message"]["content"] == "Yes")


def test_the_same_over_http():
    one, outcome = agents("http_agent", "5", "Yes", serve_http=True)
    assert outcome.error is None
    assert chosen(one) == "5<|im_end|>Yes<|im_end|>" and one.rows[0].turn_rewards[-1] == 1.0


def strangers(address, row):
    """Requests that another user of the machine, or a program gone wrong, could send."""
    host, key = address.removeprefix("http://").removesuffix("/v1").split("/")
    port, body = int(host.split(":")[1]), json.dumps({"messages": QUESTION}).encode()
    for path in ("/v1", f"/{'x' * len(key)}/v1", f"/{key[:-1]}/v1"):
        with pytest.raises(urllib.error.HTTPError, match=r"40[14]"):
            post(f"http://{host}{path}/chat/completions", {"messages": QUESTION})
    head = f"POST /{key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    assert send_raw(port, head + chunked, 10).startswith(b"HTTP/1.1 200")
    for bad in (b"GET\r\n\r\n", head + b"Content-Length: x\r\n\r\n", head + b"Content-Length: -1\r\n\r\n"):
        assert send_raw(port, bad).startswith(b"HTTP/1.1 400")
    assert send_raw(port, head + b"X: " + b"x" * 2**20)[:12] in (b"HTTP/1.1 400", b"")
    for wrong in (b"[1]", b"[" * 100_000, b'{"messages": 1' + b"0" * 5000 + b"}", b'{"messages": [{}]}', b"\xff"):
        answer = send_raw(port, head + b"Content-Length: %d\r\n\r\n" % len(wrong) + wrong, 10)
        assert answer.startswith(b"HTTP/1.1 400") and b"message" in answer

    good = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    message = st.fixed_dictionaries({"role": JSON, "content": JSON}, optional={"tool_calls": JSON})
    options = {"tools": JSON, "stop": JSON, "max_tokens": JSON, "system": JSON, "instructions": JSON, "stream": JSON}
    said = st.fixed_dictionaries(
        {"messages": st.lists(message, max_size=3) | JSON, "input": st.lists(message, max_size=3) | JSON},
        optional=options,
    )
    bodies = (said | JSON).map(lambda value: json.dumps(value).encode()) | damage(body)
    damaged = damage(good) | damage(head + chunked, [head, chunked])
    heads = [head.replace(b"/chat/completions", path) for path in (b"/chat/completions", b"/responses", b"/messages")]
    requests = st.one_of(*(make_requests(one, bodies) for one in heads))
    try_requests(port, st.binary(max_size=200) | damaged | requests, row["cases"])
    assert send_raw(port, good, 10).startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))  # 400: the episode goes on elsewhere
    return 1.0


@CASES
def test_no_stranger_reaches_the_episode_and_no_request_breaks_its_endpoint(caplog, cases):
    one = episode(*["5"] * (2 * cases))
    one.row["cases"] = cases
    outcome = play(agent, one, timeout=3000.0, run=f"{HERE}:strangers", serve_http=True).calls[0]
    assert outcome.error is None and sum(sum(row.turn_rewards) for row in one.rows) == 1.0
    assert not [record for record in caplog.records if record.exc_info]


def configured(client, row, *, k: int):
    pass


def test_an_agents_own_arguments_are_checked():
    _, outcome = agents("configured", arguments={"j": 1})
    assert "rollout.arguments" in str(outcome.error)


def test_a_function_needs_no_http_server():
    """`pip install coalign-agents` without `[http]`."""
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("starlette", "uvicorn"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import coalign_agents.agent, coalign_agents.tools, coalign_serve.dialects
try:
    import coalign_agents.gateway
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "an HTTP server needs starlette, which is not installed: pip install 'coalign[serve]'" in said
