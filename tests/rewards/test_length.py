"""Lengths: values worked out by hand, and the cosine reward's shape."""

import math
from contextlib import closing

import pytest
import torch

from coalign.backends.scorers.reward_functions import build_reward_function
from coalign.config.errors import ConfigError
from coalign.config.schema import RewardConfig
from coalign.rewards import CosineLength, length_penalty, length_range, length_target
from coalign.rewards.calls import RewardCaller, RewardFailure, RewardFunction
from tests.rewards.samples import sample


@pytest.mark.parametrize(("count", "expected"), [(9, 0.0), (10, 1.0), (15, 1.0), (20, 1.0), (21, 0.0)])
def test_a_range_includes_its_ends(count, expected):
    assert length_range(sample(tokens=count), min_tokens=10, max_tokens=20) == expected


@pytest.mark.parametrize(("count", "expected"), [(100, 1.0), (75, 0.5), (125, 0.5), (50, 0.0), (150, 0.0), (400, 0.0)])
def test_a_target_is_missed_linearly(count, expected):
    assert length_target(sample(tokens=count), target=100, tolerance=50) == expected


def test_an_impossible_range_is_refused():
    with pytest.raises(ValueError, match="min_tokens=30 is more than max_tokens=20"):
        length_range(sample(), min_tokens=30, max_tokens=20)


@pytest.mark.parametrize(
    "rule",
    [
        lambda s: length_penalty(s, max_tokens=10, buffer=5),
        lambda s: length_range(s, max_tokens=10),
        lambda s: length_target(s, target=5, tolerance=5),
    ],
)
def test_unknown_lengths_are_no_zeros(rule):
    texts_only = sample("hello", tokens=0)
    with pytest.raises(ValueError, match="tokens are not known"):
        rule(texts_only)
    rule(sample("", tokens=0))


def cosine(*samples, **settings):
    function = RewardFunction("cosine_length", CosineLength, {"by": "math", "max_tokens": 100} | settings, retries=0)
    with closing(RewardCaller()) as caller:
        [outcomes] = caller.score([function], samples)
    return [str(one.error) if isinstance(one, RewardFailure) else one["reward"] for one in outcomes]


def test_cosine_by_hand():
    right = [sample("#### 4", tokens=count, answer="4") for count in (25, 50, 75, 99, 100, 101)]
    root = math.sqrt(0.5)
    expected = [1.5 + root / 2, 1.5, 1.5 - root / 2, 1.5 - math.cos(math.pi / 100) / 2, -10.0, -10.0]
    assert cosine(*right) == pytest.approx(expected)
    wrong = [sample("#### 5", tokens=count, answer="4") for count in (50, 99, 100)]
    assert cosine(*wrong) == pytest.approx([-5.0, -5 - 5 * math.cos(0.99 * math.pi), -10.0])


def test_cosine_settings():
    samples = [sample("#### 4", tokens=50, answer="4"), sample("#### 5", tokens=50, answer="4")]
    values = cosine(*samples, right=[1.0, 0.0], wrong=[-1.0, -0.5], by={"fn": "math", "answer_key": "answer"})
    assert values == pytest.approx([0.5, -0.75])
    assert cosine(*samples, threshold=2.0, wrong=[-4.0, 0.0]) == pytest.approx([-2.0, -2.0])
    assert cosine(sample("#### 4", tokens=100, answer="4"), exceeded=-0.5) == [-0.5]


def test_what_the_inner_reward_raises_fails_the_sample():
    (why,) = cosine(sample("#### 4", question="?"))
    assert "answer_key" in why


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ({"fn": "math", "answer_kee": "x"}, r"reward\[1\]\.by\.answer_kee: unknown argument of math.*answer_key"),
        ("maths", r"reward\[1\]\.by: 'maths' is not in coalign\.rewards.*'math'"),
        ({"fn": "pairwise", "by": "math"}, r"reward\[1\]\.by: 'pairwise' takes \(group\); .* a function of one sample"),
        (
            {"fn": "cosine_length", "by": {"fn": "math", "strict": 1}, "max_tokens": 5},
            r"reward\[1\]\.by\.by\.strict: is 1; expected true or false",
        ),
    ],
)
def test_bad_inner_rewards_are_refused_by_key(by, message):
    with pytest.raises(ConfigError, match=message):
        build_reward_function(RewardConfig(fn="cosine_length", by=by, max_tokens=10), "reward.1")


def test_only_chosen_tokens_count():
    one = sample("x", tokens=6)
    one.loss_mask = torch.tensor([False, True, True, False, False, True, True])
    assert length_range(one, min_tokens=4, max_tokens=4) == 1.0
