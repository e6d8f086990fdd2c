"""A model family: how its Hugging Face configuration and tensors map to Megatron's.

The settings of a family's table say how fields of a MegatronConfig are read from a config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from coalign.files import describe_problem
from coalign_megatron.layouts.megatron_model import (
    LAYER,
    TOWER,
    MegatronConfig,
    MegatronParameter,
    RopeScaling,
    list_parameters,
)
from coalign_megatron.layouts.shards import Box, Shape, Shard, ShardBox, overlap

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
            if (actual := hf.get(key)) is not None and actual != value:
                raise ValueError(f"config.json: '{key}' is {actual!r:.60}; for this family Megatron has {value!r}")
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
        name = hf.get(self.key) or self.default
        if name not in ACTIVATIONS:
            raise ValueError(f"config.json: '{self.key}' is {name!r:.60}; Megatron has {sorted(ACTIVATIONS)}")
        return {"activation_func": ACTIVATIONS[name]}


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


def read_rope_scaling(settings: Hf) -> RopeScaling | None:
    """Read a config.json's `rope_scaling` or `rope_parameters`. ValueError for an unknown type."""
    name = settings.get("rope_type", settings.get("type", "default"))
    if name == "default":
        return None
    if name not in ("linear", "dynamic", "llama3", "yarn"):
        raise ValueError(f"config.json: rope scaling is {name!r:.60}; known are 'linear', 'dynamic', 'llama3', 'yarn'")
    numbers = {key: settings[key] for key in RopeScaling.__slots__ if settings.get(key) is not None}
    return RopeScaling(**{**numbers, "kind": name})


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


_CONFIG = TypeAdapter(MegatronConfig)


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """A Hugging Face tensor and its view: [out, in], without rows that the model never reads. Boxes are of the view.

    ``shape``: that of the view. ``transposed``: the file has [in, out] (GPT-2's Conv1D). ``skip``: unread rows in front
    (OPT's positions), written as zeros. ``experts``: the first dimension counts experts.
    """

    name: str
    shape: Shape
    transposed: bool = False
    skip: int = 0
    experts: bool = False

    @property
    def stored(self) -> Shape:
        """Its shape in the file."""
        rows, *rest = self.shape
        return (*rest, rows) if self.transposed else (rows + self.skip, *rest)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the view of the file's tensor. ValueError if its shape is not ``stored``."""
        if tuple(tensor.shape) != self.stored:
            raise ValueError(f"'{self.name}' has the shape {tuple(tensor.shape)}, the configuration says {self.stored}")
        return tensor.T if self.transposed else tensor[self.skip :]

    def write(self, view: Tensor) -> Tensor:
        """Return the file's tensor, made of the view."""
        if self.transposed:
            return view.T.contiguous()
        if not self.skip:
            return view
        tensor = view.new_zeros(self.stored)
        tensor[self.skip :] = view
        return tensor


# (source, its rows from start to stop, the row of the parameter from which on they lie)
SourceRows = tuple[HuggingFaceTensor, int, int, int]


class TensorRule(Protocol):
    """A rule of a family's table. Its names are relative to the layer, and without `.weight` or `.bias`."""

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        """Yield the rows that make a full parameter of this shape (without padding).

        ``suffix``: `.weight`, `.bias` or nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class SingleTensor:
    """One tensor as it is."""

    name: str
    transposed: bool = False
    skip: int = 0

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        turned = self.transposed and len(shape) == 2
        yield HuggingFaceTensor(self.name + suffix, shape, turned, self.skip), 0, shape[0], 0


@dataclass(frozen=True, slots=True)
class ConcatenatedTensors:
    """Tensors of one size, end to end: gate and up."""

    names: tuple[str, ...]

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        rows = shape[0] // len(self.names)
        for i, name in enumerate(self.names):
            yield HuggingFaceTensor(name + suffix, (rows, *shape[1:])), 0, rows, i * rows


@dataclass(frozen=True, slots=True)
class QueryKeyValueTensors:
    """Queries, keys and values in three tensors; Megatron has group by group its queries, key and value."""

    query: str
    key: str
    value: str

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        queries, keys = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
        sizes = zip((self.query, self.key, self.value), (queries, keys, keys), strict=True)
        sources = [HuggingFaceTensor(name + suffix, (rows, *shape[1:])) for name, rows in sizes]
        for which, start, stop, at in _groups(config):
            yield sources[which], start, stop, at


@dataclass(frozen=True, slots=True)
class QueryKeyValueBlocks:
    """All queries, all keys and all values in one tensor."""

    name: str
    transposed: bool = False

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        queries, keys = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
        source = HuggingFaceTensor(self.name + suffix, shape, self.transposed and len(shape) == 2)
        starts = (0, queries, queries + keys)
        for which, start, stop, at in _groups(config):
            yield source, starts[which] + start, starts[which] + stop, at


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One expert of a tensor that has all experts. Its name has no `.weight`."""

    name: str

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        assert config.num_moe_experts is not None
        yield HuggingFaceTensor(self.name, (config.num_moe_experts, *shape), experts=True), 0, shape[0], 0


def _groups(config: MegatronConfig) -> Iterator[tuple[int, int, int, int]]:
    """Yield group by group: queries (0), keys (1) or values (2), their rows from start to stop, and where they lie."""
    head, per = config.kv_channels, config.num_attention_heads // config.num_query_groups
    at = 0
    for group in range(config.num_query_groups):
        for which, count in enumerate((per, 1, 1)):
            yield which, group * count * head, (group + 1) * count * head, at
            at += count * head


LAYER_MODULES = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def name_layer(*rules: TensorRule | str) -> dict[str, TensorRule | str]:
    """Return the rules of a layer: its norm, queries with keys and values, projection, second norm, and MLP (two)."""
    return dict(zip(LAYER_MODULES, rules, strict=True))


def name_others(embedding: str, norm: str, head: str = "lm_head") -> dict[str, TensorRule | str]:
    """Return the rules outside of layers."""
    return {"embedding.word_embeddings": embedding, "decoder.final_layernorm": norm, "output_layer": head}


# The names of Megatron-LM before megatron-core, which several families have.
DENSE_LAYER = name_layer(
    "input_layernorm",
    "self_attention.query_key_value",
    "self_attention.dense",
    "post_attention_layernorm",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(MegatronParameter):
    """A Megatron parameter and what it is made of: ``pieces``, boxes of the views of ``sources``.

    So ``whole`` can be cut, joined and planned by coalign_megatron.layouts.shards.
    """

    sources: Mapping[str, HuggingFaceTensor]
    pieces: tuple[ShardBox, ...]

    @property
    def whole(self) -> Shard:
        return Shard(self.name, self.shape, self.pieces[0].name, self.pieces)

    def placed(self, there: Box, here: Box) -> Iterator[ShardBox]:
        """Yield the sources' boxes for the parameter's box ``there``, which lies at ``here`` in a rank's own tensor.

        The own tensor may have more dimensions in front.
        """
        target = ShardBox(self.name, there, here)
        for piece in self.pieces:
            if (both := overlap(there, piece.local)) is not None:
                back = ShardBox(piece.name, piece.local, piece.full)
                yield ShardBox(piece.name, back.within(both), target.within(both))


@dataclass(frozen=True, kw_only=True)
class Family:
    """The table of one family: how config.json is read, and which rule makes which Megatron parameter.

    Rules are found by Megatron's names, without `.weight` and `.bias` where a rule is for both: in ``layer`` within
    layers, whose Hugging Face names begin with ``prefix``, in ``tensors`` outside. A text is the name of one tensor.
    ``memory`` replaces rules of both where the tensors are those of a transformers model in memory. ``computed``: ends
    of the names of buffers in old checkpoints that no model needs.
    """

    name: str
    architectures: tuple[str, ...]  # names in config.json
    model_types: tuple[str, ...]  # where config.json names no architecture
    settings: tuple[Setting, ...]
    tensors: Mapping[str, TensorRule | str]
    layer: Mapping[str, TensorRule | str]
    prefix: str  # with {layer}
    memory: Mapping[str, TensorRule | str] = field(default_factory=dict)
    memory_prefix: str | None = None  # the prefix of layers in memory, if it differs
    tower: tuple[str, str] | None = None  # what names of the vision tower begin with, in files and in memory
    base: str = "model."  # prefix that files without a head leave out
    computed: tuple[str, ...] = ("rotary_emb.inv_freq",)
    when: Callable[[Mapping[str, Any]], bool] = lambda hf: True  # where several families share an architecture

    def claims(self, hf: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of this family."""
        if names := hf.get("architectures"):
            return any(name in self.architectures for name in names) and self.when(hf)
        return hf.get("model_type") in self.model_types and self.when(hf)

    def config(self, hf: Mapping[str, Any]) -> MegatronConfig:
        """Read a config.json. ValueError names a key that is missing or has a value that Megatron cannot have."""
        values: dict[str, Any] = {}
        try:
            for setting in self.settings:
                values |= setting(hf)
            defaults = {
                "num_query_groups": values["num_attention_heads"],
                "kv_channels": values["hidden_size"] // values["num_attention_heads"],
                "ffn_hidden_size": 4 * values["hidden_size"],
            }
            return _CONFIG.validate_python(defaults | values)
        except (TypeError, AttributeError, LookupError, ArithmeticError, ValidationError) as error:
            raise ValueError(f"config.json: a value is not of its kind: {describe_problem(error)}") from error

    def parameters(
        self, config: MegatronConfig, *, vocab_divisor: int = 1, in_memory: bool = False
    ) -> dict[str, Parameter]:
        """Return all parameters of the Megatron model in its order, by canonical names (those of the local spec).

        ``vocab_divisor``: the padded vocabulary is a multiple of it (Megatron's default is 128 × tensor parallel).
        ``in_memory``: they are made of a transformers model's tensors, not a file's (version 5 stacks experts).
        """
        padded = -(-config.vocab_size // vocab_divisor) * vocab_divisor
        bare = list_parameters(config, padded)
        parameters = {parameter.name: self._parameter(config, parameter, in_memory) for parameter in bare}
        if self.tower is not None:
            prefix = self.tower[in_memory]
            parameters |= {TOWER + name: keep_whole(TOWER + name, prefix + name, shape) for name, shape in config.tower}
        return parameters

    def sources(self, config: MegatronConfig, *, in_memory: bool = False) -> dict[str, HuggingFaceTensor]:
        """Return all Hugging Face tensors by name."""
        sources: dict[str, HuggingFaceTensor] = {}
        for parameter in self.parameters(config, in_memory=in_memory).values():
            sources |= parameter.sources
        return sources

    def _parameter(self, config: MegatronConfig, bare: MegatronParameter, in_memory: bool) -> Parameter:
        layer_prefix = self.memory_prefix if in_memory and self.memory_prefix else self.prefix
        table, prefix = (self.tensors, "") if bare.layer is None else (self.layer, layer_prefix)
        table = {**table, **(self.memory if in_memory else {})}
        relative = bare.template.removeprefix(LAYER)
        rule, suffix = table.get(relative), ""
        if rule is None:
            module, _, last = relative.rpartition(".")
            rule, suffix = table[module], f".{last}"
        if isinstance(rule, str):
            rule = SingleTensor(rule)
        numbers = {"layer": bare.layer, "expert": bare.expert}
        unpadded = (config.vocab_size, *bare.shape[1:]) if bare.sharding == "vocabulary" else bare.shape
        rows = [
            (replace(source, name=(prefix + source.name).format_map(numbers)), start, stop, at)
            for source, start, stop, at in rule.parts(config, suffix, unpadded)
        ]
        base = {entry.name: getattr(bare, entry.name) for entry in fields(bare)}
        sources = {source.name: source for source, *_ in rows}
        return Parameter(**base, sources=sources, pieces=_locate_pieces(rows, bare.expert))

    def stored_names(self, config: MegatronConfig, names: Iterable[str]) -> dict[str, str]:
        """Return the name of each Hugging Face tensor in a checkpoint that has ``names``.

        All of these may lack ``base`` in front, and there may be computed buffers and a copy of a tied head. Raises
        ValueError with all names that are missing or too many.
        """
        wanted, names = self.sources(config), list(names)
        bare = not any(name.startswith(self.base) for name in names)
        stored_by_name = {f"{self.base}{name}" if bare and name not in wanted else name: name for name in names}
        missing = [name for name in wanted if name not in stored_by_name]
        extra = [
            stored
            for name, stored in stored_by_name.items()
            if name not in wanted
            and not name.endswith(self.computed)
            and not (config.share_embeddings_and_output_weights and name == f"{self.tensors['output_layer']}.weight")
        ]
        if missing or extra:
            raise ValueError(f"not a checkpoint of {self.name} as config.json says: missing {missing}, extra {extra}")
        return {name: stored_by_name[name] for name in wanted}

    def layer_of(self, name: str) -> int | None:
        """Return the layer of a Hugging Face tensor, read from its name; None outside of layers."""
        match = re.match(re.escape(self.prefix).replace(r"\{layer\}", r"(\d+)"), name)
        return None if match is None else int(match[1])


def keep_whole(name: str, source: str, shape: Shape) -> Parameter:
    """Return a parameter that is not cut, made of one tensor."""
    box: Box = tuple((0, size) for size in shape)
    sources, pieces = {source: HuggingFaceTensor(source, shape)}, (ShardBox(source, box, box),)
    return Parameter(name, shape, "replicated", sources=sources, pieces=pieces)


def _locate_pieces(rows: list[SourceRows], expert: int | None) -> tuple[ShardBox, ...]:
    """Return the rows as boxes, full in the other dimensions; stacked experts are cut to this one."""
    made = []
    for source, start, stop, at in rows:
        front = ((expert, expert + 1),) if source.experts and expert is not None else ()
        rest: Box = tuple((0, size) for size in source.shape[len(front) + 1 :])
        made.append(ShardBox(source.name, (*front, (start, stop), *rest), ((at, at + stop - start), *rest)))
    return tuple(made)
