"""Decoders whose config.json alone says which tensors they have: Llama, Qwen2 and Qwen3 without options.

`coalign check` then needs neither transformers nor a model on the meta device. A config.json with any key or value that
is not listed here is left to transformers, which says what is wrong with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coalign.config.schema import ModelConfig
from coalign.files import read_model_config
from coalign.hub import find_directory
from coalign.weights.model_files import StoredTensor

Shape = tuple[int, ...]


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) is float and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_id(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
FAMILIES = ("llama", "qwen2", "qwen3")
REQUIRED: dict[str, Callable[[Any], bool]] = {
    "model_type": lambda value: value in FAMILIES,
    "tie_word_embeddings": lambda value: type(value) is bool,
    **dict.fromkeys(SIZES, _is_count),
}
# Optional keys: those that change no tensor, and for the others the values that ask for nothing special.
HARMLESS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("rms_norm_eps", "initializer_range", "rope_theta"), _is_number),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "unk_token_id"), _is_id),
    **dict.fromkeys(("_name_or_path", "_model_name_or_path", "transformers_version"), _is_text),
    **dict.fromkeys(("dtype", "torch_dtype"), lambda value: value in ("float32", "bfloat16", "float16")),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), lambda value: value is False),
    **dict.fromkeys(("sliding_window", "rope_scaling"), lambda value: value is None),
    "architectures": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "attention_dropout": lambda value: type(value) in (int, float) and value == 0,
    "eos_token_id": lambda value: all(map(_is_id, value)) if isinstance(value, list) else _is_id(value),
    "head_dim": lambda value: value is None or _is_count(value),
    "hidden_act": lambda value: value == "silu",
    "id2label": lambda value: value == {"0": "LABEL_0"},
    "label2id": lambda value: value == {"LABEL_0": 0} and value["LABEL_0"] is not False,
    "layer_types": lambda value: isinstance(value, list) and {*map(str, value)} == {"full_attention"},
    "max_window_layers": _is_count,
    "pretraining_tp": lambda value: type(value) is int and value == 1,
    "rope_parameters": lambda value: (
        isinstance(value, dict)
        and value.keys() == {"rope_theta", "rope_type"}
        and value["rope_type"] == "default"
        and _is_number(value["rope_theta"])
    ),
    "use_cache": lambda value: type(value) is bool,
}


@dataclass(frozen=True)
class _KnownModel:
    """A decoder with causal attention over all tokens and plain rotary positions. ``context``: tokens of the longest
    sequence. ``shapes``: the language model's, by the tensors' names in files."""

    context: int
    shapes: Mapping[str, Shape]
    is_tied: bool

    @property
    def linears(self) -> tuple[tuple[tuple[int, int], int], ...]:
        """((in, out), how many) of the linear layers, the head among them, sorted."""
        shapes = [shape for shape in self.shapes.values() if len(shape) == 2]
        counts = Counter((inputs, outputs) for outputs, inputs in (shapes if self.is_tied else shapes[1:]))
        return tuple(sorted(counts.items()))

    def fits(self, stored: Mapping[str, StoredTensor], config: ModelConfig) -> bool:
        """Whether files hold the tensors of the model with the head that ``config`` asks for, and no others."""
        wanted, there = dict(self.shapes), {name: tensor.shape for name, tensor in stored.items()}
        if config.head != "lm":
            wanted |= {"score.weight": (1, self.shapes["model.norm.weight"][0])}
            for shapes in (wanted, there):
                shapes.pop("lm_head.weight", None)
            if config.head_init == "zero" and "score.weight" not in there:
                del wanted["score.weight"]
        return there == wanted


def find_known_model(config: ModelConfig) -> _KnownModel | None:
    """Return what config.json says of the model in ``config.load``; None where only transformers knows all of it."""
    if config.load is None or config.vision is not None:
        return None
    directory = find_directory(config.load)
    fields = read_model_config(directory) if (directory / "config.json").is_file() else {}
    checks = REQUIRED | HARMLESS
    if not REQUIRED.keys() <= fields.keys() <= checks.keys() or not all(checks[key](fields[key]) for key in fields):
        return None
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    if not _is_consistent(fields, width):
        return None
    return _KnownModel(fields["max_position_embeddings"], _list_shapes(fields, width), fields["tie_word_embeddings"])


def _is_consistent(fields: Mapping[str, Any], width: int) -> bool:
    """Whether sizes divide as they must, and numbers of layers and tokens fit each other."""
    heads, ids = fields["num_attention_heads"], [fields[key] for key in fields if key.endswith("_token_id")]
    tokens = [number for value in ids for number in (value if isinstance(value, list) else [value])]
    layers = fields.get("layer_types", ["full_attention"] * fields["num_hidden_layers"])
    return (
        not (heads % fields["num_key_value_heads"] or fields["hidden_size"] % heads or width % 2)
        and _has_head_width(fields)
        and len(layers) == fields["num_hidden_layers"]
        and all(token is None or token < fields["vocab_size"] for token in tokens)
        and ("rope_theta" in fields) != ("rope_parameters" in fields)
    )


def _has_head_width(fields: Mapping[str, Any]) -> bool:
    """Whether the family knows how wide a head is: null means something to Llama alone, and Qwen3 has a default."""
    family, width = fields["model_type"], fields.get("head_dim")
    return width is not None or family == "llama" or (family == "qwen2" and "head_dim" not in fields)


def _list_shapes(fields: Mapping[str, Any], width: int) -> dict[str, Shape]:
    hidden, inner, vocabulary = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    queries, keys = (fields[f"num_{name}_heads"] * width for name in ("attention", "key_value"))
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if fields["model_type"] == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
    elif fields["model_type"] == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for number in range(fields["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes if fields["tie_word_embeddings"] else shapes | {"lm_head.weight": (vocabulary, hidden)}
