"""Sampling against hand-worked values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coalign.backends.engines.sampling import _penalise, draw, sample, stream_key, truncate, uniforms
from tests.backends.native.helpers import SAMPLING, replace

PROBS = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]])


def splitmix64(state: int) -> int:
    """The generator's published step, in Python's exact integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


def test_the_first_numbers_of_splitmix64():
    # Reference output of the public-domain C code for seed 1234567.
    assert splitmix64(1234567) == 6457827717110365317
    assert uniforms(torch.tensor([1234567]), torch.tensor([1])).item() == (6457827717110365317 >> 11) / 2**53


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 10_000))
def test_uniforms_are_the_counters_hash(key, position):
    golden = 0x9E3779B97F4A7C15
    expected = (splitmix64((key + (position - 1) * golden) % 2**64) >> 11) / 2**53
    assert uniforms(torch.tensor([key]), torch.tensor([position])).item() == expected


def test_uniforms_are_uniform_and_uncorrelated():
    keys = torch.tensor([stream_key(0, group, index) for group in range(200) for index in range(5)])
    u = uniforms(keys[:, None].expand(-1, 100).flatten(), torch.arange(100).repeat(1000))
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.005
    assert abs(u.var().item() - 1 / 12) < 0.002
    grid = u.view(200, 5, 100) - 0.5
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[..., 1:], grid[..., :-1])):
        assert abs((a * b).mean().item() * 12) < 0.02


def test_stream_keys_differ_in_every_argument():
    three = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0), (0, 2**40, 0)]
    keys = {stream_key(*arguments) for arguments in [*three, (0, 0, 0, 1), (0, 0, 0, 2)]}
    assert len(keys) == 9
    assert all(-(2**63) <= key < 2**63 for key in keys)


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.4999, 1), (0.5001, 2), (0.56, 3), (0.999999, 4)]
)
def test_draw_inverts_the_cumulative_distribution(u, token):
    assert draw(PROBS, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


def test_draw_finds_the_chunk_in_a_large_vocabulary():
    weights = torch.zeros(3, 1000)
    weights[0, 700] = weights[1, 0] = weights[2, 999] = 0.5
    for u in (0.0, 0.5, 1 - 2**-53):
        assert draw(weights, torch.full((3,), u, dtype=torch.float64)).tolist() == [700, 0, 999]


@given(st.integers(0, 2**32), st.sampled_from([3, 127, 128, 129, 500]), st.floats(0, 1, exclude_max=True))
def test_draw_never_takes_what_has_no_weight(seed, vocabulary, u):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(1, vocabulary, generator=generator) * (torch.rand(1, vocabulary, generator=generator) < 0.1)
    weights[0, seed % vocabulary] = 1e-30
    token = draw(weights, torch.tensor([u], dtype=torch.float64))
    assert weights[0, token] > 0


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.4}, [1]),  # 0.4 alone reaches 0.4
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.84}, [1, 3, 4]),
        ({"top_p": 0.86}, [0, 1, 3, 4]),
        ({"min_p": 0.5}, [1, 3, 4]),  # at least 0.2
        ({"top_k": 2, "top_p": 0.6}, [1]),  # 0.4 of 0.65 is 0.615
        ({"top_k": 3, "min_p": 0.6}, [1, 3]),
    ],
)
def test_truncation(rules, kept):
    left = truncate(PROBS, replace(SAMPLING, **rules))
    assert left[0].nonzero().flatten().tolist() == kept
    assert torch.equal(left[0, kept], PROBS[0, kept])


def test_a_flat_nucleus_beyond_the_first_candidates():
    probs = torch.full((2, 5000), 1e-4)
    probs[1, 7] = 0.5 + 1e-4
    kept = (truncate(probs / probs.sum(-1, keepdim=True), replace(SAMPLING, top_p=0.5)) > 0).sum(-1)
    assert kept.tolist() == [5000, 1]  # equal probabilities stand or fall together


def test_penalty_divides_positive_and_multiplies_negative_logits():
    seen = torch.tensor([[True, True, False]])
    assert _penalise(torch.tensor([[2.0, -2.0, 2.0]]), seen, 4.0).tolist() == [[0.5, -8.0, 2.0]]


def test_log_probs_are_before_truncation_and_after_temperature():
    logits = torch.tensor([[0.0, math.log(3.0) * 2]])
    tokens, logprobs = sample(
        logits, torch.tensor([0.1], dtype=torch.float64), replace(SAMPLING, temperature=2.0, top_k=1)
    )
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)


def test_greedy_reports_the_log_prob_at_temperature_one():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    tokens, logprobs = sample(logits, torch.tensor([0.0], dtype=torch.float64), replace(SAMPLING, temperature=0.0))
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
