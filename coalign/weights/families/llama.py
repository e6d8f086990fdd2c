"""Llama 1, 2, 3 (Code Llama, Yi, DeepSeek-LLM …)."""

from __future__ import annotations

from coalign.weights.families.family import Family
from coalign.weights.families.settings import FFN, GROUPS, HEAD, SIZES, Activation, Only, Rope, epsilon, tied
from coalign.weights.families.sources import Heads, Joined, Same

TENSORS = {
    "embedding.word_embeddings": Same("model.embed_tokens"),
    "decoder.final_layernorm": Same("model.norm"),
    "output_layer": Same("lm_head"),
}
ATTENTION = {
    "input_layernorm": Same("input_layernorm"),
    "self_attention.linear_qkv": Heads("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": Same("self_attn.o_proj"),
    "pre_mlp_layernorm": Same("post_attention_layernorm"),
}
MLP = {
    "mlp.linear_fc1": Joined(("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": Same("mlp.down_proj"),
}
PREFIX = "model.layers.{layer}."

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM", "YiForCausalLM"),
    model_type="llama",
    settings=(
        *SIZES,
        GROUPS,
        HEAD,
        FFN,
        Activation(),
        Rope(),
        epsilon("rms_norm_eps", 1e-6),
        tied(False),
        Only("attention_bias", False),
        Only("mlp_bias", False),
    ),
    tensors=TENSORS,
    layer=ATTENTION | MLP,
    prefix=PREFIX,
)
