"""Tokens and log-probs are the same bits in any batch: they depend on weights, seed, group, index and position only."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import Gemma2Config

from coalign.backends.engines.session_driver import generate_responses
from tests.backends.native import helpers

MODELS = {
    "small": helpers.qwen2(),
    "odd_sizes": helpers.qwen2(
        hidden_size=56, intermediate_size=104, num_attention_heads=7, num_key_value_heads=7, vocab_size=211
    ),
    "soft_cap": Gemma2Config(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
    ),
    "wide": helpers.qwen2(hidden_size=192, intermediate_size=1024, vocab_size=2048),
    "heads_of_64": helpers.qwen2(head_dim=64),
    "no_shared_keys": helpers.qwen2(head_dim=64, num_key_value_heads=6),
}


def generate(model, asked, sampling, **settings):
    """{(group, index): (tokens, log-probs as bits)}"""
    answers = generate_responses(helpers.engine(model, **settings), asked, sampling)
    return {
        (request.group, index): (response.tokens.tolist(), response.logprobs.view(torch.int32).tolist())
        for request, responses in zip(asked, answers, strict=True)
        for index, response in enumerate(responses)
    }


def variants(asked):
    """The same requests met in other company: order, slots, prefill budget, replicas."""
    shuffled = random.Random(3).sample(asked, len(asked))
    yield "reversed", [asked[::-1]], {}
    yield "shuffled", [shuffled], {"max_sequences": 5}
    yield "one slot", [asked], {"max_sequences": 1}
    yield "small prefill", [asked], {"prefill_tokens": 16, "max_sequences": 11}
    yield "little memory", [asked], {"kv_tokens": 256}
    yield "two replicas", [asked[::2], asked[1::2]], {}
    yield "one by one", [[request] for request in asked], {}


# The fast suite meets less company where a request costs much, or where the company is not the point.
EVERY = pytest.param(True, id="every", marks=[pytest.mark.slow, pytest.mark.processors])
FEW = pytest.param(False, id="few")
COMPANY = "odd_sizes"  # the model that meets all of it in the fast suite


def check(model, asked, sampling, expected, cases, every=True):
    for title, parts, settings in cases:
        if not every and title not in ("shuffled", "small prefill"):
            continue
        met = {}
        for part in parts:
            met |= generate(model, part, sampling, **settings)
        assert met == expected, title


RARE = (("small", "bfloat16"), ("wide", "bfloat16"), ("heads_of_64", "bfloat16"), ("no_shared_keys", "float32"))
CASES = {(name, dtype): dtype == "float32" and name == COMPANY for name in MODELS for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize(
    ("name", "dtype", "every"),
    [
        *(pytest.param(*case, every, id="-".join(case)) for case, every in CASES.items() if case not in RARE),
        *(
            pytest.param(*case, *EVERY.values, id="-".join((*case, "every")), marks=EVERY.marks)
            for case, every in CASES.items()
            if not every
        ),
    ],
)
def test_neighbours_do_not_change_a_bit(name, dtype, every):
    model = helpers.reference(MODELS[name], dtype=getattr(torch, dtype))
    asked = helpers.requests(6, samples=3)
    sampling = helpers.replace(helpers.SAMPLING, max_new_tokens=6)
    check(model, asked, sampling, generate(model, asked, sampling), variants(asked), every)


@pytest.mark.parametrize(
    "name",
    ["heads_of_64", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wide", "no_shared_keys", "soft_cap"))],
)
def test_nor_does_the_number_of_threads(name):
    """On MKL the alignment of a thread's own buffer may show (attention.py)."""
    model, asked = helpers.reference(MODELS[name]), helpers.requests(9, samples=3)
    sampling = helpers.replace(helpers.SAMPLING, max_new_tokens=4)
    expected = generate(model, asked, sampling)
    torch.set_num_threads(2)
    try:
        cases = [("two threads", [asked], {}), *variants(asked)]
        check(model, asked, sampling, expected, cases[:3] if name == "heads_of_64" else cases)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_knows_that_it_is_so(name):
    assert helpers.engine(helpers.reference(MODELS[name])).is_invariant


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}, {"repetition_penalty": 1.3}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("every", [FEW, EVERY])
def test_nor_with_truncated_distributions(change, every):
    model = helpers.reference(MODELS["odd_sizes"])
    asked = helpers.requests(4, samples=2)
    sampling = helpers.replace(helpers.SAMPLING, max_new_tokens=8, **change)
    check(model, asked, sampling, generate(model, asked, sampling), variants(asked), every)


def test_the_seed_the_group_and_the_index_do_change_the_tokens():
    model = helpers.reference(MODELS["small"])
    asked = helpers.requests(1, samples=2)
    first = generate(model, asked, helpers.SAMPLING)
    assert first != generate(model, asked, helpers.SAMPLING, seed=8)
    assert first[0, 0] != first[0, 1]
    other_group = [helpers.Request(asked[0].prompt, 1, 2)]
    assert first[0, 0] != generate(model, other_group, helpers.SAMPLING)[1, 0]
