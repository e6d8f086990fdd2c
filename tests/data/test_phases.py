"""Shares of a source that never meet, whatever the runs of a pipeline differ in."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.loader import build_loader
from coalign.data.shuffle import DataPhase
from tests.data import reading
from tests.data.reading import TOKENIZER, numbered

WEIGHTS = {"sft": 2, "rm": 4, "rl": 4}


def shares(weights, rows):
    """{phase: the numbers below ``rows`` that belong to it}."""
    phases = {name: DataPhase(weights, name) if weight else [] for name, weight in weights.items()}
    return {name: [n for n in range(rows) if n in phase] for name, phase in phases.items()}


def loader(*paths, phase, **config):
    return reading.loader(*paths, phases=WEIGHTS, phase=phase, batch_size=10, **config)


def rows(loader):
    return sorted(row["n"] for _, batch in loader.all() for row in batch["rows"])


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 7), min_size=1), st.integers(0, 300))
def test_shares_are_disjoint_cover_everything_and_are_exact_to_a_hand(weights, count):
    if not sum(weights.values()):
        return
    found = shares(weights, count)
    assert Counter(n for share in found.values() for n in share) == Counter(range(count))
    hand = sum(weights.values())
    for name, share in found.items():
        assert abs(len(share) - count * weights[name] / hand) < max(1, weights[name])
        assert len(share) == count * weights[name] / hand or count % hand


def test_2_4_4_of_ten_hands():
    found = shares(WEIGHTS, 50)
    assert [len(found[name]) for name in WEIGHTS] == [10, 20, 20]
    hands = [
        [name for n in range(first, first + 5) for name in WEIGHTS if n in found[name]] for first in range(0, 50, 5)
    ]
    assert all(sorted(hand) == ["rl", "rl", "rm", "rm", "sft"] for hand in hands)
    assert len({tuple(hand) for hand in hands}) > 4  # dealt in another order each time


def test_only_the_proportions_matter():
    assert shares(WEIGHTS, 100) == shares({"rl": 0.4, "rm": 0.4, "sft": 0.2}, 100)
    assert shares({"a": 1 / 3, "b": 2 / 3}, 100) == shares({"a": 1, "b": 2}, 100)


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"data\.phases\.a is 0, which leaves no row"):
        DataPhase({"a": 0, "b": 1}, "a")


@pytest.mark.parametrize("stream", [False, True])
def test_runs_of_a_pipeline_agree_on_the_shares(tmp_path, stream):
    a, b = numbered(tmp_path / "a.jsonl", 40), numbered(tmp_path / "b.jsonl", 23)
    made = {
        phase: loader(a, b, phase=phase, seed=seed, shuffle=phase != "rm", stream=stream)
        for seed, phase in enumerate(WEIGHTS)
    }
    found = {phase: rows(one) for phase, one in made.items()}
    assert sorted(n for share in found.values() for n in share) == sorted([*range(40), *range(23)])
    assert len(found["sft"]) == 8 + 4 and found["sft"] == rows(loader(a, b, phase="sft"))
    drawn = {row["n"] for _ in range(9) for row in made["sft"].next()["rows"]}
    assert drawn == set(found["sft"])


def test_the_report_says_how_many_rows_the_phase_has(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 50)
    assert loader(path, phase="rm").report() == "a.jsonl: 20 of 50 rows (phase rm): 20 used"
    stream = loader(path, phase="rm", stream=True)
    stream.next()
    assert stream.report() == "a.jsonl: a stream, 10 rows of phase rm so far: 10 used"


def test_evaluation_is_not_split(tmp_path):
    source = SourceConfig(path=numbered(tmp_path / "a.jsonl", 50))
    config = DataConfig(train=[source], eval=[source], phases=WEIGHTS, phase="rm", stream=True)
    assert build_loader(config, TOKENIZER, kind="prompts", split="eval", batch_size=10, seed=0).rows == 50
