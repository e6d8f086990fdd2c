import pytest
import torch

from coalign.algorithms.logprobs import BLOCK, candidate_logprobs, log_collision, top_logprobs

HEAD = {"temperature": 0.7, "scale": 1.3, "softcap": 5.0}


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 8), (30, 8), (30,))
    )
    ids = torch.randint(0, 30, (7, 4), generator=generator)
    return hidden, weight, bias, ids


def dense(hidden, weight, bias, *, temperature=1.0, scale=1.0, softcap=None):
    logits = scale * (hidden @ weight.T + bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("head", [{}, HEAD], ids=["plain", "softcap"])
@pytest.mark.parametrize("block", [30, 60, 10**6])
def test_values_and_gradients_are_those_of_the_whole_matrix(case, head, block, monkeypatch):
    monkeypatch.setitem(BLOCK, "cpu", block)
    *tensors, ids = case
    results = []
    for run in (
        lambda h, w, b: candidate_logprobs(h, w, ids, bias=b, **head),
        lambda h, w, b: dense(h, w, b, **head).gather(1, ids),
    ):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = run(*leaves)
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_likeliest_tokens_best_first(case, monkeypatch):
    monkeypatch.setitem(BLOCK, "cpu", 60)
    hidden, weight, bias, _ = case
    ids, logprobs = top_logprobs(hidden, weight, 5, bias=bias, **HEAD)
    expected = dense(hidden, weight, bias, **HEAD).topk(5)
    assert ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(logprobs.double(), expected.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", [{}, HEAD], ids=["plain", "softcap"])
def test_the_chance_that_two_draws_agree(case, head, monkeypatch):
    monkeypatch.setitem(BLOCK, "cpu", 60)
    hidden, weight, bias, _ = case
    expected = dense(hidden, weight, bias, **head).exp().square().sum(1).log()
    got = log_collision(hidden.requires_grad_(), weight, bias=bias, **head)
    torch.testing.assert_close(got.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert not got.requires_grad


def test_no_more_candidates_than_tokens(case):
    hidden, weight, _, _ = case
    ids, logprobs = top_logprobs(hidden, weight, 100)
    assert ids.shape == (7, 30)
    torch.testing.assert_close(logprobs.exp().sum(1), torch.ones(7))


def test_no_positions():
    hidden, weight = torch.zeros(0, 8), torch.zeros(30, 8)
    assert candidate_logprobs(hidden, weight, torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)
    assert top_logprobs(hidden, weight, 4)[0].shape == (0, 4)
