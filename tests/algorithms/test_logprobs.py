import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coalign.algorithms.logprobs import linear_logprobs

M, H, V = 7, 5, 135  # V is no multiple of a tile


def case(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    return draw(M, H), draw(V, H), draw(V) if bias else None, torch.randint(0, V, (M,), generator=generator)


def reference(hidden, weight, bias, targets, *, temperature=1.0, scale=1.0, softcap=None):
    """The definition, with all logits at once, in float64."""
    logits = hidden.double() @ weight.double().t() * scale + (0.0 if bias is None else bias.double() * scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = torch.log_softmax(logits / temperature, -1)
    return full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"scale": 0.3, "temperature": 1.5},
    {"softcap": 2.0, "scale": 1.4, "temperature": 0.8},
]


def test_a_value_worked_by_hand():
    # Logits 0, ln 2, ln 5: probabilities 1/8, 2/8, 5/8.
    # Entropy: (1/8) ln 8 + (2/8) ln 4 + (5/8) ln (8/5) = 0.2599 + 0.3466 + 0.2938 = 0.9003
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    logprobs, entropy = linear_logprobs(torch.ones(1, 1), weight, torch.tensor([2]), entropy=True)
    assert logprobs.item() == pytest.approx(math.log(5 / 8))
    assert entropy.item() == pytest.approx(0.9003, abs=1e-4)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_values_and_gradients_equal_those_of_log_softmax(settings, dtype, tolerance):
    *inputs, targets = case(dtype)
    upstream = torch.linspace(-1.0, 2.0, M, dtype=dtype)
    got = linear_logprobs(*inputs[:2], targets, bias=inputs[2], entropy=True, tile=1, **settings)
    want = reference(*inputs, targets, **settings)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    both = lambda pair: (pair[0] * upstream + pair[1] * upstream.flip(0)).sum()  # noqa: E731
    for a, b in zip(torch.autograd.grad(both(got), inputs), torch.autograd.grad(both(want), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


def test_bfloat16_is_as_good_as_its_logits():
    *inputs, targets = case(torch.bfloat16, bias=False)
    logprobs, entropy = linear_logprobs(*inputs[:2], targets, entropy=True, tile=1)
    rounded = (inputs[0] @ inputs[1].t()).double()  # what bfloat16 logits can know
    full = torch.log_softmax(rounded, -1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), full.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(-1), rtol=0, atol=1e-5)
    got = torch.autograd.grad(logprobs.sum(), inputs[:2])
    want = torch.autograd.grad(reference(*inputs, targets)[0].sum(), inputs[:2])
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).float().norm() < 0.01 * b.float().norm()


def test_bfloat16_gradient_of_a_confident_token_keeps_its_relative_size():
    # p = 1 / (1 + e^-8): 1 - p = 3.4e-4 is far below bfloat16's step at 1, and must not be lost to it.
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16)
    logprobs, _ = linear_logprobs(hidden, weight, torch.tensor([0]))
    logprobs.sum().backward()
    assert hidden.grad.item() == pytest.approx(8 / (1 + math.exp(8)), rel=0.01)


def test_float32_weight_with_bfloat16_hidden_gets_a_float32_gradient():
    hidden, weight, _, targets = case(torch.float32)
    logprobs, _ = linear_logprobs(hidden.bfloat16(), weight, targets)
    grad = torch.autograd.grad(logprobs.sum(), weight)[0]
    want = torch.autograd.grad(reference(hidden, weight, None, targets)[0].sum(), weight)[0]
    assert grad.dtype == torch.float32
    assert (grad - want).norm() < 0.02 * want.norm()


def test_autocast_changes_nothing():
    hidden, weight, _, targets = case(torch.float32)
    plain, _ = linear_logprobs(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = linear_logprobs(hidden, weight, targets)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("tile", [1, 64 * M, 100 * M, 10**6])
def test_the_tile_does_not_matter(tile):
    hidden, weight, bias, targets = case()
    whole = linear_logprobs(hidden, weight, targets, bias=bias, entropy=True)
    cut = linear_logprobs(hidden, weight, targets, bias=bias, entropy=True, tile=tile)
    torch.testing.assert_close(cut, whole, rtol=1e-13, atol=1e-13)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.linspace(-1, 1, V)[:, None].requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, weight, torch.tensor([0, 0]), entropy=True, tile=1)
    # Row 0 puts everything on the last token: log p(first) = 1e4 * (-1 - 1); row 1 is certain of the first.
    assert logprobs.tolist() == pytest.approx([-2e4, 0.0])
    assert entropy.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_masked_vocabulary_has_no_probability():
    bias = torch.tensor([0.0, 0.0, -torch.inf], requires_grad=True)
    logprobs, _ = linear_logprobs(torch.ones(1, 1), torch.zeros(3, 1), torch.tensor([0]), bias=bias)
    logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert bias.grad.tolist() == [0.5, -0.5, 0.0]


def test_no_tokens():
    hidden, weight, _, _ = case()
    logprobs, entropy = linear_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    assert not torch.autograd.grad(logprobs.sum(), weight)[0].any()


def test_no_graph_without_need():
    hidden, weight, _, targets = case()
    with torch.no_grad():
        assert linear_logprobs(hidden, weight, targets)[0].grad_fn is None
    assert linear_logprobs(hidden.detach(), weight.detach(), targets)[0].grad_fn is None


def test_frozen_weight_gets_no_gradient():
    hidden, weight, _, targets = case()
    linear_logprobs(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_an_unknown_target_has_no_log_prob():
    hidden, weight, _, targets = case()
    assert linear_logprobs(hidden, weight, targets + V)[0].isnan().all()


class Largest(TorchDispatchMode):
    """The most elements any tensor had that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_holds_the_logits(dtype, entropy):
    tokens, width, vocabulary = 128, 8, 4096
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    with Largest() as largest:
        results = linear_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), entropy=entropy, tile=2**15)
        sum(r.sum() for r in results if r is not None).backward()
    assert largest.elements == 2**15 < tokens * vocabulary
