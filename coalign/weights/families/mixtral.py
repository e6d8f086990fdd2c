"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from coalign.weights.families.experts import ALL_LAYERS, ROUTER, STACKED, TOP_K
from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, PREFIX, TENSORS
from coalign.weights.families.model import EXPERT
from coalign.weights.families.settings import (
    FFN,
    GROUPS,
    HEAD,
    SIZES,
    Activation,
    Field,
    Rope,
    epsilon,
    tied,
    window,
)
from coalign.weights.families.sources import ConcatenatedTensors, SingleTensor

W = "block_sparse_moe.experts.{expert}."

MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    settings=(
        *SIZES,
        GROUPS,
        HEAD,
        FFN,
        Field("moe_ffn_hidden_size", "intermediate_size"),
        Activation(),
        Rope(default_base=1000000.0),
        epsilon("rms_norm_eps", 1e-5),
        tied(False),
        window(None),
        Field("num_moe_experts", "num_local_experts", older=("num_experts",)),
        TOP_K,
        ALL_LAYERS,
    ),
    tensors=TENSORS,
    layer=ATTENTION
    | {
        "mlp.router": SingleTensor("block_sparse_moe.gate"),
        EXPERT + "linear_fc1": ConcatenatedTensors((W + "w1", W + "w3")),
        EXPERT + "linear_fc2": SingleTensor(W + "w2"),
    },
    prefix=PREFIX,
    memory=ROUTER | STACKED,
)
