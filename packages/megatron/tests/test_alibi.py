"""ALiBi against transformers, and in attention over blocks against one dense matrix of scores."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as of_bloom
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as of_falcon

pytest.importorskip("megatron.core")

from coalign.backends.attention import _add_bias, attend
from coalign.backends.packing import Block, RowPlan
from coalign_megatron import families
from coalign_megatron.backend.attention import Alibi, compute_slopes

KEYS = torch.arange(600)  # bf16 has no numbers for all of them
MASK = torch.ones(1, len(KEYS), dtype=torch.long)


@pytest.mark.parametrize("heads", [1, 4, 6, 32])
def test_what_is_added_is_what_transformers_adds(heads):
    shape = {"hidden_size": 8 * heads, "vocab_size": 8}
    bloom = families.find_family(hf := {"model_type": "bloom", "n_layer": 1, "n_head": heads, **shape}).config(hf)
    found = Alibi.of(bloom)(KEYS)
    torch.testing.assert_close(found, of_bloom(MASK, heads, torch.float32)[:, 0], rtol=1e-6, atol=0)
    hf = {"model_type": "falcon", "num_hidden_layers": 1, "num_attention_heads": heads, "alibi": True, **shape}
    rounded = Alibi.of(families.find_family(hf).config(hf))(KEYS)
    expected = of_falcon(MASK, heads, torch.float32)[:, 0] / 8**0.5
    torch.testing.assert_close(rounded, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(rounded * 8**0.5, found)


def test_ranks_have_the_slopes_of_their_heads():
    whole = Alibi(compute_slopes(6))
    parts = torch.cat([whole.shard(i, 3)(KEYS) for i in range(3)])
    assert torch.equal(parts, whole(KEYS))


@pytest.mark.parametrize("window", [None, 3])
def test_a_bias_goes_by_positions_not_by_places(window):
    """Two sequences that go on with one prompt of 4, and one alone."""
    blocks = (Block(0, (4,)), Block(4, (2, 3), ((0, 4),)), Block(9, (5,)))
    sequences = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7, 8], [9, 10, 11, 12, 13]]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(14, heads, 8, generator=generator) for heads in (4, 2, 2))
    slope = compute_slopes(4)
    found = attend(
        query, key, value, plan=RowPlan(blocks, "cpu"), window=window, bias=lambda keys: slope[:, None] * keys
    )
    for places in sequences:
        n = len(places)
        q, k, v = query[places], key[places].repeat_interleave(2, 1), value[places].repeat_interleave(2, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / 8**0.5 + slope[:, None, None] * torch.arange(n)
        near = torch.ones(n, n).tril() if window is None else torch.ones(n, n).tril().triu(1 - window)
        weights = scores.masked_fill(near == 0, -torch.inf).softmax(-1)
        torch.testing.assert_close(found[places], torch.einsum("hij,jhd->ihd", weights, v), rtol=1e-5, atol=1e-6)


def test_a_late_query_tells_near_keys_apart_in_bf16():
    """Of two equal keys the nearer one has e^slope the weight, however far from the start of the sequence."""
    block, cpu = Block(0, (2000,)), torch.device("cpu")
    bias = _add_bias(block, None, cpu, lambda keys: 0.5 * keys[None].float(), torch.bfloat16)
    weights = bias[0, -1].float().softmax(0)
    assert float((weights[-1] / weights[-2]).log()) == pytest.approx(0.5, abs=1e-3)
