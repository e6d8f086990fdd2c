"""Rewards over HTTP against a real server: the format, each way to fail, who retries, the circuit."""

import gzip
import logging
import math
import threading
import time
from email.utils import formatdate

import pytest
from hypothesis import strategies as st

from coalign.backends.scorers.reward_functions import build_reward_function
from coalign.config.errors import ConfigError
from coalign.config.schema import RewardConfig
from coalign.rewards.calls import GiveUp, RewardFailure, _read_outcomes
from coalign.services import ServiceError
from coalign_graders.services.client import _retry_after
from coalign_graders.services.remote import Remote, read_answer
from packages.graders.tests.service import lengths
from tests.fuzzing import CASES, JSON, damage, try_cases
from tests.rewards.samples import sample


def said(response, **row):
    one = sample(response, **row)
    one.raw_response = response
    return one


SAMPLES = [said("x" * i, group=i // 2, index=i % 2, answer=f"a{i}") for i in range(10)]


def remote(*services, **settings):
    url = [one if isinstance(one, str) else one.url for one in services]
    limits = {"retries": 0, "patience": 0.0}
    return build_reward_function(RewardConfig(**{"fn": "remote", "url": url} | limits | settings), "reward.0")


def score(caller, function, samples=SAMPLES):
    return caller.score([function], samples)[0]


def rewards(outcomes):
    return [one.reason if isinstance(one, RewardFailure) else one["reward"] for one in outcomes]


def test_what_is_sent_is_what_openrlhf_sends(caller, service):
    server = service()
    one = sample("4", answer="four", unit="apples")
    one.prompt, one.raw_response = "<|user|>2+2?<|assistant|>", "4<|end|>"
    assert rewards(score(caller, remote(server, send=[]), [one])) == [len("<|user|>2+2?<|assistant|>4<|end|>")]
    assert server.bodies == [
        {"query": ["<|user|>2+2?<|assistant|>4<|end|>"], "prompts": ["<|user|>2+2?<|assistant|>"], "labels": ["four"]}
    ]
    assert server.headers[0]["Content-Type"] == "application/json" and "Authorization" not in server.headers[0]


def test_what_else_can_be_sent(caller, service):
    server = service()
    one = sample("4", tokens=3, gold="four", unit="apples")
    one.messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    send = ["messages", "responses", "rows", "tokens"]
    score(caller, remote(server, send=send, label_key="gold", extra={"model": "judge", "k": 2}), [one])
    (body,) = server.bodies
    assert body["messages"] == [one.messages] and body["responses"] == ["4"] and body["tokens"] == [3]
    assert body["rows"] == [{"gold": "four", "unit": "apples"}] and body["labels"] == ["four"]
    assert body["model"] == "judge" and body["k"] == 2


def test_by_default_conversations_and_lengths_go_along(caller, service):
    server = service()
    score(caller, remote(server), [sample("4")])
    assert set(server.bodies[0]) == {"query", "prompts", "labels", "messages", "tokens", "tools", "truncated"}
    assert server.bodies[0]["labels"] == [None]


def test_samples_travel_in_batches_and_come_back_in_order(caller, service):
    server = service(answer=lambda body: (200, {"rewards": [float(label[1:]) for label in body["labels"]]}, {}))
    assert rewards(score(caller, remote(server, batch_size=4, concurrency=2))) == [float(i) for i in range(10)]
    assert [len(body["query"]) for body in server.bodies] == [4, 4, 2]


def test_no_more_requests_at_once_than_allowed(caller, service):
    running, most, lock, full = 0, 0, threading.Lock(), threading.Event()

    def slow(body):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()
        assert full.wait(60)  # the first ones, until there are three
        with lock:
            running -= 1
        return lengths(body)

    score(caller, remote(service(answer=slow), batch_size=1, concurrency=3, timeout=90))
    assert most == 3


def test_extra_logs_that_are_numbers_become_entries(caller, service):
    logs = {"accuracy": [1, 0.5], "names": ["a", "b"], "short": [1.0], "total": 3.0}
    server = service((200, {"rewards": [0.5, 2], "scores": [1, 1], "extra_logs": logs}, {}))
    expected = [{"reward": 0.5, "accuracy": 1.0}, {"reward": 2.0, "accuracy": 0.5}]
    assert score(caller, remote(server), SAMPLES[:2]) == expected


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"rewards": [1.0]}, {}), "1 rewards for 2 samples"),
        ((200, {"rewards": [1.0] * 3}, {}), "3 rewards for 2 samples"),
        ((200, {"scores": [1.0, 1.0]}, {}), "no list \"rewards\": {'scores': [1.0, 1.0]}"),
        ((200, {"rewards": 1.0}, {}), 'no list "rewards"'),
        ((200, [1.0, 1.0], {}), 'no list "rewards"'),
        ((200, b"<html>It works!</html>", {}), "no JSON: <html>It works!"),
        ((200, b"", {}), "no JSON"),
        ((200, b"\xff\xfe\x00", {}), "no JSON"),
        ((500, {"error": "out of memory"}, {}), 'answered 500: {"error": "out of memory"}'),
        ((502, b"Bad Gateway", {}), "answered 502: Bad Gateway"),
        ((429, b"slow down", {}), "answered 429: slow down"),
        ((408, b"", {}), "answered 408"),
        ((200, gzip.compress(b"0" * 2**25), {"Content-Encoding": "gzip"}), "compressed (gzip)"),
        ((200, b"0" * (2**24 + 1), {}), "more than 16777216 bytes"),
        ((200, b"[" * 100_000, {}), "no JSON"),
        ((200, b'{"rewards": [1, 1' + b"0" * 5000 + b"]}", {}), "no JSON"),
    ],
)
def test_an_answer_without_rewards_fails_the_samples_and_is_asked_for_again(caller, service, answer, message):
    server = service(answer)
    outcomes = score(caller, remote(server), SAMPLES[:2])
    assert rewards(outcomes) == ["service"] * 2
    assert message in str(outcomes[0].error) and server.url in str(outcomes[0].error)
    assert len(server.bodies) == 1

    server = service(answer)
    assert rewards(score(caller, remote(server, retries=1), SAMPLES[1:3])) == [1.0, 2.0]
    assert len(server.bodies) == 2


@CASES
def test_any_answer_of_a_service_is_read_or_refused(caller, cases):
    two = st.lists(JSON, min_size=2, max_size=2)
    answers = JSON | st.fixed_dictionaries({"rewards": two}, optional={"errors": JSON, "extra_logs": JSON})
    function = remote("http://127.0.0.1:1/x")

    def check(answer):
        try:
            results = read_answer(answer, 2, "here")
        except ServiceError as problem:
            assert len(str(problem)) < 1000
            return
        for result in results:
            if isinstance(result, GiveUp):
                assert len(str(result)) < 1000
            else:
                _read_outcomes(function, result, 1)

    try_cases(answers, check, cases)


@CASES
def test_any_retry_after_is_read_or_ignored(cases):
    def check(value):
        assert (found := _retry_after(value)) is None or found >= 0

    try_cases(st.text() | damage(formatdate().encode()).map(lambda raw: raw.decode("latin-1")), check, cases)


@pytest.mark.parametrize("seconds", ["9" * 400, "Sun, 22 Nov 99999 20:00:00 GMT", "soon"])
def test_a_retry_after_that_is_no_number_of_seconds_is_ignored(caller, service, seconds):
    server = service((429, b"", {"Retry-After": seconds}))
    assert rewards(score(caller, remote(server), SAMPLES[:1])) == ["service"]
    assert rewards(score(caller, remote(server, retries=1), SAMPLES[3:4])) == [3.0]


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 422])
def test_a_refusal_is_not_asked_for_again(caller, service, status):
    server = service(answer=lambda body: (status, {"error": "I do not want this"}, {"Location": "/elsewhere"}))
    outcomes = score(caller, remote(server, retries=5), SAMPLES[:2])
    assert rewards(outcomes) == ["raised"] * 2 and len(server.bodies) == 1
    assert f"answered {status}" in str(outcomes[0].error) and "I do not want this" in str(outcomes[0].error)


def test_a_sample_without_a_reward_fails_alone_and_for_good(caller, service):
    said = {"rewards": [1.0, None, 3.0], "errors": {"1": "nothing to read"}}
    server = service((200, said, {}))
    outcomes = score(caller, remote(server, retries=3), SAMPLES[:3])
    assert rewards(outcomes) == [1.0, "raised", 3.0] and len(server.bodies) == 1
    assert str(outcomes[1].error) == f"{server.url}: no reward: nothing to read"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"rewards": [1.0, NaN, Infinity, "2"]}', [1.0, "not_finite", "not_finite", "wrong_type"]),
        ({"rewards": [10**400, 1], "extra_logs": {"x": [10**400, 1]}}, ["not_finite", 1.0]),
    ],
    ids=["nan and texts", "too large for a float"],
)
def test_what_is_no_reward(caller, service, body, expected):
    server = service((200, body, {}))
    assert rewards(score(caller, remote(server), SAMPLES[: len(expected)])) == expected


def test_only_the_samples_of_a_failed_request_are_sent_again(caller, service):
    seen = set()

    def fails_once_for_the_first(body):
        if "a0" in body["labels"] and "a0" not in seen:
            seen.add("a0")
            return 503, {}, {}
        return lengths(body)

    server = service(answer=fails_once_for_the_first)
    assert rewards(score(caller, remote(server, retries=1, batch_size=5))) == [float(i) for i in range(10)]
    assert sorted(body["labels"][0] for body in server.bodies) == ["a0", "a0", "a5"]


@pytest.mark.parametrize(("status", "form"), [(429, "seconds"), (503, "date")])
def test_retry_after_is_honoured(caller, service, status, form):
    # A date has whole seconds: one two ahead is at least one away.
    after = "1" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
    server = service((status, {}, {"Retry-After": after}))
    begun = time.monotonic()
    assert rewards(score(caller, remote(server, retries=1), SAMPLES[3:4])) == [3.0]
    assert time.monotonic() - begun >= 0.9


def test_services_are_taken_in_turn(caller, service):
    servers = service(), service()
    score(caller, remote(*servers, batch_size=2))
    assert sorted(len(server.bodies) for server in servers) == [2, 3]


def test_the_circuit_opens_says_why_and_closes_again(caller, service, caplog):
    server = service(*[(500, {"error": "down"}, {})] * 3)
    function = remote(server, open_after=3, pause=30, batch_size=1, concurrency=1)
    with caplog.at_level(logging.WARNING):
        outcomes = score(caller, function, SAMPLES[:8])
    assert rewards(outcomes) == ["service"] * 8 and len(server.bodies) == 3
    last = str(outcomes[-1].error)
    assert "the circuit is open, no request was made" in last and "3 failures in a row" in last
    assert server.url in last and 'answered 500: {"error": "down"}' in last
    assert caplog.text.count("no requests for") == 1
    (breaker,) = function.fn._services.values()
    breaker._clock = lambda: time.monotonic() + 30
    assert rewards(score(caller, function, SAMPLES[:8])) == [float(i) for i in range(8)]


def test_while_one_service_rests_the_others_work(caller, service):
    good, bad = service(), service(answer=lambda body: (500, {}, {}))
    function = remote(bad, good, open_after=1, batch_size=1, concurrency=1, retries=1)
    assert rewards(score(caller, function)) == [float(i) for i in range(10)]
    assert len(bad.bodies) == 1 and len(good.bodies) == 10


def test_a_refusal_is_no_reason_to_open_the_circuit(caller, service):
    server = service(answer=lambda body: (404 if "a0" in body["labels"] else 429, {}, {}))
    function = remote(server, open_after=1, batch_size=1, concurrency=1)
    score(caller, function)
    assert len(server.bodies) == 10


def test_no_answer_in_time_opens_the_circuit(caller, service):
    release = threading.Event()
    server = service(answer=lambda body: release.wait(30) and lengths(body))
    function = remote(server, open_after=1, timeout=0.3)
    assert rewards(score(caller, function, SAMPLES[:2])) == ["service"] * 2
    outcomes = score(caller, function, SAMPLES[:2])
    release.set()
    assert rewards(outcomes) == ["service"] * 2 and "the last: no answer in time" in str(outcomes[0].error)


def test_an_outage_is_outlasted_by_enough_retries(caller, service):
    server = service(*[(500, {}, {})] * 2)
    function = remote(server, open_after=1, pause=0.15, retries=4)
    assert rewards(score(caller, function, SAMPLES[:2])) == [0.0, 1.0]


@pytest.mark.parametrize(
    "broken",
    [
        (500, {}, {}),
        (503, {}, {"Retry-After": "0"}),
        (200, b"<html>", {}),
        (200, {"rewards": [math.nan] * 10}, {}),
        (200, {"rewards": [10**400] * 10}, {}),
        (200, {"rewards": ["good"] * 10}, {}),
        "reset",
        "silence",
    ],
    ids=["500", "503", "html", "nan", "huge", "texts", "reset", "silence"],
)
def test_a_service_that_fails_for_a_while_costs_no_sample(caller, service, broken):
    def answer(body):
        if len(server.bodies) > 3:
            return lengths(body)
        if broken == "silence":
            time.sleep(1)
        if isinstance(broken, str):
            raise ConnectionResetError
        return broken

    server = service(answer=answer)
    function = remote(server, patience=20.0, pause=0.1, timeout=0.3)
    assert rewards(score(caller, function)) == [float(i) for i in range(10)]
    assert caller.service_failures["remote"] >= 30 and len(server.bodies) > 3


def test_one_sample_of_nan_holds_up_nothing(caller, service):
    server = service(answer=lambda body: (200, {"rewards": [math.nan if x == "a3" else 1 for x in body["labels"]]}, {}))
    start = time.monotonic()
    assert rewards(score(caller, remote(server, patience=600.0))) == [1.0] * 3 + ["not_finite"] + [1.0] * 6
    assert time.monotonic() - start < 10 and not caller.service_failures.total()


def test_a_service_that_stays_away_fails_its_samples_once_patience_is_over(caller):
    start = time.monotonic()
    outcomes = score(caller, remote("http://127.0.0.1:1/get_reward", patience=0.5))
    assert rewards(outcomes) == ["service"] * 10 and "ConnectError" in str(outcomes[0].error)
    assert 0.4 < time.monotonic() - start < 10


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(caller, service, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server = service((401, {"error": "no"}, {}))
    config = RewardConfig(fn="remote", url=server.url + "?code=hidden", api_key_env="JUDGE_KEY", retries=0)
    with caplog.at_level(logging.WARNING):
        (outcome,) = score(caller, build_reward_function(config, "reward.0"), SAMPLES[:1])
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(config.model_dump()) + str(outcome.error) + caplog.text
    assert "hidden" not in str(outcome.error)


def test_a_row_that_is_no_json_is_not_sent(caller, service):
    server = service()
    outcomes = score(caller, remote(server, retries=3), [sample("1", answer={1, 2})])
    assert rewards(outcomes) == ["raised"] and "cannot be sent as JSON" in str(outcomes[0].error)
    assert not server.bodies


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"reward\[0\]\.url: missing"),
        ({"url": []}, r"reward\[0\]\.url"),
        ({"url": "localhost:5000"}, r"reward\[0\]\.url\[0\]: is 'localhost:5000'; expected http://HOST:PORT/PATH"),
        ({"url": "ftp://host/x"}, r"expected http://HOST"),
        ({"url": "http://host:99999/"}, r"reward\[0\]\.url\[0\]: .*[Pp]ort"),
        ({"url": ["http://host/", "host"]}, r"reward\[0\]\.url\[1\]"),
        ({"url": "http://me:pw@host/"}, r"api_key_env"),
        ({"url": "http://h/", "batch_size": 0}, r"reward\[0\]\.batch_size: is 0"),
        ({"url": "http://h/", "concurrency": -1}, r"reward\[0\]\.concurrency: is -1"),
        ({"url": "http://h/", "pause": 0}, r"reward\[0\]\.pause: is 0"),
        ({"url": "http://h/", "send": ["response"]}, r"reward\[0\]\.send\[0\]: is 'response'; .*'responses'"),
        ({"url": "http://h/", "batchsize": 1}, r"reward\[0\]\.batchsize: unknown argument of Remote.*batch_size"),
    ],
)
def test_bad_settings_are_refused_by_key(settings, message):
    with pytest.raises(ConfigError, match=message) as refused:
        build_reward_function(RewardConfig(fn="remote", **settings), "reward.0")
    assert "pw" not in str(refused.value)


def test_a_key_that_is_not_there_and_extras_that_collide(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_env is 'JUDGE_KEY'"):
        Remote(url=["http://h/"], api_key_env="JUDGE_KEY")
    with pytest.raises(ValueError, match=r"extra has \['query'\]"):
        Remote(url=["http://h/"], extra={"query": 1})
