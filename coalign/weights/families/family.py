"""A model family: how its Hugging Face configuration and tensors map to Megatron's, and the way back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from coalign.weights.families.settings import Setting
from coalign.weights.families.sources import HuggingFaceTensor, SingleTensor, TensorRule, locate_pieces
from coalign.weights.layouts.megatron_config import MegatronConfig
from coalign.weights.layouts.megatron_model import LAYER, MegatronParameter, list_parameters
from coalign.weights.layouts.shards import Box, Shape, Shard, ShardBox, cut, overlap


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

    def from_hf(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the full parameter, made of a file's tensors. ValueError for one that is missing or misshapen."""
        if missing := [name for name in self.sources if name not in tensors]:
            raise ValueError(f"'{self.name}' is made of {missing}, which the checkpoint does not have")
        views = {name: source.read(tensors[name]) for name, source in self.sources.items()}
        return next(tensor for _, tensor in cut(views.__getitem__, [self.whole])).to(self.dtype)

    def to_hf(self, full: Tensor) -> dict[str, Tensor]:
        """Return the file's tensors, made of the full parameter: the inverse of ``from_hf``.

        Raises ValueError for one of several stacked experts: use coalign.weights.layouts.shards.join over all of them.
        """
        self._check(full, self.shape)
        if any(source.experts for source in self.sources.values()):
            raise ValueError(f"'{self.name}' is only a part of {list(self.sources)}")
        found = {}
        for name, source in self.sources.items():
            back = tuple(ShardBox(self.name, piece.own, piece.full) for piece in self.pieces if piece.name == name)
            views = cut(lambda _: full, [Shard(name, source.shape, self.name, back)])
            found[name] = source.write(next(tensor for _, tensor in views))
        return found

    def shard(self, full: Tensor, index: int, count: int) -> Tensor:
        """Return the part of tensor-parallel rank ``index`` of ``count``. ValueError if it does not divide."""
        self._check(full, self.shape)
        shape, boxes = self.cut(index, count)
        own = Shard(self.name, shape, self.name, tuple(ShardBox(self.name, *each) for each in boxes))
        return next(tensor for _, tensor in cut(lambda _: full, [own]))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the full parameter, made of the parts of all tensor-parallel ranks: the inverse of ``shard``."""
        full = parts[0].new_zeros(self.shape)
        for index, part in enumerate(parts):
            shape, boxes = self.cut(index, len(parts))
            self._check(part, shape)
            for there, here in boxes:
                full[tuple(slice(*ends) for ends in there)] = part[tuple(slice(*ends) for ends in here)]
        return full

    def _check(self, tensor: Tensor, shape: Shape) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"'{self.name}' has the shape {tuple(tensor.shape)}, the configuration says {shape}")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The table of one family: how config.json is read and written, and which rule makes which Megatron parameter.

    Rules are found by Megatron's names, without `.weight` and `.bias` where a rule is for both: in ``layer`` within
    layers, whose Hugging Face names begin with ``prefix``, in ``tensors`` outside. ``memory`` replaces rules of both
    where the tensors are those of a transformers model in memory. ``computed``: ends of the names of buffers in old
    checkpoints that no model needs.
    """

    name: str
    architectures: tuple[str, ...]  # of config.json; the first is written
    model_types: tuple[str, ...]  # where it names no architecture; the first is written
    settings: tuple[Setting, ...]
    tensors: Mapping[str, TensorRule]
    layer: Mapping[str, TensorRule]
    prefix: str  # with {layer}
    memory: Mapping[str, TensorRule] = field(default_factory=dict)
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
        found: dict[str, Any] = {"family": self.name}
        for setting in self.settings:
            found |= setting.read(hf)
        defaults = {
            "num_query_groups": found["num_attention_heads"],
            "kv_channels": found["hidden_size"] // found["num_attention_heads"],
            "ffn_hidden_size": 4 * found["hidden_size"],
        }
        return MegatronConfig(**defaults | found)

    def to_hf(self, config: MegatronConfig) -> dict[str, Any]:
        """Return a config.json that describes the same model: the inverse of ``config``."""
        found: dict[str, Any] = {"architectures": [self.architectures[0]], "model_type": self.model_types[0]}
        for setting in self.settings:
            found |= setting.write(config)
        return found

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
        self, config: MegatronConfig, bare: MegatronParameter, memory: Mapping[str, TensorRule]
    ) -> Parameter:
        table, prefix = (self.tensors, "") if bare.layer is None else (self.layer, self.prefix)
        table = {**table, **memory}
        relative = bare.template.removeprefix(LAYER)
        rule, suffix = table.get(relative), ""
        if rule is None:
            module, _, last = relative.rpartition(".")
            rule, suffix = table[module], f".{last}"
        numbers = {"layer": bare.layer, "expert": bare.expert}
        unpadded = (config.vocab_size, *bare.shape[1:]) if bare.kind == "vocabulary" else bare.shape
        parts = [
            (replace(source, name=(prefix + source.name).format_map(numbers)), start, stop, at)
            for source, start, stop, at in rule.parts(config, suffix, unpadded)
        ]
        known = {each.name: getattr(bare, each.name) for each in fields(bare)}
        sources = {part[0].name: part[0] for part in parts}
        return Parameter(**known, sources=sources, pieces=locate_pieces(parts, bare.expert))

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
            and not (config.share_embeddings_and_output_weights and name in self.heads)
        ]
        if missing or extra:
            raise ValueError(f"not a checkpoint of {self.name} as config.json says: missing {missing}, extra {extra}")
        return {name: found[name] for name in wanted}

    def layer_of(self, name: str) -> int | None:
        """Return the layer of a Hugging Face tensor, read from its name; None outside of layers."""
        found = re.match(re.escape(self.prefix).replace(r"\{layer\}", r"(\d+)"), name)
        return None if found is None else int(found[1])

    @property
    def heads(self) -> tuple[str, ...]:
        """The name of the output layer where it is not tied."""
        rule = self.tensors.get("output_layer")
        return (f"{rule.name}.weight",) if isinstance(rule, SingleTensor) else ()
