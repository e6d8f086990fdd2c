"""Comparisons within a group: all pairs, tournaments, strengths; failures."""

import math
from itertools import combinations

import pytest

from coalign.backends.scorers.reward_functions import build_reward_function
from coalign.config.errors import ConfigError
from coalign.config.schema import RewardConfig
from coalign.rewards.calls import NestedFunction, RewardCaller, RewardFailure, RewardFunction
from coalign_graders.services.groups import Comparison, Tournament, bradley_terry, swiss_round, win_rates
from coalign_graders.services.groups import PairwiseComparisons as pairwise
from tests.rewards.samples import sample

HERE = "packages.graders.tests.comparisons:"
CALLS = []


def group(*responses, number=0):
    return [sample(response, group=number, index=i) for i, response in enumerate(responses)]


@pytest.fixture
def caller(monkeypatch):
    compare = NestedFunction.__call__

    async def count(self, calls):
        CALLS.extend(tuple(one.response for one in call) for call in calls)
        return await compare(self, calls)

    monkeypatch.setattr(NestedFunction, "__call__", count)
    CALLS.clear()
    caller = RewardCaller()
    yield caller
    caller.close()


def score(caller, fn, samples, *, retries=0, timeout=30.0, **settings):
    outcomes = caller.score([RewardFunction("g", fn, settings, retries=retries, timeout=timeout)], samples)[0]
    return [str(one.error) if isinstance(one, RewardFailure) else one["reward"] for one in outcomes]


@pytest.mark.parametrize("by", ["longer", "longer_async", "Longer"])
def test_win_rates_of_all_pairs(caller, by):
    # ccc beats all; bb and xx draw and beat a
    assert score(caller, pairwise, group("a", "bb", "ccc", "xx"), by=HERE + by) == pytest.approx(
        [0.0, 1.5 / 3, 1.0, 1.5 / 3]
    )
    assert len(CALLS) == 6


def test_a_reward_function_is_asked_once_a_sample(caller):
    for fn in (pairwise, Tournament):
        values = score(caller, fn, group("a", "bb", "ccc", "dddd"), by="tests.functions:length", score="win_rate")
        assert sorted(values) == values and values[-1] == 1.0
    assert score(caller, pairwise, group("#### 4", "#### 5"), by={"fn": "tests.functions:length"}) == [0.5, 0.5]


def test_groups_are_ranked_apart(caller):
    samples = [*group("a", "bb"), *group("cccc", "ddd", number=1)]
    assert score(caller, pairwise, samples, by=HERE + "longer") == [0.0, 1.0, 1.0, 0.0]


def test_places_take_turns_and_both_orders_cancel_a_favour(caller):
    # whoever comes first wins 0.8: 0 before 1, 2 before 0, 1 before 2
    values = score(caller, pairwise, group("a", "b", "c"), by=HERE + "first_one")
    assert values == pytest.approx([0.5, 0.5, 0.5])
    assert score(caller, pairwise, group("a", "b"), by=HERE + "first_one") == pytest.approx([0.8, 0.2])
    assert score(caller, pairwise, group("a", "b"), by=HERE + "first_one", both_orders=True) == [0.5, 0.5]
    values = score(caller, pairwise, group("a", "b", "c"), by=HERE + "first_one", both_orders=True)
    assert values == pytest.approx([0.5] * 3)


def test_a_tournament_takes_few_comparisons_and_finds_the_best(caller):
    responses = ["x" * length for length in (5, 1, 8, 3, 2, 7, 4, 6)]
    values = score(caller, Tournament, group(*responses), by=HERE + "longer")
    assert len(CALLS) == 3 * 4
    assert max(range(8), key=values.__getitem__) == 2 and min(range(8), key=values.__getitem__) == 1
    assert len({frozenset(pair) for pair in CALLS}) == 12
    assert score(caller, Tournament, group(*responses), by=HERE + "longer") == values


def test_an_odd_group_and_given_rounds(caller):
    values = score(caller, Tournament, group("a", "bb", "ccc"), by=HERE + "longer", rounds=3)
    assert len(CALLS) == 3 and values == sorted(values)
    assert values == pytest.approx([-values[2], 0.0, values[2]], abs=1e-6)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("none", "returned None; expected a finite number"),
        ("text", "returned str '1'; expected a finite number"),
        ("nan", "returned float nan; expected a finite number"),
        ("two", "returned 2; expected the first one's share of the win, from 0 to 1"),
        ("below", "returned -0.1; expected the first"),
    ],
)
def test_what_is_no_share_fails_the_group(caller, returned, message):
    for fn in (pairwise, Tournament):
        values = score(caller, fn, group("a", "b"), by={"fn": HERE + "strange", "returned": returned})
        assert len(values) == 2 and all(f"'{HERE}strange' {message}" in value for value in values)


def test_a_failed_comparison_fails_its_group_alone(caller):
    samples = [*group("a"), *group("bb", "c", number=1)]
    assert "a group of one sample" in score(caller, pairwise, samples, by=HERE + "longer")[0]
    assert score(caller, pairwise, samples, by=HERE + "longer")[1:] == [1.0, 0.0]
    assert score(caller, pairwise, group("a", "b"), by=HERE + "fails") == ["'ab'"] * 2


@pytest.mark.parametrize(
    "by", [pytest.param("backtracks", marks=pytest.mark.slow), "backtracks_async", "backtracks_alone"]
)
def test_what_holds_the_interpreter_fails_its_group(caller, by):
    bad, good = group("a", "bad"), group("bb", "c", number=1)
    first, second, *others = score(caller, pairwise, bad + good * (by != "backtracks_async"), by=HERE + by, timeout=2.0)
    assert first == second == "no answer within 2 s" and sum(others) == len(others) / 2
    assert sum(score(caller, pairwise, good, by=HERE + by)) == 1.0


def test_a_comparison_that_ends_its_process_fails_its_group_alone(caller):
    samples = [*group("bad", "bad"), *group("bb", "c", number=1)]
    first, _, *others = score(caller, Tournament, samples, by=HERE + "exits")
    assert first == f"the process of '{HERE}exits' exited with code 1 during a call" and others == [0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"\.by: missing"),
        ({"by": {"answer_key": "x"}}, r"\.by\.fn: missing"),
        ({"fn": "tournament", "by": "math", "rounds": 0}, r"\.rounds: is 0"),
        ({"by": "nothing"}, r"\.by: 'nothing' is not in coalign.rewards"),
        ({"by": {"fn": HERE + "longer_async", "sharpe": 1}}, r"by\.sharpe: unknown argument.*'sharp'"),
        ({"by": {"fn": HERE + "strange"}}, r"by\.returned: missing"),
        ({"by": HERE + "grouped"}, "expected a function of one sample or two samples"),
        ({"by": {"fn": "pairwise", "by": "math"}}, r"takes \(group\)"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=rf"reward\[0\].*{message}"):
        build_reward_function(RewardConfig(**{"fn": "pairwise"} | settings), "reward.0")


def test_short_names_reach_the_classes():
    function = build_reward_function(RewardConfig(fn="tournament", by="math", rounds=2), "reward.0")
    assert function.takes == "group" and function.is_async and function.name == "tournament"
    limits = RewardConfig(fn="cosine_length", by="math", max_tokens=10)
    assert build_reward_function(limits, "reward.0").name == "cosine_length"


def test_win_rates_count_draws_by_half_and_know_nothing_of_the_absent():
    assert win_rates([Comparison(0, 1, 1.0), Comparison(1, 2, 0.5)], 4) == [1.0, 0.25, 0.5, 0.5]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_bradley_terry_of_one_game_by_hand():
    # d/dθ of log σ(2θ) + ½ log σ(θ) + ½ log σ(-θ), at θ and -θ: σ(-2θ) = σ(θ) - ½
    strong, weak = bradley_terry([Comparison(0, 1, 1.0)], 2)
    assert weak == pytest.approx(-strong) and sigmoid(-2 * strong) == pytest.approx(sigmoid(strong) - 0.5)


def gradient_at(theta, games, prior):
    gradient = [prior * (0.5 - sigmoid(t)) for t in theta]
    for first, second, won in games:
        surprise = won - sigmoid(theta[first] - theta[second])
        gradient[first] += surprise
        gradient[second] -= surprise
    return gradient


@pytest.mark.parametrize("prior", [0.01, 1.0, 5.0])
def test_bradley_terry_stands_where_the_gradient_is_zero(prior):
    games = [Comparison(i, j, (i * 7 + j * 3) % 5 / 4) for i, j in combinations(range(5), 2)] + [Comparison(0, 4, 1.0)]
    theta = bradley_terry(games, 6, prior)
    assert gradient_at(theta, games, prior) == pytest.approx([0.0] * 6, abs=1e-9) and theta[5] == 0.0


@pytest.mark.parametrize("prior", [0.001, 1.0])
def test_bradley_terry_of_one_sided_games_is_found_too(prior):
    games = [Comparison(i, j, 1.0) for i, j in combinations(range(32), 2)]
    theta = bradley_terry(games, 32, prior)
    assert gradient_at(theta, games, prior) == pytest.approx([0.0] * 32, abs=1e-9)
    assert theta == sorted(theta, reverse=True)


def test_beating_the_strong_counts_for_more():
    # 0 and 3 won one game each, 0 against one that won another, 3 against one that lost another
    games = [Comparison(0, 1, 1.0), Comparison(1, 2, 1.0), Comparison(3, 4, 1.0), Comparison(5, 4, 1.0)]
    theta = bradley_terry(games, 6)
    assert win_rates(games, 6)[0] == win_rates(games, 6)[3] == 1.0 and theta[0] > theta[3]


def test_strengths_of_the_undefeated_are_finite_and_a_weak_prior_lets_them_grow():
    games = [Comparison(0, 1, 1.0)] * 10
    one, other = bradley_terry(games, 2)[0], bradley_terry(games, 2, prior=0.01)[0]
    assert 0 < one < other < math.inf


def test_a_round_pairs_equals_that_have_not_met():
    assert swiss_round([], 4) == [(0, 1), (2, 3)]
    games = [Comparison(0, 1, 0.0), Comparison(2, 3, 1.0)]  # 1 and 2 have a point
    assert swiss_round(games, 4) == [(1, 2), (0, 3)]
    games += [Comparison(1, 2, 1.0), Comparison(0, 3, 1.0)]  # 1: 2, 0 and 2: 1, 3: 0
    assert swiss_round(games, 4) == [(1, 3), (0, 2)]  # 1 has met 0 and 2


def test_of_an_odd_number_each_sits_out_once():
    games, idle = [], []
    for _ in range(5):
        pairs = swiss_round(games, 5)
        (absent,) = set(range(5)) - {i for pair in pairs for i in pair}
        idle.append(absent)
        games += [Comparison(i, j, float(i > j)) for i, j in pairs]
    assert sorted(idle) == list(range(5)) and len(games) == 10


def test_after_all_have_met_there_are_rematches():
    games = [Comparison(i, j, 0.5) for i, j in combinations(range(4), 2)]
    assert sorted(i for pair in swiss_round(games, 4) for i in pair) == [0, 1, 2, 3]


def test_a_huge_integer_is_named():
    with pytest.raises(ValueError, match="expected a finite number"):
        NestedFunction({"fn": "contains"})._to_number(10**5000)
