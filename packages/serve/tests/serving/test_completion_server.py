"""`coalign serve`: OpenAI's own client, streams, batches, bad requests, clients that leave, replicas."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

import coalign
from coalign.config.schema import SamplingConfig
from coalign.report.display import Display
from coalign.types import Status
from coalign_serve.config.serving import CompletionServerConfig
from coalign_serve.run_model import find_model
from coalign_serve.serving.completion_server import build_completion_server, load_text_tools, serve
from coalign_serve.serving.engine_loop import OPEN_SESSIONS, AnswerEnd, ChosenToken, GenerationJob
from coalign_serve.serving.engine_process import build_model_config, start_engine, start_replicas
from packages.serve.tests.serving.http import call, running
from tests.environments.helpers import TOOLS_CHATML
from tests.runs import ROOT
from tests.tiny import tiny_model_dir, tiny_tokenizer

NAME = "tiny"
HELLO = [{"role": "user", "content": "hello"}]


def serving(source, config, key=None):
    """The address of a server of this source, within the context."""
    return running(build_completion_server(source, load_text_tools(config), config, NAME, key))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("serving"), max_position_embeddings=256)


def load(model, **settings):
    config = CompletionServerConfig(model=str(model), device="cpu", **settings)
    return start_engine(build_model_config(config), "cpu", 0), config


@pytest.fixture(scope="module")
def served(model):
    """A server of the tiny model, and its loop."""
    loop, config = load(model, max_new_tokens=8, queue=64)
    with serving(loop, config) as base:
        yield base, loop


@pytest.fixture(scope="module")
def client(served):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0)


def complete(base, **body):
    status, answer, _ = call(f"{base}/v1/completions", {"model": NAME, "prompt": "abc", **body})
    assert status == 200, answer
    return [choice["text"] for choice in answer["choices"]]


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def count(base, what):
    """Of a server's health: answers that are `computing`, or `done`."""
    return call(f"{base}/health")[1][what]


def test_greedy_answers_are_those_of_generate(client, model):
    said = client.chat.completions.create(model=NAME, messages=HELLO, temperature=0)
    [record] = coalign.generate(model, [HELLO], temperature=0, max_new_tokens=8, quiet=True)
    assert said.choices[0].message.content == record["response"] and said.choices[0].finish_reason == "length"
    assert said.usage.completion_tokens == 8 == said.usage.total_tokens - said.usage.prompt_tokens
    plain = client.completions.create(model=NAME, prompt=["abc", "é"], temperature=0, max_tokens=5)
    records = coalign.generate(model, ["abc", "é"], temperature=0, max_new_tokens=5, chat_template="none", quiet=True)
    assert [choice.text for choice in plain.choices] == [record["response"] for record in records]


def test_a_stream_has_the_text_of_the_whole_answer(client):
    asked = {"model": NAME, "messages": HELLO, "seed": 3, "n": 2, "max_tokens": 12, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    texts, logprobs, reasons, usage = {0: "", 1: ""}, {0: [], 1: []}, {}, None
    for piece in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = piece.usage
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
    assert reasons == {0: "length", 1: "length"} and usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert logprobs[choice.index] == choice.logprobs.content and len(choice.logprobs.content) == 12
        assert all(each.logprob < 0 for each in choice.logprobs.content)


def test_a_stream_of_plain_text(client):
    asked = {"model": NAME, "prompt": "abc", "seed": 4, "logprobs": 0}
    [choice] = client.completions.create(**asked).choices
    pieces = [piece.choices[0] for piece in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == choice.text and len(pieces) > 2
    offsets = [offset for piece in pieces if piece.logprobs for offset in piece.logprobs.text_offset]
    assert offsets == choice.logprobs.text_offset and len(offsets) == 8
    assert choice.logprobs.tokens == [t for piece in pieces if piece.logprobs for t in piece.logprobs.tokens]


def test_models_are_listed(client):
    assert [each.id for each in client.models.list()] == [NAME]


def test_equal_seeds_sample_alike_and_without_one_every_request_differs(served):
    base = served[0]
    with ThreadPoolExecutor(4) as pool:
        same = list(pool.map(lambda _: complete(base, seed=5, n=2), range(4)))
        assert all(each == same[0] for each in same) and same[0][0] != same[0][1]
        assert len(set(pool.map(lambda _: complete(base)[0], range(4)))) == 4
    assert complete(base, seed=6, n=2) != same[0]


def test_requests_are_computed_together(served):
    base, loop = served
    engine, steps, stepping = loop._module.engine, [], loop._module.engine.stepping
    engine.stepping = lambda: (steps.append(1), stepping())[1]
    try:
        engine.pause()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(complete, base, prompt="x" * (i + 1), max_tokens=16, temperature=0) for i in range(8)]
            wait_until(lambda: count(base, "computing") == 8)
            time.sleep(0.1)
            engine.resume()
            together = [each.result()[0] for each in asked]
        # Alone they would take 8 × 16 steps; the first step may begin before the others are there.
        assert len(steps) < 3 * 16
    finally:
        del engine.stepping
    assert together == [complete(base, prompt="x" * (i + 1), max_tokens=16, temperature=0)[0] for i in range(8)]


def test_more_ways_of_sampling_than_sessions(served):
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda i: complete(served[0], temperature=0.5 + i / 10), range(2 * OPEN_SESSIONS)))
    assert len(served[1]._driver.tasks) <= OPEN_SESSIONS


def test_jobs_that_wait_begin_when_all_sessions_end_in_one_step(served):
    loop, ended, jobs = served[1], threading.Semaphore(0), 2 * OPEN_SESSIONS
    with loop._news:  # all arrive at once, so the first ones end at once
        for number in range(jobs):
            job = GenerationJob([5, 6, 7], 1, SamplingConfig(temperature=0.31 + number / 10), limit=3)
            loop.submit(job, lambda event: ended.release() if isinstance(event, AnswerEnd) else None)
    assert all(ended.acquire(timeout=20) for _ in range(jobs))


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(served):
    base = served[0]
    whole = complete(base, seed=9, max_tokens=32)[0]
    stop = next(c for c in whole[3:] if c != "\ufffd")
    body = {"model": NAME, "prompt": "abc", "seed": 9, "max_tokens": 32, "stop": [stop, "never there"]}
    [choice] = call(f"{base}/v1/completions", body)[1]["choices"]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", b"not json", 400, "JSON"),
        ("completions", b"[1]", 400, ""),
        ("completions", {"prompt": "a", "model": "other"}, 404, "there is no model 'other'; this server has 'tiny'"),
        ("completions", {}, 400, "prompt: missing"),
        ("completions", {"prompt": "a", "max_tokns": 3}, 400, "max_tokns: unknown key; did you mean 'max_tokens'?"),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p: is 0; expected a number above 0"),
        ("completions", {"prompt": "a", "n": 1000}, 400, "n: is 1000; expected a number of at most 128"),
        ("completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs: is not supported"),
        ("completions", {"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty: is not supported"),
        ("completions", {"prompt": ["a"] * 65}, 413, "65 answers in a request, and queue=64"),
        ("completions", {"prompt": "a" * 300}, 400, "the prompt has 300 tokens; the model's context is 256"),
        ("completions", {"prompt": [5000]}, 400, "the prompt holds a token id outside of 0..319"),
        ("completions", {"prompt": "a" * 300, "stream": True}, 400, "the model's context is 256"),
        ("completions", {"prompt": ""}, 400, "the prompt has no tokens"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "message 0 is not an object with role and content"),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs: is not supported"),
        ("chat/completions", {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "--tool-parser"),
        ("chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("nowhere", {}, 404, "Not Found"),
    ],
)
def test_a_bad_request_is_refused_in_the_form_of_openai(served, path, body, status, message):
    body = {"model": NAME, **body} if isinstance(body, dict) else body
    code, answer, _ = call(f"{served[0]}/v1/{path}", body)
    assert code == status and message in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"} and answer["error"]["code"] == status


def leave(base, **body):
    """Send a request, read a little of its answer, and hang up."""
    host, port = base.removeprefix("http://").split(":")
    # The answers of this seed end at the limit: none is over before the server hears that the client has left.
    text = json.dumps({"model": NAME, "prompt": "abc", "max_tokens": 1000, "n": 2, "seed": 2} | body).encode()
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        if body.get("stream"):
            assert connection.recv(10)
        else:
            wait_until(lambda: count(base, "computing"))


@pytest.mark.parametrize("stream", [True, False])
def test_answers_to_a_client_that_leaves_are_cut(served, stream):
    base, loop = served
    before = count(base, "done")
    leave(base, stream=stream)
    wait_until(lambda: not count(base, "computing"))
    assert count(base, "done") == before
    wait_until(lambda: not loop._driver.busy)


def test_a_full_server_turns_requests_away(served):
    base, loop = served
    loop._module.engine.pause()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(complete, base, n=60)
        wait_until(lambda: count(base, "computing"))
        status, answer, _ = call(f"{base}/v1/completions", {"model": NAME, "prompt": "abc", "n": 5})
        assert status == 429 and "60 answers are being computed" in answer["error"]["message"]
        loop._module.engine.resume()
        assert len(asked.result()) == 60


def test_what_goes_wrong_in_a_step_ends_its_requests_and_no_others(served, monkeypatch, caplog):
    base, loop = served
    session = next(iter(loop._driver.tasks))

    def fail(self):
        raise FloatingPointError("logits are not finite")

    with monkeypatch.context() as patch:
        patch.setattr(type(session), "step", fail)
        status, answer, _ = call(f"{base}/v1/completions", {"model": NAME, "prompt": "abc"})
        assert status == 500 and "logits are not finite" in answer["error"]["message"]
        assert answer["error"]["type"] == "server_error"
    assert complete(base, temperature=0) and "a step of the engine failed" in caplog.text


def test_a_key_is_asked_for(model):
    loop, config = load(model)
    with serving(loop, config, key="s3cret") as base:
        status, answer, _ = call(f"{base}/v1/models")
        assert status == 401 and "a key is needed" in answer["error"]["message"]
        assert call(f"{base}/v1/completions", {"model": NAME, "prompt": "a"})[0] == 401
        assert call(f"{base}/v1/models", Authorization="Bearer s3cret")[0] == 200
        assert call(f"{base}/v1/models", **{"x-api-key": "s3cret"})[0] == 200
        assert call(f"{base}/v1/models", **{"x-api-key": "secret"})[0] == 401
        assert call(f"{base}/health")[0] == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "host: other machines reach 0.0.0.0"),
        ({"api_key_env": "NO_KEY"}, "api_key_env: there is no environment variable 'NO_KEY'"),
        ({"tool_parser": "hermez"}, "hermes"),
    ],
)
def test_a_server_that_cannot_start_says_why(model, settings, message):
    config = CompletionServerConfig(model=str(model), port=0, device="cpu", **settings)
    with pytest.raises(ValueError, match=message):
        serve(config, Display(quiet=True))


def test_a_run_folder_stands_for_its_model(model, tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: sft")
    with pytest.raises(ValueError, match="a run folder without a model"):
        find_model(str(tmp_path))
    (tmp_path / "model").symlink_to(model)
    assert find_model(str(tmp_path)) == str(tmp_path / "model") and find_model(str(model)) == str(model)


CALL = 'Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
ADD = {"name": "add", "description": "", "parameters": {"type": "object"}}


class SaysTheSame:
    """An engine whose answer is a text."""

    failure = None

    def __init__(self, text):
        self.tokens = tiny_tokenizer()(text)["input_ids"]

    def submit(self, job, on_event):
        for index in range(job.samples):
            for token in self.tokens:
                on_event(ChosenToken(index, token, -0.5))
            on_event(AnswerEnd(index, Status.OK))
        return lambda: None

    def close(self):
        pass


@pytest.fixture(scope="module")
def calling(model):
    """The address of a server whose model always calls a tool."""
    config = CompletionServerConfig(model=str(model), device="cpu", tool_parser="hermes", chat_template=TOOLS_CHATML)
    with serving(SaysTheSame(CALL), config) as base:
        yield base


def read_events(base, path, body):
    request = urllib.request.Request(f"{base}/v1{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line.startswith("data: {")]


def test_chat_calls_tools_whole_and_in_a_stream(calling):
    client = pytest.importorskip("openai").OpenAI(base_url=f"{calling}/v1", api_key="none", max_retries=0)
    asked = {"model": NAME, "messages": HELLO, "tools": [{"type": "function", "function": ADD}]}
    [choice] = client.chat.completions.create(**asked).choices
    [called] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Well."
    assert called.function.name == "add" and called.function.arguments == '{"a": 1}' and len(called.id) == 9
    with client.chat.completions.stream(**asked, n=2) as stream:
        whole = stream.get_final_completion()
    for choice in whole.choices:
        assert choice.message.content == "Well." and choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert whole.choices[0].message.tool_calls[0].id != whole.choices[1].message.tool_calls[0].id
    [plain] = client.chat.completions.create(**asked, tool_choice="none").choices
    assert plain.finish_reason == "stop" and plain.message.content.endswith("</tool_call>")


def test_responses_call_tools_whole_and_in_a_stream(calling):
    client = pytest.importorskip("openai").OpenAI(base_url=f"{calling}/v1", api_key="none", max_retries=0)
    asked = {"model": NAME, "input": "hello", "tools": [{"type": "function", **ADD}], "instructions": "Be brief."}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        message, called = response.output
        assert response.output_text == "Well." and response.status == "completed" and message.type == "message"
        assert called.type == "function_call" and called.name == "add" and called.arguments == '{"a": 1}'
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    assert whole.usage.output_tokens == streamed.usage.output_tokens > 0
    again = [*whole.output, {"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "1"}]
    assert client.responses.create(**(asked | {"input": again})).output_text == "Well."
    with pytest.raises(Exception, match="previous_response_id"):
        client.responses.create(**asked, previous_response_id=whole.id)


def test_messages_call_tools_whole_and_in_a_stream(calling):
    client = pytest.importorskip("anthropic").Anthropic(base_url=calling, api_key="none", max_retries=0)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    asked = {"model": NAME, "messages": HELLO, "tools": tools, "max_tokens": 50, "system": "Be brief."}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        said, called = message.content
        assert said.text == "Well." and message.stop_reason == "tool_use"
        assert called.name == "add" and called.input == {"a": 1}
    assert whole.usage == streamed.usage and whole.usage.output_tokens > 0
    results = [
        {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "1"},
        {"type": "text", "text": "?"},
    ]
    again = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    assert client.messages.create(**(asked | {"messages": again})).content[0].text == "Well."
    assert client.messages.count_tokens(model=NAME, messages=HELLO).input_tokens > 5
    with pytest.raises(Exception, match=r"there is no model 'x'.*"):
        client.messages.create(**(asked | {"model": "x"}))


def test_text_is_streamed_as_it_comes_in_all_dialects(served):
    """Unless tools are offered: only the end of an answer tells whether it calls one."""
    base, asked = served[0], {"model": NAME, "seed": 3, "stream": True}
    chat = read_events(base, "/chat/completions", asked | {"messages": HELLO})
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in chat)
    responses = read_events(base, "/responses", asked | {"input": "hello"})
    deltas = [event["delta"] for event in responses if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == responses[-1]["response"]["output"][0]["content"][0]["text"] == said and len(deltas) > 3
    messages = read_events(base, "/messages", asked | {"messages": HELLO, "max_tokens": 8})
    deltas = [event["delta"]["text"] for event in messages if event["type"] == "content_block_delta"]
    assert "".join(deltas) == said and messages[-2]["delta"]["stop_reason"] == "max_tokens"


def test_wishes_that_are_not_granted_are_named(calling):
    body = {"model": NAME, "messages": HELLO, "max_tokens": 9, "thinking": {"type": "adaptive"}}
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    status, _, headers = call(f"{calling}/v1/messages", body | {"tools": tools, "context_management": {}})
    assert status == 200 and headers["x-coalign-ignored"] == "tools.web_search_20250305, context_management, thinking"
    status, answer, _ = call(f"{calling}/v1/messages", body | {"top_j": 3})
    assert status == 400 and "top_j: unknown key; did you mean 'top_p'" in answer["error"]["message"]
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
def test_replicas_share_the_requests_and_outlive_each_other(model):
    config = CompletionServerConfig(model=str(model), device="cpu", replicas=2, max_new_tokens=8)
    replicas = start_replicas(build_model_config(config), config)
    with serving(replicas, config) as base, ThreadPoolExecutor(8) as pool:
        alone = complete(base, temperature=0, seed=1)
        answers = list(pool.map(lambda _: complete(base, temperature=0, max_tokens=8), range(16)))
        assert all(each == alone for each in answers)
        leave(base, stream=True)
        wait_until(lambda: not count(base, "computing"))
        asked = pool.submit(call, f"{base}/v1/completions", {"model": NAME, "prompt": "abc", "max_tokens": 250})
        wait_until(lambda: count(base, "computing"))
        first = next(each for each in replicas._replicas if each.load or each is replicas._replicas[-1])
        first._process.kill()
        first._process.join()
        assert asked.result()[0] in (200, 500)  # it may have ended before
        assert complete(base, temperature=0) == alone and call(f"{base}/health")[0] == 200
        for each in replicas._replicas:
            each._process.kill()
            each._process.join()
        time.sleep(0.2)
        status, answer, _ = call(f"{base}/health")
        assert status == 503 and "has ended (exit code -9)" in answer["error"]["message"]
        assert call(f"{base}/v1/completions", {"model": NAME, "prompt": "abc"})[0] == 500


@pytest.mark.slow
def test_a_model_that_cannot_load_ends_the_start(tmp_path, model):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"nonsense")
    config = CompletionServerConfig(model=str(broken), device="cpu", replicas=2)
    with pytest.raises(Exception, match=r"safetensors|header"):
        start_replicas(build_model_config(config), config)


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(model):
    command = [sys.executable, "-m", "coalign.cli", "serve", str(model), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if line.startswith("serving "))
        base = line.split(" at ")[1].split("/v1")[0]
        assert call(f"{base}/v1/completions", {"model": str(model), "prompt": "a", "max_tokens": 2})[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
