"""The reward server: what it answers, batching, limits, errors, shutdown, and a run that is rewarded by it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from coalign.config import ConfigError, load_section
from coalign.http_types import HttpRefusal
from coalign_serve.config.serving import ServeConfig
from coalign_serve.judges import Verdict, open_judge
from coalign_serve.serving.reward_server import build_reward_server, read_request, serve
from packages.serve.tests.serving.http import call, running
from tests.fuzzing import CASES, JSON, ODD, damage, make_requests, try_cases, try_requests
from tests.runs import ROOT, metrics, run, settings, weights_hash
from tests.tiny import tiny_reward_model_dir

HERE = "packages.serve.tests.functions:"


class Judge:
    """Scores by length; ``gate`` holds it up. A response 'bad' breaks it, 'nan' gets no finite score."""

    def __init__(self):
        self.gate, self.begun, self.batches, self.closed = threading.Event(), threading.Event(), [], False
        self.gate.set()

    def __call__(self, answers):
        self.begun.set()
        said = [answer.response[-1]["content"] for answer in answers]
        self.batches.append(said)
        assert self.gate.wait(60)
        if "bad" in said:
            raise ValueError("I cannot read this")
        return [Verdict(float("nan") if text == "nan" else float(len(text))) for text in said]

    def close(self):
        self.closed = True


@pytest.fixture
def served():
    """``served(judge or None, **config)``: the URL of a running server."""
    judges = []
    with contextlib.ExitStack() as servers:

        def start(judge=None, *, key=None, **config):
            config = ServeConfig(**{"reward": {"fn": "math", "retries": 0}} | config)
            judges.append(judge)
            return servers.enter_context(running(build_reward_server(judge or open_judge(config), config, key)))

        yield start
    assert all(judge is None or judge.closed for judge in judges)


def ask(base, **body):
    status, said, _ = call(f"{base}/get_reward", body)
    assert status == 200, said
    return said


def asked(*responses):
    return {"query": [f"Q{said}" for said in responses], "prompts": ["Q"] * len(responses)}


def test_openrlhfs_format(served):
    base = served()
    said = ask(base, query=["2+2? It is 4", "2+2? It is 5"], prompts=["2+2?"] * 2, labels=["4", "4"])
    assert said == {"rewards": [1.0, 0.0], "scores": [1.0, 0.0], "extra_logs": {}}
    assert ask(base, query=[], prompts=[]) == {"rewards": [], "scores": [], "extra_logs": {}}


def test_health_counts(served):
    base = served(reward={"fn": HERE + "picky", "retries": 0})
    ask(base, query=["yes", "no"])
    assert call(f"{base}/health")[:2] == (200, {"status": "ok", "waiting": 0, "scored": 1, "failed": 1})


def test_what_a_function_sees_of_a_request(served):
    base = served(reward={"fn": HERE + "sees"}, label_key="gold")
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    said = ask(base, query=["..."], messages=[talk], labels=[7], tokens=[5], rows=[{"unit": "apples"}], model="ignored")
    assert said["rewards"] == [7.0]
    assert ask(base, query=["2+2?4"], prompts=["2+2?"], rows=[{"gold": 2}])["rewards"] == [2.0]
    assert ask(base, query=["?"], responses=["4"], rows=[{"gold": 2}], labels=[None])["rewards"] == [2.0]


def test_special_tokens_at_the_end_of_a_query_can_be_left_out(served):
    query = ["2+2?4<|im_end|>\n", "2+2?4<|end|><|im_end|>", "2+2?4"]
    body = {"query": query, "prompts": ["2+2?"] * 3, "labels": ["4"] * 3}
    assert ask(served(reward={"fn": "exact_match"}), **body)["rewards"] == [0.0, 0.0, 1.0]
    base = served(reward={"fn": "exact_match"}, strip=["<|im_end|>", "<|end|>"])
    assert ask(base, **body)["rewards"] == [1.0] * 3


def test_values_of_several_functions_are_logged(served):
    base = served(reward=[{"fn": "math"}, {"fn": HERE + "by_length", "weight": 0.5, "name": "length"}])
    said = ask(base, query=["#### 4", "#### 55"], labels=["4", "4"])
    assert said["rewards"] == [4.0, 3.5] and said["extra_logs"] == {"math": [1.0, 0.0], "length": [6.0, 7.0]}


def test_a_response_without_a_reward_is_null_with_the_reason(served):
    base = served(reward={"fn": HERE + "picky", "retries": 0})
    for responses in (["yes", "no"], ["no"]):
        said = ask(base, query=responses)
        assert said["rewards"][-1] is None and len(said["rewards"]) == len(responses)
        assert "nothing for this one" in said["errors"][str(len(responses) - 1)]
    nothing_yet = served(reward={"fn": HERE + "picky", "retries": 0})  # which has scored none
    assert "nothing for this one" in ask(nothing_yet, query=["no"])["errors"]["0"]


def test_nan_is_no_reward_and_what_breaks_the_judge_spoils_no_other(served):
    base = served(Judge())
    said = ask(base, **asked("a", "bad", "nan", "bb"))
    assert said["rewards"] == [1.0, None, None, 2.0]
    assert said["errors"] == {"1": "ValueError: I cannot read this", "2": "the score is nan"}


def test_requests_that_come_while_it_is_busy_share_a_batch(served):
    judge = Judge()
    judge.gate.clear()
    base = served(judge, reward=[], reward_model=".", batch_size=6)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, base, **asked("x"))
        assert judge.begun.wait(60)
        rest = [pool.submit(ask, base, **asked("y" * i, "z")) for i in range(4)]
        while call(f"{base}/health")[1]["waiting"] < 8:
            time.sleep(0.01)
        judge.gate.set()
        assert first.result()["rewards"] == [1.0]
        assert [one.result()["rewards"] for one in rest] == [[float(i), 1.0] for i in range(4)]
    assert [len(batch) for batch in judge.batches] == [1, 6, 2]


def test_a_full_queue_turns_requests_away(served):
    judge = Judge()
    judge.gate.clear()
    base = served(judge, reward=[], reward_model=".", batch_size=1, queue=3)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, base, **asked("x"))
        assert judge.begun.wait(60)
        second = pool.submit(ask, base, **asked("a", "b"))
        while call(f"{base}/health")[1]["waiting"] < 2:
            time.sleep(0.01)
        status, said, headers = call(f"{base}/get_reward", asked("c", "d"))
        assert (status, said, headers["Retry-After"]) == (429, {"error": "2 responses are waiting already"}, "1")
        status, said, _ = call(f"{base}/get_reward", asked(*"abcd"))
        assert status == 413 and said["error"] == "4 responses in a request, and queue=3; send fewer"
        judge.gate.set()
        assert first.result()["rewards"] == [1.0] and second.result()["rewards"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"not json", "JSON"),
        (b"[1]", ""),
        ({}, "query: missing"),
        ({"query": "text"}, "query: is 'text'; expected a list"),
        ({"query": ["a", 1]}, r"query[1]: is 1; expected a text"),
        ({"query": [1] * 100_000}, "query[0]: is 1; expected a text (in quotes: '1')"),
        ({"query": ["a"], "prompts": ["a", "b"]}, "prompts has 2 entries, and query 1"),
        ({"query": ["a"], "labels": []}, "labels has 0 entries, and query 1"),
        ({"query": ["a"], "tokens": [-1]}, "tokens[0]: is -1; expected a number of at least 0"),
        ({"query": ["a"] * 4, "tokens": [500_000_000] * 4}, "tokens[0]: is 500000000; expected a number of at most"),
        (b'{"query": ["a"], "tokens": [1' + b"0" * 5000 + b"]}", ""),
        (b'{"query": ' + b"[" * 100_000, "JSON"),
        ({"query": ["a"], "messages": [[{"role": "user", "content": "?"}]]}, "messages[0] must end with what the"),
        ({"query": ["a"], "messages": [[]]}, "messages[0] must end with"),
        ({"query": ["a"], "messages": [[{"text": "a"}]]}, "'messages[0]': message 0 is not an object with role and"),
    ],
)
def test_a_bad_body_is_refused_by_key(served, body, message):
    status, said, _ = call(f"{served(Judge())}/get_reward", body)
    assert status == 400 and message in said["error"] and len(said["error"]) < 1000


@pytest.mark.parametrize("entries", ["[[" + "[]," * 500_000 + "[]]]", "[[" + "1," * 4_000_000 + "1]]"])
def test_a_body_that_would_take_seconds_to_parse_is_refused(served, entries):
    body = f'{{"query": ["a"], "labels": {entries}}}'.encode()
    status, said, _ = call(f"{served(Judge())}/get_reward", body)
    assert status == 413 and "send fewer" in said["error"]


def test_a_body_that_is_being_read_holds_up_nobody(served, monkeypatch):
    gate, begun = threading.Event(), threading.Event()

    def read(*arguments):
        begun.set()
        assert gate.wait(60)
        return read_request(*arguments)

    monkeypatch.setattr("coalign_serve.serving.reward_server.read_request", read)
    base = served(Judge())
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, base, **asked("x"))
        assert begun.wait(60)
        assert call(f"{base}/health")[0] == 200
        gate.set()
        assert slow.result()["rewards"] == [1.0]


def connect(base):
    host, port = base.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


POST = b"POST /get_reward HTTP/1.1\r\nHost: x\r\n"
HALVES = {
    "nothing": b"",
    "head": POST,
    "body": POST + b"Content-Length: 1000\r\n\r\n{",
    "chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
def test_half_a_request_is_cut_after_a_while(served, half):
    base = served(Judge(), timeout=0.2)
    with connect(base) as client:
        client.sendall(half)
        with contextlib.suppress(ConnectionError):
            assert client.recv(1000) == b""
    assert call(f"{base}/health")[0] == 200


def test_a_head_without_end_is_refused_before_the_key_is_asked_for(served):
    base = served(Judge(), key="s3cret")
    with connect(base) as client:
        client.sendall(b"POST /get_reward HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                client.sendall(b"x" * 2**14)
        with contextlib.suppress(ConnectionError):
            assert client.recv(1000).startswith(b"HTTP/1.1 400")
    assert call(f"{base}/health")[0] == 200


def test_connections_are_counted(served):
    base = served(Judge(), connections=3)
    held = [connect(base) for _ in range(3)]
    time.sleep(0.2)
    with pytest.raises(OSError):
        call(f"{base}/health")
    for client in held:
        client.close()
    time.sleep(0.2)
    assert call(f"{base}/health")[0] == 200


def test_a_client_that_leaves_is_no_news(served, caplog):
    judge = Judge()
    judge.gate.clear()
    base = served(judge)
    body = json.dumps(asked("x")).encode()
    head = POST + b"Content-Length: %d\r\n\r\n"
    for sent in (head % (len(body) + 1) + body, head % len(body) + body):
        with connect(base) as client:
            client.sendall(sent)
            time.sleep(0.1)
    judge.gate.set()
    assert call(f"{base}/health")[0] == 200
    assert not [record for record in caplog.records if record.exc_info or "Exception" in record.getMessage()]


GOOD = json.dumps(asked("x") | {"tokens": [1], "rows": [{"a": 1}], "labels": ["4"]}).encode()
REQUESTS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    POST + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
    POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n\r\n",
]
PIECES = [b"\r\n", b"\x00", b": ", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", *REQUESTS]
PIECES += [b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"Expect: 100-continue\r\n", b"\xff" * 20000, b"%ff%00"]

LISTS = {"query": st.lists(st.text(max_size=5) | ODD, min_size=2, max_size=2)}
TWO = st.lists(JSON, min_size=2, max_size=2) | JSON
TALKS = st.lists(st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=3), max_size=2)
OTHERS = dict.fromkeys(("prompts", "labels", "responses", "rows", "tokens"), TWO) | {"messages": TWO | TALKS}
BODIES = (st.fixed_dictionaries(LISTS, optional=OTHERS) | JSON).map(lambda body: json.dumps(body).encode())
BODIES |= damage(GOOD)


@CASES
def test_any_bytes_are_answered_or_cut(served, caplog, cases):
    base = served(Judge())
    port = int(base.rsplit(":", 1)[1])

    damaged = st.sampled_from(REQUESTS).flatmap(lambda request: damage(request, PIECES))
    mixed = st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join)
    try_requests(port, st.binary(max_size=200) | damaged | mixed | make_requests(POST, BODIES), cases)
    assert call(f"{base}/health")[0] == 200
    assert not [record for record in caplog.records if record.exc_info or "Exception" in record.getMessage()]


@CASES
def test_any_body_is_read_or_refused(cases):
    def check(body):
        try:
            read_request(body, "answer")
        except HttpRefusal as refusal:
            assert refusal.status in (400, 413) and str(refusal)

    try_cases(BODIES, check, cases)


def test_other_refusals_are_json_too(served):
    base = served(Judge(), max_bytes=100)
    assert call(f"{base}/elsewhere", {})[:2] == (404, {"error": "Not Found"})
    assert call(f"{base}/get_reward")[0] == 405
    status, said, _ = call(f"{base}/get_reward", asked("x" * 100))
    assert status == 413 and "more than 100 bytes" in said["error"]


def test_a_key_is_asked_for(served):
    base = served(Judge(), key="s3cret")
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "s3cret"}):
        status, said, answer = call(f"{base}/get_reward", asked("x"), **headers)
        assert status == 401 and "Authorization" in said["error"] and answer["WWW-Authenticate"] == "Bearer"
    assert call(f"{base}/get_reward", asked("x"), Authorization="Bearer s3cret")[1]["rewards"] == [1.0]
    assert call(f"{base}/health")[0] == 200


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return tiny_reward_model_dir(tmp_path_factory.mktemp("judge"), seed=3)


def test_a_reward_model_reads_messages_by_its_template_and_a_query_as_it_is(served, reward_model):
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)

    def score(text):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            return float(model.score(model.model(torch.tensor([tokens])).last_hidden_state[0, -1]))

    talks = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": said}] for said in ("2", "three")]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False).rstrip("\n") for talk in talks]
    base = served(reward=[], reward_model=str(reward_model))
    expected = pytest.approx([score(text) for text in texts], abs=1e-4)
    assert ask(base, query=["-", "-"], messages=talks)["rewards"] == expected
    plain = ["1+1=2", "1+1=three<|im_end|>", "x"]
    assert ask(base, query=plain)["rewards"] == pytest.approx([score(text) for text in plain], abs=1e-4)
    said = ask(base, query=["", "x", "y" * 3000])
    assert said["rewards"] == [None, pytest.approx(score("x"), abs=1e-4), None]
    assert "empty" in said["errors"]["0"] and "has 3000 tokens; the reward model takes 2048" in said["errors"]["2"]


def test_a_run_rewarded_over_http_learns_the_same(served, tmp_path, monkeypatch):
    """The samples' rewards, and so the weights, are those of the function itself."""
    monkeypatch.setenv("REWARD_KEY", "s3cret")
    base = served(key="s3cret", reward={"fn": "tests.digits:digits"})
    direct = settings(tmp_path, "grpo", steps=2)
    assert run(direct) == 0
    url = f"{base}/get_reward"
    remote = direct | {"output": str(tmp_path / "remote")}
    remote["reward"] = {"fn": "remote", "url": url, "api_key_env": "REWARD_KEY", "batch_size": 3, "timeout": 120}
    assert run(remote) == 0
    assert call(f"{base}/health")[1]["scored"] >= 2 * 4 * 4
    assert weights_hash(remote, 2) == weights_hash(direct, 2)
    rewards = [[line["reward/mean"] for line in metrics(one) if "reward/mean" in line] for one in (direct, remote)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 2
    folder = "".join(file.read_text(errors="replace") for file in (tmp_path / "remote").rglob("*.*l"))
    assert url in folder and "s3cret" not in folder


def test_what_cannot_be_served(tmp_path, monkeypatch):
    from coalign.report.display import Display

    with pytest.raises(ConfigError, match="nothing to serve: give `reward`"):
        load_section(ServeConfig, {})
    with pytest.raises(ConfigError, match="port: is 70000; expected a number of at most 65535"):
        load_section(ServeConfig, {"reward": {"fn": "math"}}, ["port=70000"])
    with pytest.raises(ConfigError, match=r"reward_model.*no/such"):
        load_section(ServeConfig, {"reward_model": "./no/such"})
    quiet = Display(quiet=True)
    with pytest.raises(ValueError, match="reward 'rank' compares the responses to a prompt"):
        serve(ServeConfig(reward={"fn": HERE + "rank"}), quiet)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match=f"host: other machines reach {host}.*api_key_env"):
            serve(ServeConfig(reward={"fn": "math"}, host=host, port=0), quiet)
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_env: there is no environment variable 'NO_KEY'"):
        serve(ServeConfig(reward={"fn": "math"}, api_key_env="NO_KEY"), quiet)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_lets_requests_finish(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def slow(sample):\n    pathlib.Path('begun').touch()\n    time.sleep(2)\n    return 0.5\n"
    )
    (tmp_path / "serve.yaml").write_text("reward: {fn: 'slow:slow'}\n")
    server = subprocess.Popen(
        [sys.executable, "-m", "coalign.cli", "serve-reward", "--config", "serve.yaml", "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    line = server.stdout.readline()
    assert "serving slow at http://127.0.0.1:" in line
    url = line.split()[-1]
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(call, url, asked("x"))
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        assert under_way.result()[1]["rewards"] == [0.5]
    assert server.wait(60) == -signal.SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)
