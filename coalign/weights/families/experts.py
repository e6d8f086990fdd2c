"""What families with experts have in common."""

from __future__ import annotations

from typing import Any

from coalign.weights.families.config import MegatronConfig
from coalign.weights.families.model import EXPERT
from coalign.weights.families.settings import ConvertedFields, Field, Hf
from coalign.weights.families.sources import ConcatenatedTensors, SingleTensor, StackedExperts

ROUTER = {"mlp.router": SingleTensor("mlp.gate")}
EXPERTS = {
    EXPERT + "linear_fc1": ConcatenatedTensors(("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")),
    EXPERT + "linear_fc2": SingleTensor("mlp.experts.{expert}.down_proj"),
}
# In memory transformers 5 has them in two tensors, [gate | up] and down.
STACKED = {
    EXPERT + "linear_fc1": StackedExperts("mlp.experts.gate_up_proj"),
    EXPERT + "linear_fc2": StackedExperts("mlp.experts.down_proj"),
}


def shared(name: str) -> dict[str, ConcatenatedTensors | SingleTensor]:
    """The lines of an MLP called ``name`` that all tokens go through."""
    return {
        "mlp.shared_experts.linear_fc1": ConcatenatedTensors((f"mlp.{name}.gate_proj", f"mlp.{name}.up_proj")),
        "mlp.shared_experts.linear_fc2": SingleTensor(f"mlp.{name}.down_proj"),
    }


TOP_K = Field("moe_router_topk", "num_experts_per_tok")
EXPERT_FFN = Field("moe_ffn_hidden_size", "moe_intermediate_size")

# Weights of the chosen experts that sum to 1 are a softmax over these alone.
NORMALISED = ConvertedFields(
    lambda hf: {"moe_router_pre_softmax": not hf.get("norm_topk_prob", False)},
    lambda config: {"norm_topk_prob": not config.moe_router_pre_softmax},
)


def _some(hf: Hf) -> dict[str, Any]:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return {
        "moe_layer_freq": tuple(int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"]))
    }


def _listed(config: MegatronConfig) -> dict[str, Any]:
    dense = [i for i, moe in enumerate(config.moe_layer_freq) if not moe]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN_LAYERS = ConvertedFields(_some, _listed)


def _after(hf: Hf) -> dict[str, Any]:
    dense = hf.get("first_k_dense_replace") or 0
    return {"moe_layer_freq": tuple(int(i >= dense) for i in range(hf["num_hidden_layers"]))}


DENSE_FIRST = ConvertedFields(_after, lambda config: {"first_k_dense_replace": config.moe_layer_freq.count(0)})
ALL_LAYERS = ConvertedFields(lambda hf: {"moe_layer_freq": (1,) * hf["num_hidden_layers"]}, lambda config: {})
