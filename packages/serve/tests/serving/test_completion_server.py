"""`coalign serve`: OpenAI's own client, streams, batches, bad requests, clients that leave, replicas."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import coalign
from coalign.config.schema import SamplingConfig
from coalign.report.display import Display
from coalign.types import Status
from coalign_serve.config.serving import CompletionServerConfig
from coalign_serve.formats import hermes
from coalign_serve.run_model import find_model
from coalign_serve.serving.completion_answer import ChatWriter, GrowingAnswer
from coalign_serve.serving.completion_server import build_completion_server, load_text_tools, serve
from coalign_serve.serving.engine_loop import OPEN_SESSIONS, AnswerEnd, ChosenToken, GenerationJob
from coalign_serve.serving.engine_process import build_model_config, start_engine, start_replicas
from packages.serve.tests.serving.http import call, running
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


def write_chat(text, *, parser=hermes):
    tokenizer = tiny_tokenizer()
    answer, writer = GrowingAnswer(tokenizer, ()), ChatWriter("m", 3, False, parser)
    pieces = writer.begin(0)
    for token in tokenizer(text)["input_ids"]:
        pieces += writer.add(0, answer, answer.add(ChosenToken(0, token, -1.0)))
    rest = answer.end(Status.OK)
    pieces += writer.add(0, answer, rest) + writer.end(0, answer)
    return writer.write_whole([answer])["choices"][0], [piece["choices"][0] for piece in pieces]


def test_tool_calls_are_read_whole_and_in_a_stream():
    whole, pieces = write_chat('Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>')
    [call_] = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "Well."
    assert call_["function"] == {"name": "add", "arguments": '{"a": 1}'} and call_["type"] == "function"
    assert [piece["finish_reason"] for piece in pieces] == [None, None, "tool_calls"]
    assert pieces[1]["delta"] == {"content": "Well.", "tool_calls": [{"index": 0, **call_}]}
    whole, pieces = write_chat("No tool.<|im_end|>")
    assert whole["message"] == {"content": "No tool.", "role": "assistant"} and whole["finish_reason"] == "stop"
    assert pieces[1]["delta"]["content"] == "No tool."


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
