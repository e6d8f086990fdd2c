"""StarCoder 2: Llama's attention with LayerNorm, biases and an MLP of two layers."""

from __future__ import annotations

from coalign.weights.families.family import Family
from coalign.weights.families.llama import ATTENTION, PREFIX, TENSORS
from coalign.weights.families.settings import (
    CLASSIC,
    FFN,
    GROUPS,
    SIZES,
    Activation,
    ConfigField,
    Rope,
    norm_epsilon,
    tied_embeddings,
    window,
)
from coalign.weights.families.sources import SingleTensor

STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    model_types=("starcoder2",),
    settings=(
        *SIZES,
        GROUPS,
        FFN,
        Activation("hidden_act", "gelu_pytorch_tanh"),
        Rope(),
        norm_epsilon("norm_epsilon", 1e-5),
        tied_embeddings(True),
        window(None),
        CLASSIC,
        ConfigField("add_bias_linear", "use_bias", True),
    ),
    tensors=TENSORS,
    layer=ATTENTION | {"mlp.linear_fc1": SingleTensor("mlp.c_fc"), "mlp.linear_fc2": SingleTensor("mlp.c_proj")},
    prefix=PREFIX,
)
