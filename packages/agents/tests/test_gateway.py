"""The gateway: real clients of three APIs, whole and streamed, retries, refusals, and what is trained after all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from coalign.types import Status
from coalign_agents.agent import agent
from coalign_agents.session import EpisodeSession, GatewayConfig
from coalign_serve.dialects import ChatCompletions
from coalign_serve.dialects.question import MAX_ANSWERS
from tests.environments.helpers import TOKENIZER, Script, chosen, episode, play

HERE = "packages.agents.tests.test_gateway"
QUESTION = [{"role": "user", "content": "2+3?"}]
ADD = {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'

openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")


def serve(name, *says, policy=None, **settings):
    one = episode(*says, policy=policy)
    running = play(agent, one, run=f"{HERE}:{name}", serve_http=True, **settings)
    return one, running.calls[0].error


def connect_openai(address, **options):
    return openai.OpenAI(base_url=address, api_key="none", **options)


def connect_anthropic(address, **options):
    return anthropic.Anthropic(base_url=address.removesuffix("/v1"), api_key="none", **options)


def chats(address, row):
    client, messages, tools = connect_openai(address), [*QUESTION], [{"type": "function", "function": ADD}]
    whole = client.chat.completions.create(model="policy", messages=messages, tools=tools, logprobs=True)
    [called] = whole.choices[0].message.tool_calls
    assert called.function.arguments == '{"a": 2}' and whole.choices[0].finish_reason == "tool_calls"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    messages += [whole.choices[0].message, {"role": "tool", "tool_call_id": called.id, "content": "5"}]
    with client.chat.completions.stream(
        model="policy", messages=messages, tools=tools, stream_options={"include_usage": True}
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == "It is 5" and streamed.usage.prompt_tokens > whole.usage.total_tokens
    assert client.models.list().data[0].id == "policy" and client.models.retrieve("aux").id == "aux"
    return 1.0


def responds(address, row):
    client, asked = connect_openai(address), [*QUESTION]
    settings = {"model": "policy", "tools": [{"type": "function", **ADD}, {"type": "web_search"}], "reasoning": {}}
    whole = client.responses.create(input=asked, **settings)
    message, called = whole.output
    assert message.content[0].text == "So" and called.arguments == '{"a": 2}'
    asked += [*whole.output, {"type": "function_call_output", "call_id": called.call_id, "output": "5"}]
    with client.responses.stream(input=asked, **settings) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_text == "It is 5" and streamed.status == "completed"
    return 1.0


def messages(address, row):
    client, asked = connect_anthropic(address), [*QUESTION]
    tools = [{"name": "add", "description": "Adds", "input_schema": ADD["parameters"]}]
    billed = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=%d;"}
    settings = {"model": "policy", "tools": tools, "max_tokens": 99}

    def system(number):
        return [billed | {"text": billed["text"] % number}, {"type": "text", "text": "Brief."}]

    assert client.messages.count_tokens(model="policy", messages=asked, tools=tools).input_tokens > 10
    whole = client.messages.create(messages=asked, system=system(1), **settings)
    said, called = whole.content
    assert said.text == "So" and called.input == {"a": 2} and whole.stop_reason == "tool_use"
    asked += [
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": called.id, "content": "5"}]},
    ]
    asked[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    with client.messages.stream(messages=asked, system=system(2), **settings) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == "It is 5" and streamed.usage.input_tokens > whole.usage.input_tokens
    return 1.0


@pytest.mark.parametrize(("program", "first"), [("chats", CALL), ("responds", "So" + CALL), ("messages", "So" + CALL)])
def test_a_client_of_each_api_whole_and_streamed(program, first):
    one, error = serve(program, first, "It is 5")
    assert error is None and one.status == Status.OK
    [row] = one.rows
    assert chosen(row) == f"{first}<|im_end|>It is 5<|im_end|>" and row.turn_rewards[-1] == 1.0
    if program == "responds":
        assert one.counts["ignored/tools.web_search"] == 2


def asks_side_by_side(address, row):
    client = connect_openai(address)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: client.chat.completions.create(model="policy", messages=QUESTION), range(4)))
    several = client.chat.completions.create(model="policy", messages=[*QUESTION, *QUESTION], n=2)
    assert len(several.choices) == 2
    client.chat.completions.create(model="aux", messages=QUESTION, temperature=0.3)


def test_siblings_are_rows_and_another_model_is_not_trained():
    one, error = serve("asks_side_by_side", *"abcdefg")
    assert error is None and len(one.rows) == 6 == one.counts["rows"]
    assert one.counts["turns"] == 7 and one.counts["ignored/temperature"] == 1
    assert "".join(sorted(chosen(row)[0] for row in one.rows)) == "abcdef"


class Slow(Script):
    """Answers once somebody has waited in vain."""

    def __init__(self, *says):
        super().__init__(says)
        self.may_answer = threading.Event()

    async def respond(self, tokens, **asked):
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        return await super().respond(tokens, **asked)


POLICIES = {}


def times_out(address, row):
    policy = POLICIES[row["script"]]
    client = connect_openai(address, timeout=0.3, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="policy", messages=QUESTION, stream=False)
    client.chat.completions.create(model="policy", messages=QUESTION, stream=True).close()
    policy.may_answer.set()
    patient = connect_openai(address)
    for _ in range(2):
        patient.chat.completions.create(model="policy", messages=QUESTION, stream=False)
    return 1.0


def test_the_retry_of_a_client_that_timed_out_gets_its_answer():
    """AReaL 1498: a retry split the trajectory. verifiers 2164, 2368: replays looped, and their cache grew."""
    policy = POLICIES["retries"] = Slow("first", "streamed", "third")
    one = episode(policy=policy, script="retries")
    running = play(agent, one, run=f"{HERE}:times_out", serve_http=True, gateway=GatewayConfig(keepalive=0.2))
    assert running.calls[0].error is None
    # The whole answer is joined; the streamed one is another request, which nobody asks for again; the third is new.
    assert one.counts["retries_joined"] == 1 and one.counts["turns"] == 3
    assert one.counts["unread"] == 1 and len(one.rows) == 2 and chosen(one.rows[1]) == "third<|im_end|>"


class Hesitant(Script):
    """Takes up to a tenth of a second for an answer, which says how many it has given to this conversation."""

    async def respond(self, tokens, **asked):
        await asyncio.sleep(random.random() / 10)
        self.says.append(f"answer {TOKENIZER.decode(tokens).count('answer') + 1}")
        return await super().respond(tokens, **asked)


def loses_patience(address, row):
    """A client that hangs up again and again, and asks the same once more."""
    host, port = address.removeprefix("http://").split("/")[0].split(":")
    path, messages = f"/{address.split('/', 3)[3]}/chat/completions", [*QUESTION]
    for turn in range(1, 6):
        body = json.dumps({"messages": messages}).encode()
        said, tries = b"", 0
        while not said:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
            head += f"x-stainless-retry-count: {tries}\r\n\r\n"
            tries += 1
            patience = random.random() / 15 + 1e-3
            with (
                contextlib.suppress(TimeoutError),
                socket.create_connection((host, int(port)), timeout=patience) as connection,
            ):
                connection.sendall(head.encode() + body)
                said = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))
        message = json.loads(said.split(b"\r\n\r\n", 1)[1])["choices"][0]["message"]
        assert message["content"] == f"answer {turn}"
        messages += [message, {"role": "user", "content": "more"}]
    return 1.0


def test_no_turn_is_lost_or_doubled_when_clients_die():
    many = [episode(policy=Hesitant([]), index=i) for i in range(24)]
    running = play(agent, *many, timeout=120.0, run=f"{HERE}:loses_patience", serve_http=True)
    assert not [call.error for call in running.calls if call.error]
    for one in many:
        assert sum(turn.trained for turn in one.tree.turns) == 5 and len(one.rows) == 1
    assert sum(one.counts["retries_joined"] for one in many) > 20


def waits(address, row):
    policy = POLICIES[row["script"]]
    threading.Timer(1.0, policy.may_answer.set).start()
    chat = connect_openai(address).chat.completions.create(model="policy", messages=QUESTION, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in chat) == "5"
    policy.may_answer.clear()
    threading.Timer(1.0, policy.may_answer.set).start()
    with connect_openai(address).responses.stream(model="policy", input="2+3?") as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == "6"
    assert [event.type for event in events][:3] == ["response.created", "response.in_progress", "response.in_progress"]
    policy.may_answer.clear()
    threading.Timer(1.0, policy.may_answer.set).start()
    with connect_anthropic(address).messages.stream(model="policy", messages=QUESTION, max_tokens=9) as stream:
        assert stream.get_final_message().content[0].text == "7"
    return 1.0


def test_streams_are_kept_open_while_an_answer_is_computed():
    POLICIES["waits"] = Slow("5", "6", "7")
    one = episode(policy=POLICIES["waits"], script="waits")
    running = play(agent, one, run=f"{HERE}:waits", serve_http=True, gateway=GatewayConfig(keepalive=0.2))
    assert running.calls[0].error is None and one.counts["turns"] == 3


def fills_its_context(address, row):
    client, history = connect_openai(address), [*QUESTION]
    for _ in range(9):
        said = client.chat.completions.create(model="policy", messages=history).choices[0].message
        history += [said, {"role": "user", "content": "more " * 9}]


def test_an_agent_that_dies_of_a_full_context_keeps_its_turns():
    """To drop it would teach length; claude-code-like agents loop on the refusal until `max_turns`."""
    one, error = serve("fills_its_context", policy=Script(["word " * 8] * 9, capacity=200))
    assert error is None and one.status == Status.TRUNCATED and one.counts["agent_died"] == 1
    assert len(one.rows) == 1 and one.counts["turns"] > 1


def loops(address, row):
    client = connect_openai(address, max_retries=0)
    for _ in range(20):
        try:
            client.chat.completions.create(model="policy", messages=QUESTION)
        except openai.BadRequestError as error:
            assert "has had its 3 turns" in str(error)


def test_an_agent_that_loops_is_ended_by_max_turns():
    one, error = serve("loops", *["5"] * 20, max_turns=3)
    assert error is None and one.status == Status.TRUNCATED and one.counts["turns"] == 3 == len(one.rows)


BAD = [
    ("/chat/completions", {"messages": []}, "messages"),
    ("/chat/completions", {"messages": [{"role": "user"}]}, "role and content"),
    ("/chat/completions", {"messages": QUESTION, "n": MAX_ANSWERS + 1}, "n: is 129"),
    ("/chat/completions", {"messages": [{"role": "tool", "content": {"a": 1}}]}, "content is dict"),
    ("/responses", {"input": []}, "input"),
    ("/responses", {"input": [{"type": "computer_call"}]}, "an item of type 'computer_call' cannot be shown"),
    ("/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("/messages", {"messages": [{"content": "x"}]}, "a message needs the key 'role'"),
    ("/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "'tool_use_id'"),
    ("/messages", {"messages": QUESTION, "max_tokens": 0}, "max_tokens"),
    ("/messages", {"messages": QUESTION, "tools": [{"input_schema": {}}]}, "a tool needs the key 'name'"),
]


def sends_nonsense(address, row):
    for path, body, message in BAD:
        status, answer = post(address + path, body)
        assert status == 400 and message in json.dumps(answer), (path, body, status, answer)
        assert ("type" in answer) == (path == "/messages")
    deep = {"type": "object", "properties": {}}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "deep", "parameters": deep}}]
    assert post(f"{address}/chat/completions", {"messages": QUESTION, "tools": tools})[0] == 200
    assert post(f"{address}/chat/completions", {"messages": QUESTION, "x": "x" * 2**26})[0] == 413
    key = address.split("/")[3]
    for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}):
        assert post(address.replace(f"/{key}", "") + "/messages", {"messages": QUESTION}, headers)[0] == 200
    assert post(address.replace(key, f"ng-rollout/{key}") + "/responses", {"input": "a"})[0] == 200
    assert post(address.replace(key, "x" * 32) + "/responses", {"input": "a"})[0] == 401
    KEPT.append(address)
    return 1.0


KEPT = []


def post(address, body, headers=None):
    request = urllib.request.Request(address, json.dumps(body).encode(), {**(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_nonsense_is_refused_in_one_line_and_the_episode_goes_on():
    """AReaL's proxy answered mistakes of clients with 500, which every client repeats."""
    one, error = serve("sends_nonsense", *["5"] * 4)
    assert error is None and one.status == Status.OK and one.counts["turns"] == 4


def test_a_question_after_the_end_is_refused():
    """agent-lightning 218: a late rollout crashed the step."""
    session = EpisodeSession(episode("5"), "hermes")
    session.close()
    question = ChatCompletions.read(json.dumps({"messages": QUESTION}).encode())
    with pytest.raises(Exception, match="the episode has ended") as refused:
        asyncio.run(session.answer(question))
    assert refused.value.status == 409 and refused.value.headers == {"x-should-retry": "false"}


def stops(address, row):
    client = connect_openai(address)
    asked = {"model": "policy", "stop": ["Observation:"]}
    said = client.chat.completions.create(messages=QUESTION, **asked).choices[0].message.content
    assert said == "Thought: look it up\n"
    more = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "Observation: 5"}]
    client.chat.completions.create(messages=more, **asked)


def test_the_text_ends_before_a_stop_string_and_the_tokens_behind_it():
    one, error = serve("stops", "Thought: look it up\nObservation:", "5")
    assert error is None
    [row] = one.rows
    assert chosen(row) == "Thought: look it up\nObservation:<|im_end|>5<|im_end|>"
