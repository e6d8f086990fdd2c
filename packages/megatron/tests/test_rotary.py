"""Angles against those of transformers, all kinds of scaling."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

pytest.importorskip("megatron.core")

from coalign.backends.packing import Block
from coalign_megatron import families
from coalign_megatron.backend.attention import (
    compute_attention_factor,
    compute_rotary_angles,
    compute_rotary_frequencies,
)

LLAMA = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 4096, "vocab_size": 8}
LLAMA |= {"intermediate_size": 8, "num_hidden_layers": 1}
MLA = {"qk_rope_head_dim": 32, "num_key_value_heads": 2}
TRAINED = {"original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "factor": 4.0, **TRAINED}
KINDS = [
    ("llama", {}, {"rope_type": "linear", "factor": 3.0}),
    ("llama", {}, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}),
    ("llama", {}, YARN),
    ("llama", {}, YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.7}),
    ("llama", {}, YARN | {"factor": 0.5}),
    ("gpt_neox", {}, YARN | {"partial_rotary_factor": 0.25}),
    ("deepseek_v3", MLA, YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}),
    ("deepseek_v3", MLA, YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    ("llama", {}, {"rope_type": "dynamic", "factor": 2.0}),  # below its limit
]


def described(kind, settings, rope):
    hf = AutoConfig.for_model(kind, **LLAMA, **settings, rope_parameters={"rope_theta": 10000.0, **rope})
    return hf, families.find_family(hf.to_dict()).config(hf.to_dict())


@pytest.mark.parametrize(("kind", "settings", "rope"), KINDS, ids=str)
def test_speeds_and_factors_are_those_of_transformers(kind, settings, rope):
    hf, model = described(kind, settings, rope)
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"), seq_len=100)
    torch.testing.assert_close(compute_rotary_frequencies(model), expected, rtol=2e-6, atol=0)
    assert compute_attention_factor(model.rope_scaling) == pytest.approx(factor, rel=1e-12)
    unscaled = replace(model, rope_scaling=None)
    changed = not torch.equal(compute_rotary_frequencies(unscaled), compute_rotary_frequencies(model))
    assert changed == (rope["rope_type"] != "dynamic")


def test_angles_follow_positions_and_a_row_that_would_scale_them_is_refused():
    _, model = described("llama", {}, {"rope_type": "dynamic", "factor": 2.0})
    model = replace(model, kv_channels=4, max_position_embeddings=8)
    # A prompt of 4 tokens, two sequences that go on with it, of which the longer one has 8 tokens in all.
    blocks = (Block(0, (4,)), Block(4, (1, 4), ((0, 4),)))
    positions = torch.tensor([0, 1, 2, 3, 4, 4, 5, 6, 7])
    found = compute_rotary_angles(model, positions, blocks)
    expected = torch.outer(positions.float(), torch.tensor([1.0, 0.01])[[0, 1, 0, 1]])
    torch.testing.assert_close(found[:, 0, 0], expected)
    interleaved = compute_rotary_angles(replace(model, rotary_interleaved=True), positions, blocks)
    torch.testing.assert_close(interleaved[:, 0, 0], expected[:, [0, 0, 1, 1]])
    assert compute_rotary_angles(replace(model, position_embedding_type="alibi"), positions, blocks) is None
    with pytest.raises(ValueError, match=r"`dynamic` change above 7 tokens .* one of 8"):
        compute_rotary_angles(replace(model, max_position_embeddings=7), positions, blocks)
