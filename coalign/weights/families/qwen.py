"""Qwen 1.5, 2, 2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, MLP, PREFIX, TENSORS
from coalign.weights.families.settings import FFN, GROUPS, HEAD, SIZES, Activation, Always, Only, Rope, epsilon, tied

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    settings=(
        *SIZES,
        GROUPS,
        HEAD,
        FFN,
        Activation(),
        Rope(),
        epsilon("rms_norm_eps", 1e-6),
        tied(False),
        Always(add_qkv_bias=True),
        Only("use_sliding_window", False),
    ),
    tensors=TENSORS,
    layer=ATTENTION | MLP,
    prefix=PREFIX,
)
