"""The settings of a family's table: how fields of a MegatronConfig are read from a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coalign.weights.layouts.megatron_model import RopeScaling

Hf = Mapping[str, Any]
# Returns fields of a MegatronConfig. ValueError names a key that is missing or has a value that Megatron cannot have.
Setting = Callable[[Hf], dict[str, Any]]
NEEDED: Any = object()
# Megatron's own default: as many groups as heads, heads that fill the model, an MLP four times as wide.
MEGATRON: Any = object()


@dataclass(frozen=True, slots=True)
class ConfigField:
    """Our field ``ours`` is what ``key`` or one of its ``older`` names says; ``default`` if none is there, or null."""

    ours: str
    key: str
    default: Any = NEEDED
    older: tuple[str, ...] = ()

    def __call__(self, hf: Hf) -> dict[str, Any]:
        value = next((hf[key] for key in (self.key, *self.older) if hf.get(key) is not None), self.default)
        if value is NEEDED:
            raise ValueError(f"config.json: '{self.key}' is missing")
        return {} if value is MEGATRON else {self.ours: value}


class RequiredValues:
    """Keys that have to have these values or to be missing, since Megatron has nothing else."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __call__(self, hf: Hf) -> dict[str, Any]:
        for key, value in self.values.items():
            if (found := hf.get(key)) is not None and found != value:
                raise ValueError(f"config.json: '{key}' is {found!r:.60}; for this family Megatron has {value!r}")
        return {}


class FixedFields:
    """Fields with the same value in the whole family."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __call__(self, hf: Hf) -> dict[str, Any]:
        return self.fields


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
    """The activation of the MLP."""

    key: str = "hidden_act"
    default: str = "silu"

    def __call__(self, hf: Hf) -> dict[str, Any]:
        found = hf.get(self.key) or self.default
        if found not in ACTIVATIONS:
            raise ValueError(f"config.json: '{self.key}' is {found!r:.60}; Megatron has {sorted(ACTIVATIONS)}")
        return {"activation_func": ACTIVATIONS[found]}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings: `rope_parameters` (transformers 5), or the keys ``base``, ``percent`` and `rope_scaling`."""

    base: str = "rope_theta"
    percent: str = ""
    default_base: float = 10000.0
    default_percent: float = 1.0

    def __call__(self, hf: Hf) -> dict[str, Any]:
        new = hf.get("rope_parameters") or {}
        base = new.get("rope_theta", hf.get(self.base, self.default_base))
        percent = new.get("partial_rotary_factor", hf.get(self.percent, self.default_percent))
        scaling = read_rope_scaling(new or hf.get("rope_scaling") or {})
        return {"rotary_base": base, "rotary_percent": percent, "rope_scaling": scaling}


def read_rope_scaling(found: Hf) -> RopeScaling | None:
    """Read a config.json's `rope_scaling` or `rope_parameters`. ValueError for an unknown kind."""
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise ValueError(f"config.json: rope scaling is {kind!r:.60}; known are 'linear', 'dynamic', 'llama3', 'yarn'")
    numbers = {name: found[name] for name in RopeScaling.__slots__ if found.get(name) is not None}
    return RopeScaling(**{**numbers, "kind": kind})


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """`sliding_window`: how many tokens a token sees, itself included; null: all. ``default``: without the key."""

    default: int | None = None

    def __call__(self, hf: Hf) -> dict[str, Any]:
        size = hf.get("sliding_window", self.default)
        return {"window_size": None if size is None else (size - 1, 0)}


# ---- settings of several families

SIZES = (
    ConfigField("num_layers", "num_hidden_layers"),
    ConfigField("hidden_size", "hidden_size"),
    ConfigField("num_attention_heads", "num_attention_heads"),
    ConfigField("vocab_size", "vocab_size"),
)
LENGTH = ConfigField("max_position_embeddings", "max_position_embeddings")
GROUPS = ConfigField("num_query_groups", "num_key_value_heads", MEGATRON)
HEAD = ConfigField("kv_channels", "head_dim", MEGATRON)
FFN = ConfigField("ffn_hidden_size", "intermediate_size")
TIED = ConfigField("share_embeddings_and_output_weights", "tie_word_embeddings", True)
UNTIED = ConfigField("share_embeddings_and_output_weights", "tie_word_embeddings", False)
# A model before Llama: LayerNorm, an MLP of two layers.
CLASSIC = FixedFields(normalization="LayerNorm", gated_linear_unit=False)


def norm_epsilon(default: float, key: str = "rms_norm_eps") -> ConfigField:
    return ConfigField("layernorm_epsilon", key, default)
