"""A model family: how its Hugging Face configuration and tensors map to Megatron's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from coalign.files import describe_problem
from coalign.weights.families.settings import Setting
from coalign.weights.layouts.megatron_model import LAYER, MegatronConfig, MegatronParameter, list_parameters
from coalign.weights.layouts.shards import Box, Shape, Shard, ShardBox, overlap

_CONFIG = TypeAdapter(MegatronConfig)


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """A Hugging Face tensor and its view: [out, in], without rows that the model never reads. Boxes are of the view.

    ``shape``: of the view. ``transposed``: the file has [in, out] (GPT-2's Conv1D). ``skip``: unread rows in front
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
        rows, *others = self.shape
        return (*others, rows) if self.transposed else (rows + self.skip, *others)

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

    So ``whole`` can be cut, joined and planned by coalign.weights.layouts.shards.
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
        own = ShardBox(self.name, there, here)
        for piece in self.pieces:
            if (both := overlap(there, piece.own)) is not None:
                back = ShardBox(piece.name, piece.own, piece.full)
                yield ShardBox(piece.name, back.within(both), own.within(both))


@dataclass(frozen=True, kw_only=True)
class Family:
    """The table of one family: how config.json is read, and which rule makes which Megatron parameter.

    Rules are found by Megatron's names, without `.weight` and `.bias` where a rule is for both: in ``layer`` within
    layers, whose Hugging Face names begin with ``prefix``, in ``tensors`` outside. A text is the name of one tensor.
    ``memory`` replaces rules of both where the tensors are those of a transformers model in memory. ``computed``: ends
    of the names of buffers in old checkpoints that no model needs.
    """

    name: str
    architectures: tuple[str, ...]  # of config.json
    model_types: tuple[str, ...]  # where it names no architecture
    settings: tuple[Setting, ...]
    tensors: Mapping[str, TensorRule | str]
    layer: Mapping[str, TensorRule | str]
    prefix: str  # with {layer}
    memory: Mapping[str, TensorRule | str] = field(default_factory=dict)
    base: str = "model."  # of names in files that hold the model without its head
    computed: tuple[str, ...] = ("rotary_emb.inv_freq",)
    when: Callable[[Mapping[str, Any]], bool] = lambda hf: True  # where several families share an architecture

    def claims(self, hf: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of this family."""
        if names := hf.get("architectures"):
            return any(name in self.architectures for name in names) and self.when(hf)
        return hf.get("model_type") in self.model_types and self.when(hf)

    def config(self, hf: Mapping[str, Any]) -> MegatronConfig:
        """Read a config.json. ValueError names a key that is missing or has a value that Megatron cannot have."""
        found: dict[str, Any] = {}
        try:
            for setting in self.settings:
                found |= setting(hf)
            defaults = {
                "num_query_groups": found["num_attention_heads"],
                "kv_channels": found["hidden_size"] // found["num_attention_heads"],
                "ffn_hidden_size": 4 * found["hidden_size"],
            }
            return _CONFIG.validate_python(defaults | found)
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
        memory = self.memory if in_memory else {}
        bare = list_parameters(config, padded)
        return {parameter.name: self._parameter(config, parameter, memory) for parameter in bare}

    def sources(self, config: MegatronConfig, *, in_memory: bool = False) -> dict[str, HuggingFaceTensor]:
        """Return all Hugging Face tensors by name."""
        found: dict[str, HuggingFaceTensor] = {}
        for parameter in self.parameters(config, in_memory=in_memory).values():
            found |= parameter.sources
        return found

    def _parameter(
        self, config: MegatronConfig, bare: MegatronParameter, memory: Mapping[str, TensorRule | str]
    ) -> Parameter:
        table, prefix = (self.tensors, "") if bare.layer is None else (self.layer, self.prefix)
        table = {**table, **memory}
        relative = bare.template.removeprefix(LAYER)
        rule, suffix = table.get(relative), ""
        if rule is None:
            module, _, last = relative.rpartition(".")
            rule, suffix = table[module], f".{last}"
        if isinstance(rule, str):
            rule = SingleTensor(rule)
        numbers = {"layer": bare.layer, "expert": bare.expert}
        unpadded = (config.vocab_size, *bare.shape[1:]) if bare.kind == "vocabulary" else bare.shape
        parts = [
            (replace(source, name=(prefix + source.name).format_map(numbers)), start, stop, at)
            for source, start, stop, at in rule.parts(config, suffix, unpadded)
        ]
        known = {each.name: getattr(bare, each.name) for each in fields(bare)}
        sources = {part[0].name: part[0] for part in parts}
        return Parameter(**known, sources=sources, pieces=_locate_pieces(parts, bare.expert))

    def stored_names(self, config: MegatronConfig, names: Iterable[str]) -> dict[str, str]:
        """Return the name of each Hugging Face tensor in a checkpoint that has ``names``.

        All of these may lack ``base`` in front, and there may be computed buffers and a copy of a tied head. Raises
        ValueError with all names that are missing or too many.
        """
        wanted, names = self.sources(config), list(names)
        bare = not any(name.startswith(self.base) for name in names)
        found = {f"{self.base}{name}" if bare and name not in wanted else name: name for name in names}
        missing = [name for name in wanted if name not in found]
        extra = [
            stored
            for name, stored in found.items()
            if name not in wanted
            and not name.endswith(self.computed)
            and not (config.share_embeddings_and_output_weights and name == f"{self.tensors['output_layer']}.weight")
        ]
        if missing or extra:
            raise ValueError(f"not a checkpoint of {self.name} as config.json says: missing {missing}, extra {extra}")
        return {name: found[name] for name in wanted}

    def layer_of(self, name: str) -> int | None:
        """Return the layer of a Hugging Face tensor, read from its name; None outside of layers."""
        found = re.match(re.escape(self.prefix).replace(r"\{layer\}", r"(\d+)"), name)
        return None if found is None else int(found[1])


def _locate_pieces(parts: list[SourceRows], expert: int | None) -> tuple[ShardBox, ...]:
    """Return the rows as boxes, full in the other dimensions; of stacked experts this one."""
    made = []
    for source, start, stop, at in parts:
        front = ((expert, expert + 1),) if source.experts and expert is not None else ()
        others: Box = tuple((0, size) for size in source.shape[len(front) + 1 :])
        made.append(ShardBox(source.name, (*front, (start, stop), *others), ((at, at + stop - start), *others)))
    return tuple(made)
