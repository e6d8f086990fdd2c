"""The engine's log-probs equal those of a plain transformers forward, whatever the architecture."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
)

from coalign.backends.engines.native.native_model import NativeModel
from coalign.backends.engines.session_driver import generate_responses
from tests.backends.native import helpers

_SHAPE = {"vocab_size": helpers.VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
_SHAPE |= {"num_attention_heads": 6, "max_position_embeddings": 256}
_SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_GROUPED = dict(**_SHAPE, num_key_value_heads=2)

# Every other family, greedily: tests/backends/test_architectures.py.
FAMILIES = {
    "qwen2": helpers.qwen2(),
    "qwen2_untied": helpers.qwen2(tie_word_embeddings=False),
    "qwen2_sliding": helpers.qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "llama3_rope": LlamaConfig(
        **_GROUPED,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "gemma2": Gemma2Config(**_GROUPED, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gpt_neox": GPTNeoXConfig(**_SHAPE),
    "granite": GraniteConfig(**_GROUPED, logits_scaling=2.0, residual_multiplier=0.5),
    "deepseek_v3": DeepseekV3Config(**_SHAPE | _LATENT | _EXPERTS, num_key_value_heads=6, moe_intermediate_size=32),
    "mixtral": MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_plain_forward(family):
    model = helpers.reference(FAMILIES[family])
    asked = helpers.requests(5, samples=3)
    answers = generate_responses(helpers.engine(model), asked, helpers.SAMPLING)
    for request, responses in zip(asked, answers, strict=True):
        for response in responses:
            expected = helpers.reference_logprobs(model, request.prompt, response.tokens)
            torch.testing.assert_close(response.logprobs, expected, rtol=0, atol=2e-5)


def test_bfloat16_is_near_the_float32_model():
    model = helpers.reference(helpers.qwen2(), dtype=torch.bfloat16)
    asked = helpers.requests(5, samples=2)
    answers = generate_responses(helpers.engine(model), asked, helpers.SAMPLING)
    for request, responses in zip(asked, answers, strict=True):
        for response in responses:
            expected = helpers.reference_logprobs(model.float(), request.prompt, response.tokens)
            assert (response.logprobs - expected).abs().mean() < 0.1
        model.bfloat16()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4), "other than causal attention"),
        (BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2), "attention interface"),
    ],
)
def test_a_foreign_architecture_is_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        NativeModel(config, dtype=torch.float32, device="cpu")


def test_an_architecture_that_would_come_out_wrong_is_refused():
    """Differential attention calls the interface twice a layer, with other values: its logits would be nonsense."""
    model = helpers.reference(DiffLlamaConfig(**_GROUPED))
    with pytest.raises(ValueError, match="DiffLlamaForCausalLM: its logits would differ"):
        helpers.engine(model)
