"""Judges over HTTP, in the form of OpenAI's API, that misbehave: whatever the service does, no sample is lost."""

import pytest

from coalign.backends.scorers.reward_functions import build_reward_function
from coalign.config.errors import ConfigError
from coalign.config.schema import RewardConfig
from coalign.rewards.calls import RewardFailure
from coalign_graders.services.remote_judge import RemoteJudge
from tests.rewards.samples import sample

GROUPS = [sample(str(grade), group=grade // 3, index=grade % 3, prompt="Grade me") for grade in range(1, 7)]


def said(text, **more):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, **more}]}, {}


def grade(body):
    (message,) = body["messages"]
    return said(f"Good. Grade: {message['content'].split('<response>')[1].split()[0]}", finish_reason="stop")


def compare(body):
    first, second = (body["messages"][0]["content"].split(f"<response {label}>")[1].split()[0] for label in "AB")
    return said(f"Verdict: {'A' if int(first) > int(second) else 'B'}")


def judge(server, **settings):
    limits = {"retries": 0, "patience": 20.0, "timeout": 10.0}
    config = {"fn": "remote_judge", "url": server.url, "judge": "large"} | limits | settings
    return build_reward_function(RewardConfig(**config), "reward.0")


def score(caller, function, samples=GROUPS):
    (outcomes,) = caller.score([function], samples)
    return [one.reason if isinstance(one, RewardFailure) else one["reward"] for one in outcomes], outcomes


GRADES = [pytest.approx((grade - 1) / 9) for grade in range(1, 7)]


def test_grades_and_what_is_sent(caller, service, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    server = service(answer=grade)
    extra = {"max_tokens": None, "max_completion_tokens": 7}
    assert score(caller, judge(server, extra=extra, api_key_env="JUDGE_KEY"))[0] == GRADES
    body = next(body for body in server.bodies if "\n3\n" in body["messages"][0]["content"])
    assert body.pop("messages")[0]["role"] == "user"
    assert body == {"model": "large", "temperature": 0.0, "max_completion_tokens": 7}
    assert server.headers[0]["Authorization"] == "Bearer hunter2" and len(server.bodies) == 6


def test_comparisons(caller, service):
    function = judge(service(answer=compare), ask={"fn": "pairwise", "opponents": 2})
    assert score(caller, function)[0] == [0.0, 1.0, 0.0, 0.5, 1.0, "raised"]  # the last has nothing to beat


def test_a_rubric(caller, service):
    def answer(body):
        (message,) = body["messages"]
        number = int(message["content"].split("<response>")[1].split()[0])
        return said(f"1: {'yes' if number > 1 else 'no'}" + f"\n2: {'yes' if number > 2 else 'no'}" * (number != 5))

    rubric = ["Above one.", {"criterion": "Above two.", "weight": 3}]
    ask = {"fn": "coalign_graders.services.rubric:Rubric", "criteria": rubric}
    reasons, outcomes = score(caller, judge(service(answer=answer), ask=ask))
    assert reasons == [0.0, 0.25, 1.0, 1.0, "raised", 1.0]
    assert outcomes[1] == {"reward": 0.25, "criterion_1": 1.0, "criterion_2": 0.0}
    function = judge(service(answer=answer), ask=ask | {"criteria": None})
    reasons, outcomes = score(caller, function)
    assert reasons == ["raised"] * 6 and "the row has no rubric under 'rubric'" in str(outcomes[0].error)
    with pytest.raises(ValueError, match="no weight above 0"):
        RemoteJudge.check_row({"rubric": [{"criterion": "a", "weight": -1}]}, ask=ask | {"criteria": None}, url="")
    RemoteJudge.check_row({}, ask="pointwise")


@pytest.mark.parametrize(
    "broken",
    [
        *((500, {}, {}), (429, {}, {"Retry-After": "0"}), (503, {}, {"Retry-After": "0"}), (200, b"<html>", {})),
        *((200, b'{"choices": [', {}), (200, [], {}), (200, {}, {}), (200, {"choices": []}, {})),
        *((200, {"choices": [None]}, {}), (200, {"choices": [{"text": "Grade: 3"}]}, {}), said(None), said(3)),
        *(said(""), said(" \n", finish_reason="stop")),
    ],
    ids=str,
)
def test_a_judge_that_fails_for_a_while_costs_no_sample(caller, service, broken):
    """How connections fail: test_remote.py, of the same client."""
    server = service(answer=lambda body: grade(body) if len(server.bodies) > 8 else broken)
    assert score(caller, judge(server))[0] == GRADES
    assert caller.service_failures["remote_judge"] >= 6


def test_only_what_has_no_answer_is_asked_again(caller, service):
    def answer(body):
        question = body["messages"][0]["content"]
        seen = [one["messages"][0]["content"] for one in server.bodies].count(question)
        return grade(body) if "\n1\n" not in question or seen > 3 else (429, {}, {"Retry-After": "0"})

    server = service(answer=answer)
    assert score(caller, judge(server))[0] == GRADES
    assert len(server.bodies) == 6 + 3


@pytest.mark.parametrize(
    "answer",
    [
        said("I cannot say."),
        said("Grade: 11"),
        said(None, finish_reason="length"),
        said("", finish_reason="content_filter"),
        (200, {"choices": [{"message": {"content": None, "refusal": "No."}}]}, {}),
    ],
)
def test_what_has_no_verdict_fails_alone_and_is_not_asked_again(caller, service, answer):
    server = service(answer=lambda body: answer if "\n2\n" in body["messages"][0]["content"] else grade(body))
    reasons, outcomes = score(caller, judge(server, retries=3))
    assert reasons == [GRADES[0], "raised", *GRADES[2:]]
    assert "no verdict in what the judge answers" in str(outcomes[1].error) and len(server.bodies) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ask": "graded"}, "'graded' is not in coalign.rewards.judge_questions"),
        ({"ask": {"fn": "pointwise", "low": 3, "high": 2}}, "grades go from the lower to the higher"),
        ({"ask": {"fn": "pointwise", "template": "{what}"}}, "has the field {what}"),
        ({"url": "judge:8000"}, "expected http://HOST:PORT/PATH"),
        ({"judge": 3}, "expected a text"),
    ],
)
def test_settings_are_checked_before_a_run(service, settings, message):
    with pytest.raises(ConfigError) as caught:
        judge(service(), **settings)
    assert message in str(caught.value)
