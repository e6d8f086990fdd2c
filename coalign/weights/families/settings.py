"""The settings of a family's table: how fields of a MegatronConfig are read from a config.json and written back.

At the end: settings and tensor rules that several families share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from coalign.weights.families.sources import ConcatenatedTensors, SingleTensor, StackedExperts
from coalign.weights.layouts.megatron_config import MegatronConfig, RopeScaling
from coalign.weights.layouts.megatron_model import EXPERT

Hf = Mapping[str, Any]
NEEDED: Any = object()
# Megatron's own default: as many groups as heads, heads that fill the model, an MLP four times as wide.
MEGATRON: Any = object()


class Setting(Protocol):
    def read(self, hf: Hf) -> dict[str, Any]:
        """Return fields of a MegatronConfig. ValueError names a key that is missing or has an impossible value."""
        ...

    def write(self, config: MegatronConfig) -> dict[str, Any]:
        """Return keys of a config.json."""
        ...


@dataclass(frozen=True, slots=True)
class ConfigField:
    """Our field ``ours`` is what ``key`` or one of its ``older`` names says; ``default`` if none is there, or null."""

    ours: str
    key: str
    default: Any = NEEDED
    older: tuple[str, ...] = ()

    def read(self, hf: Hf) -> dict[str, Any]:
        value = next((hf[key] for key in (self.key, *self.older) if hf.get(key) is not None), None)
        if value is None:
            if self.default is MEGATRON:
                return {}
            if self.default is NEEDED:
                raise ValueError(f"config.json: '{self.key}' is missing")
            value = self.default
        return {self.ours: value}

    def write(self, config: MegatronConfig) -> dict[str, Any]:
        return {self.key: getattr(config, self.ours)}


@dataclass(frozen=True, slots=True)
class RequiredValue:
    """``key`` has to be ``value`` or missing, since Megatron has nothing else."""

    key: str
    value: Any

    def read(self, hf: Hf) -> dict[str, Any]:
        found = self.value if (value := hf.get(self.key)) is None else value
        if found != self.value:
            raise ValueError(f"config.json: '{self.key}' is {found!r}; for this family Megatron has {self.value!r}")
        return {}

    def write(self, config: MegatronConfig) -> dict[str, Any]:
        return {self.key: self.value}


class FixedFields:
    """Fields with the same value in the whole family."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def read(self, hf: Hf) -> dict[str, Any]:
        return dict(self.fields)

    def write(self, config: MegatronConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class ConvertedFields:
    """Fields converted by two functions, the inverse of each other, where no other setting fits."""

    reads: Callable[[Hf], dict[str, Any]]
    writes: Callable[[MegatronConfig], dict[str, Any]]

    def read(self, hf: Hf) -> dict[str, Any]:
        return self.reads(hf)

    def write(self, config: MegatronConfig) -> dict[str, Any]:
        return self.writes(config)


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of the MLP. Of several names of a function the default, or else the first, is written."""

    key: str = "hidden_act"
    default: str = "silu"

    def read(self, hf: Hf) -> dict[str, Any]:
        found = hf.get(self.key) or self.default
        if found not in ACTIVATIONS:
            raise ValueError(f"config.json: '{self.key}' is {found!r}; Megatron has {sorted(ACTIVATIONS)}")
        return {"activation_func": ACTIVATIONS[found]}

    def write(self, config: MegatronConfig) -> dict[str, Any]:
        found = (name for name, ours in ACTIVATIONS.items() if ours == config.activation_func)
        return {self.key: self.default if ACTIVATIONS[self.default] == config.activation_func else next(found)}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings: `rope_parameters` (transformers 5), or the keys ``base``, ``percent`` and `rope_scaling`.

    The latter are written, since every version reads them.
    """

    base: str = "rope_theta"
    percent: str | None = None
    default_base: float = 10000.0
    default_percent: float = 1.0

    def read(self, hf: Hf) -> dict[str, Any]:
        new = hf.get("rope_parameters") or {}
        base = new.get("rope_theta", hf.get(self.base, self.default_base))
        percent = new.get("partial_rotary_factor", hf.get(self.percent or "", self.default_percent))
        scaling = read_rope_scaling(new or hf.get("rope_scaling") or {})
        return {"rotary_base": float(base), "rotary_percent": float(percent), "rope_scaling": scaling}

    def write(self, config: MegatronConfig) -> dict[str, Any]:
        found: dict[str, Any] = {self.base: config.rotary_base}
        if self.percent:
            found[self.percent] = config.rotary_percent
        if (scaling := config.rope_scaling) is not None:
            numbers = {name: getattr(scaling, name) for name in RopeScaling.__slots__ if name != "kind"}
            known = {name: number for name, number in numbers.items() if number is not None}
            found["rope_scaling"] = {"rope_type": scaling.kind, "type": scaling.kind, **known}
        return found


def read_rope_scaling(found: Hf) -> RopeScaling | None:
    """Read a config.json's `rope_scaling` or `rope_parameters`. ValueError for an unknown kind."""
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ValueError(f"config.json: rope scaling is {kind!r}; known are 'linear', 'dynamic', 'llama3', 'yarn'")
    numbers = {name: found[name] for name in RopeScaling.__slots__ if found.get(name) is not None}
    return RopeScaling(**{**numbers, "kind": kind})


def window(default: int | None) -> ConvertedFields:
    """`sliding_window`: how many tokens a token sees, itself included; null: all. ``default``: without the key."""

    def read(hf: Hf) -> dict[str, Any]:
        size = hf.get("sliding_window", default)
        return {"window_size": None if size is None else (size - 1, 0)}

    def write(config: MegatronConfig) -> dict[str, Any]:
        return {"sliding_window": None if config.window_size is None else config.window_size[0] + 1}

    return ConvertedFields(read, write)


# ---- shared settings and tensor rules

SIZES = (
    ConfigField("num_layers", "num_hidden_layers"),
    ConfigField("hidden_size", "hidden_size"),
    ConfigField("num_attention_heads", "num_attention_heads"),
    ConfigField("vocab_size", "vocab_size"),
    ConfigField("max_position_embeddings", "max_position_embeddings"),
)
# GPT-2's names of the same
GPT2_SIZES = (
    ConfigField("num_layers", "n_layer"),
    ConfigField("hidden_size", "n_embd"),
    ConfigField("num_attention_heads", "n_head"),
    ConfigField("vocab_size", "vocab_size"),
    ConfigField("max_position_embeddings", "n_positions"),
    ConfigField("ffn_hidden_size", "n_inner", MEGATRON),
    ConfigField("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
)
GROUPS = ConfigField("num_query_groups", "num_key_value_heads", MEGATRON)
HEAD = ConfigField("kv_channels", "head_dim", MEGATRON)
FFN = ConfigField("ffn_hidden_size", "intermediate_size")
# A model before Llama: LayerNorm, an MLP of two layers.
CLASSIC = FixedFields(normalization="LayerNorm", gated_linear_unit=False)


def tied_embeddings(default: bool) -> ConfigField:
    return ConfigField("share_embeddings_and_output_weights", "tie_word_embeddings", default)


def norm_epsilon(key: str, default: float) -> ConfigField:
    return ConfigField("layernorm_epsilon", key, default)


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
    """Return the rules of the shared expert, an MLP called ``name`` that all tokens go through."""
    return {
        "mlp.shared_experts.linear_fc1": ConcatenatedTensors((f"mlp.{name}.gate_proj", f"mlp.{name}.up_proj")),
        "mlp.shared_experts.linear_fc2": SingleTensor(f"mlp.{name}.down_proj"),
    }


TOP_K = ConfigField("moe_router_topk", "num_experts_per_tok")
EXPERT_FFN = ConfigField("moe_ffn_hidden_size", "moe_intermediate_size")

# Weights of the chosen experts that sum to 1 are a softmax over these alone.
NORMALISED = ConvertedFields(
    lambda hf: {"moe_router_pre_softmax": not hf.get("norm_topk_prob", False)},
    lambda config: {"norm_topk_prob": not config.moe_router_pre_softmax},
)


def _read_sparse(hf: Hf) -> dict[str, Any]:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return {
        "moe_layer_freq": tuple(int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"]))
    }


def _write_sparse(config: MegatronConfig) -> dict[str, Any]:
    dense = [i for i, moe in enumerate(config.moe_layer_freq) if not moe]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN_LAYERS = ConvertedFields(_read_sparse, _write_sparse)


def _read_dense_first(hf: Hf) -> dict[str, Any]:
    dense = hf.get("first_k_dense_replace") or 0
    return {"moe_layer_freq": tuple(int(i >= dense) for i in range(hf["num_hidden_layers"]))}


DENSE_FIRST = ConvertedFields(
    _read_dense_first, lambda config: {"first_k_dense_replace": config.moe_layer_freq.count(0)}
)
ALL_LAYERS = ConvertedFields(lambda hf: {"moe_layer_freq": (1,) * hf["num_hidden_layers"]}, lambda config: {})
