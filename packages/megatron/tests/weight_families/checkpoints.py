"""A tiny random checkpoint of every family: config.json and tensors as its files have them."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packages.megatron.tests.weight_families import remote

LLAMA_LIKE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_LIKE |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2_LIKE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FALCON_LIKE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MLA |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
MLA |= {"n_group": 2, "topk_group": 1}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN_MOE = LLAMA_LIKE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FALCON_NEW = FALCON_LIKE | {"new_decoder_architecture": True, "num_kv_heads": 2}
FALCON_RW = FALCON_LIKE | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
DEEPSEEK_V2 = LLAMA_LIKE | MLA
DEEPSEEK_V2 |= {"q_lora_rank": 16, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
OPT_LIKE = LLAMA_LIKE | {"ffn_dim": 96, "word_embed_proj_dim": 32}
GALACTICA = OPT_LIKE | {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}

# By case: the family's name here, the model type of transformers, settings.
NATIVE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", LLAMA_LIKE | {"rope_parameters": LLAMA3_ROPE}),
    "llama_tied": ("llama", "llama", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "mistral": ("mistral", "mistral", LLAMA_LIKE | {"sliding_window": 5}),
    "mixtral": ("mixtral", "mixtral", LLAMA_LIKE | {"num_local_experts": 4}),
    "gemma": ("gemma", "gemma", LLAMA_LIKE | {"num_key_value_heads": 1, "head_dim": 16}),
    "qwen2": ("qwen2", "qwen2", LLAMA_LIKE),
    "qwen2_moe": ("qwen2_moe", "qwen2_moe", QWEN_MOE | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 24}),
    "qwen3": ("qwen3", "qwen3", LLAMA_LIKE | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", "qwen3_moe", QWEN_MOE | {"norm_topk_prob": True}),
    "bloom": ("bloom", "bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon_7b": ("falcon", "falcon", FALCON_LIKE),
    "falcon_40b": ("falcon_40b", "falcon", FALCON_NEW | {"tie_word_embeddings": False}),
    "falcon_rw": ("falcon", "falcon", FALCON_RW),
    "falcon_11b": ("falcon", "falcon", FALCON_NEW | {"num_ln_in_parallel_attn": 1}),
    "glm4": ("glm4", "glm", LLAMA_LIKE | {"head_dim": 8}),
    "starcoder": ("starcoder", "gpt_bigcode", GPT2_LIKE),
    "starcoder_mha": ("starcoder", "gpt_bigcode", GPT2_LIKE | {"multi_query": False}),
    "starcoder2": ("starcoder2", "starcoder2", LLAMA_LIKE),
    "gpt_neox": ("gpt_neox", "gpt_neox", LLAMA_LIKE | {"rotary_pct": 0.25}),
    "gpt2": ("gpt2", "gpt2", GPT2_LIKE),
    "opt": ("opt", "opt", OPT_LIKE),
    "galactica": ("opt", "opt", GALACTICA),
    "deepseek_v2": ("deepseek_v2", "deepseek_v2", DEEPSEEK_V2),
    "deepseek_v2_lite": ("deepseek_v2", "deepseek_v2", LLAMA_LIKE | MLA | {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3", LLAMA_LIKE | MLA | {"q_lora_rank": 16}),
}
BAICHUAN = {key: LLAMA_LIKE[key] for key in LLAMA_LIKE if key not in ("num_key_value_heads", "max_position_embeddings")}
BAICHUAN |= {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "vocab_size": 131}
BAICHUAN |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "model_max_length": 64}
BAICHUAN2 = BAICHUAN | {"max_position_embeddings": 64, "z_loss_weight": 0}
QWEN = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "hidden_size": 32, "intermediate_size": 96}
QWEN |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131, "seq_length": 64, "rotary_pct": 1.0}
QWEN |= {"layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000, "no_bias": True, "use_dynamic_ntk": True}
QWEN |= {"use_logn_attn": True}
CHATGLM = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 2, "hidden_size": 32}
CHATGLM |= {"ffn_hidden_size": 48, "num_attention_heads": 4, "multi_query_attention": True, "kv_channels": 8}
CHATGLM |= {"multi_query_group_num": 2, "padded_vocab_size": 131, "seq_length": 64, "layernorm_epsilon": 1e-5}
CHATGLM |= {"add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True}
CHATGLM |= {"apply_residual_connection_post_layernorm": False}

# By case: the family's name here, config.json, the tensors of its files.
REMOTE: dict[str, tuple[str, dict[str, Any], Any]] = {
    "qwen": ("qwen", QWEN, remote.qwen_shapes),
    "baichuan_7b": ("baichuan", BAICHUAN | {"max_position_embeddings": 64}, remote.baichuan_shapes),
    "baichuan_13b": ("baichuan", BAICHUAN, remote.baichuan_shapes),
    "baichuan2_7b": ("baichuan", BAICHUAN2, remote.baichuan_shapes),
    "chatglm": ("chatglm", CHATGLM, remote.chatglm_shapes),
}
CASES = [*NATIVE, *REMOTE]
MOE = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3"]
FAMILY = {case: each[0] for table in (NATIVE, REMOTE) for case, each in table.items()}


@cache
def checkpoint(case: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and the tensors of the files by name, all of them random. Vocabularies have 131 tokens."""
    if case in REMOTE:
        _, hf, shapes = REMOTE[case]
        generator = torch.Generator().manual_seed(0)
        return hf, {name: _random(shape, generator) for name, shape in shapes(hf).items()}
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as path:
        native(case).save_pretrained(path)
        return json.loads((Path(path) / "config.json").read_text()), load_file(Path(path) / "model.safetensors")


@cache
def native(case: str):
    """The transformers model of a case."""
    _, kind, settings = NATIVE[case]
    return random_model(kind, settings)


def random_model(kind: str, settings: dict[str, Any]):
    """A transformers model of this type, all of whose tensors are random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = {"vocab_size": 131, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **tokens | settings), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if "correction_bias" in name)):
        tensor.data.copy_(_random(tensor.shape, generator))
    return model.eval()


def _random(shape, generator: torch.Generator) -> Tensor:
    """Norms and biases too: those of a fresh model would hide that they were swapped."""
    return torch.randn(tuple(shape), generator=generator) * (0.2 if len(shape) > 1 else 0.5)
