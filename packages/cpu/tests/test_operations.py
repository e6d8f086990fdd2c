"""The kernels for CPUs against the same computed with torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coalign.algorithms import logprobs
from coalign.algorithms.logprobs import linear_logprobs
from coalign.backends.engines.sampling import draw, uniforms
from coalign.cpu import _NoKernels
from coalign_cpu import operations
from coalign_cpu.library import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler")

LENGTH = 90
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def draw_normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Sequences of several lengths with stored keys and values, and a query each."""

    def __init__(
        self, heads: int, groups: int, width: int, value_width: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.positions = torch.tensor([0, 1, 14, 15, 16, 17, 40, LENGTH - 1])
        rows = len(self.positions)
        # As a model has them: [1, heads, rows, width], a view of [rows, heads, width].
        self.query = draw_normal(rows, heads, width, dtype=dtype, seed=1).transpose(0, 1)[None]
        self.keys = draw_normal(rows, LENGTH, groups, width, dtype=dtype, seed=2)
        self.values = draw_normal(rows, LENGTH, groups, value_width, dtype=dtype, seed=3)

    def attend(self, rows: slice = slice(None), **settings: object) -> Tensor:
        query, keys, values = self.query[:, :, rows], self.keys[rows], self.values[rows]
        return operations.attend_tokens(query, None, keys, values, self.positions[rows].clone(), **settings)[0]

    def expect(self, scale: float | None = None, window: int | None = None, softcap: float | None = None) -> Tensor:
        """[rows, heads, value width], in float64, token by token."""
        heads, groups, width = self.query.shape[1], self.keys.shape[2], self.keys.shape[3]
        out = []
        for row, position in enumerate(self.positions.tolist()):
            first = 0 if window is None else max(0, position - window + 1)
            keys, values = (x[row, first : position + 1].double() for x in (self.keys, self.values))
            for head in range(heads):
                group = head // (heads // groups)
                scores = keys[:, group] @ self.query[0, head, row].double() * (scale or width**-0.5)
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                out.append(scores.softmax(0) @ values[:, group])
        return torch.stack(out).view(len(self.positions), heads, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(6, 2, 64, 64), (4, 4, 128, 128), (9, 3, 64, 64), (5, 1, 24, 24), (4, 2, 40, 12), (2, 2, 8, 8)]
)
def test_attention_of_single_tokens_is_that_of_float64(shape, dtype):
    case = Case(*shape, dtype=dtype)
    for settings in ({}, {"scale": 0.3}, {"window": 16}, {"window": 5, "softcap": 2.0}, {"softcap": 0.7}):
        found, expected = case.attend(**settings), case.expect(**settings)
        assert (found.double() - expected).abs().max() < TOLERANCE[dtype] * 4, settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_batch_and_for_any_number_of_threads(dtype):
    case, before = Case(6, 2, 64, 64, dtype), torch.get_num_threads()
    whole = case.attend()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(case.attend(), whole)
            for row in range(len(whole)):
                assert torch.equal(case.attend(slice(row, row + 1))[0], whole[row])
    finally:
        torch.set_num_threads(before)


def test_tokens_of_one_slot_have_the_bits_that_they_have_one_by_one():
    case = Case(6, 2, 64, 64)
    rows, slot = torch.tensor([5, 60, 33]), torch.full((3,), 7)
    query = case.query[:, :, :3]
    together = operations.attend_tokens(query, None, case.keys, case.values, rows, slot)[0]
    for row, position in enumerate(rows.tolist()):
        case.positions[7] = position
        case.query[:, :, 7] = query[:, :, row]
        assert torch.equal(case.attend(slice(7, 8))[0], together[row])


def test_new_keys_and_values_are_written_first_and_nothing_else_is():
    case = Case(6, 2, 64, 64)
    new = tuple(draw_normal(8, 2, 64, seed=seed).transpose(0, 1)[None] for seed in (8, 9))
    before = case.keys.clone(), case.values.clone()
    found = operations.attend_tokens(case.query, new, case.keys, case.values, case.positions)[0]
    at = torch.arange(8), case.positions
    for stored, old, one in zip((case.keys, case.values), before, new, strict=True):
        old[at] = one[0].transpose(0, 1)
        assert torch.equal(stored, old)
    assert (found.double() - case.expect()).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 20])
def test_a_shared_prefix_is_read_in_the_slot_that_is_named_and_the_bits_stay(window):
    case = Case(6, 2, 64, 64)
    for stored in (case.keys, case.values):
        stored[6, :37] = stored[7, :37]
    expected = case.attend(window=window)
    prefixes = torch.tensor([[0, 1, 2, 3, 4, 5, 7, 7], [0, 0, 0, 0, 0, 0, 37, 37]])
    assert torch.equal(case.attend(window=window, prefixes=prefixes), expected)
    case.keys[6, :37] = math.nan  # so they were not read
    assert torch.equal(case.attend(window=window, prefixes=prefixes), expected)


def test_rows_whose_last_dimension_is_strided_are_taken_too():
    case = Case(4, 2, 64, 64)
    expected = case.attend()
    case.query = case.query.transpose(2, 3).contiguous().transpose(2, 3)
    assert case.query.stride(-1) != 1
    assert torch.equal(case.attend(), expected)


# ---- the choice of tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 128, 1000])
def test_the_token_is_the_one_at_the_uniform_number_of_the_distribution(size, dtype):
    logits = 3 * draw_normal(64, size, dtype=dtype)
    uniform = uniforms(torch.arange(64), torch.arange(64))
    for temperature in (1.0, 0.6):
        tokens, found = operations.draw_tokens(logits, uniform, temperature)
        probs = (logits.double() / temperature).softmax(-1)
        assert torch.equal(tokens, draw(probs, uniform))
        expected = probs.log().gather(1, tokens[:, None])[:, 0]
        assert (found - expected).abs().max() < 5e-6


def test_a_drawn_token_has_the_same_bits_in_any_batch():
    logits, uniform = draw_normal(16, 300), uniforms(torch.arange(16), torch.arange(16))
    tokens, found = operations.draw_tokens(logits, uniform, 1.0)
    for row in range(16):
        token, logprob = operations.draw_tokens(logits[row : row + 1], uniform[row : row + 1], 1.0)
        assert (token, logprob) == (tokens[row], found[row])


def test_tokens_without_probability_are_never_drawn():
    logits = torch.full((4, 400), -math.inf)
    logits[:, 130] = logits[:, 131] = 2.0
    tokens, found = operations.draw_tokens(logits, torch.tensor([0.0, 0.4, 0.6, 1 - 2**-53]).double(), 1.0)
    assert tokens.tolist() == [130, 130, 131, 131]
    assert found.tolist() == pytest.approx([math.log(0.5)] * 4)


def test_logits_that_are_no_numbers_give_a_log_prob_that_is_none():
    logits = draw_normal(3, 200)
    logits[0, 7], logits[1] = math.nan, math.inf
    tokens, found = operations.draw_tokens(logits, torch.full((3,), 0.5).double(), 1.0)
    assert found.isfinite().tolist() == [False, False, True]
    assert tokens.min() >= 0 and tokens.max() < 200


# ---- log-probs from hidden states


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "scale": 1.3}, {"softcap": 3.0, "temperature": 1.2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_gradients_are_those_without_the_kernels(monkeypatch, dtype, settings, entropy):
    targets = torch.randint(0, 301, (50,), generator=torch.Generator().manual_seed(0))
    upstream = [draw_normal(50, seed=seed) for seed in (5, 6)]

    def compute() -> list[Tensor]:
        hidden, weight = (draw_normal(n, 32, dtype=dtype, seed=n).requires_grad_() for n in (50, 301))
        results = linear_logprobs(hidden, weight, targets, entropy=entropy, tile=50 * 64, **settings)
        used = [(x, g) for x, g in zip(results, upstream, strict=True) if x is not None]
        torch.autograd.backward([x for x, _ in used], [g for _, g in used])
        return [x for x in (*results, hidden.grad, weight.grad) if x is not None]

    found = compute()
    monkeypatch.setattr(logprobs, "operations", _NoKernels)
    for one, expected in zip(found, compute(), strict=True):
        spread = expected.float().abs().max()
        assert (one - expected).abs().max() <= (2e-6 if dtype == torch.float32 else 8e-3) * spread


def test_tokens_without_probability_add_nothing_and_a_target_elsewhere_is_left():
    products = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf] * 3])
    top = torch.full((2,), torch.finfo(torch.float32).min)
    total, moment, chosen = torch.zeros(2), torch.zeros(2), torch.full((2,), math.nan)
    operations.add_tile(products, 1.0, None, torch.tensor([12, 7]), 10, (top, total, moment, chosen))
    assert total.tolist() == [2.0, 0.0] and moment.tolist() == [0.0, 0.0]
    assert chosen[0] == 0.0 and chosen[1].isnan()


def test_which_tensors_have_kernels():
    assert operations.has_kernel(torch.zeros(1), torch.zeros(2))
    assert not operations.has_kernel(torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16))
    assert not operations.has_kernel(torch.zeros(1, dtype=torch.float64))
    assert not operations.has_kernel(torch.zeros(1, device="meta"))
