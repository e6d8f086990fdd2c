"""A family of models: what its Hugging Face configuration and tensors are in Megatron, and the way back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from coalign.weights.families.settings import Setting
from coalign.weights.families.sources import HuggingFaceTensor, TensorRule, pieces
from coalign.weights.layouts.megatron_config import MegatronConfig
from coalign.weights.layouts.megatron_model import LAYER, MegatronParameter, TensorParallelCut, cut_of, holds
from coalign.weights.layouts.shards import Box, Shape, Shard, ShardBox, cut, overlap


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole Megatron model (no padding but the vocabulary's, no parallelism).

    ``pieces``: boxes of the views of ``sources`` (HuggingFaceTensor), so ``whole`` can be cut, joined and planned by
    coalign.weights.layouts.shards. ``kind``: how tensor parallelism cuts it (experts: expert-tensor).
    """

    template: str
    shape: Shape
    kind: TensorParallelCut
    layer: int | None
    expert: int | None
    moe: bool
    dtype: torch.dtype | None
    sources: Mapping[str, HuggingFaceTensor]
    pieces: tuple[ShardBox, ...]

    @property
    def name(self) -> str:
        """With the numbers of its layer and its expert in the whole model."""
        return self.template.format(layer=self.layer, expert=self.expert)

    @property
    def whole(self) -> Shard:
        return Shard(self.name, self.shape, self.pieces[0].name, self.pieces)

    def placed(self, there: Box, here: Box) -> Iterator[ShardBox]:
        """The box ``there`` of it lies at ``here`` in an own tensor (which may have dimensions in front), in boxes of
        what it is made of."""
        cut = ShardBox(self.name, there, here)
        for piece in self.pieces:
            if (both := overlap(there, piece.own)) is not None:
                back = ShardBox(piece.name, piece.own, piece.full)
                yield ShardBox(piece.name, back.within(both), cut.within(both))

    def from_hf(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The full parameter, made of the file's tensors. ValueError for a tensor that is missing or misshapen."""
        if missing := [name for name in self.sources if name not in tensors]:
            raise ValueError(f"'{self.name}' is made of {missing}, which the checkpoint does not have")
        views = {name: source.read(tensors[name]) for name, source in self.sources.items()}
        return next(tensor for _, tensor in cut(views.__getitem__, [self.whole])).to(self.dtype)

    def to_hf(self, full: Tensor) -> dict[str, Tensor]:
        """The file's tensors, from the full parameter: the inverse of ``from_hf``. ValueError for an expert of stacked
        ones: those are joined over all of them (coalign.weights.layouts.shards.join)."""
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
        """What tensor-parallel rank ``index`` of ``count`` holds of it. ValueError if it does not divide."""
        self._check(full, self.shape)
        shape, boxes = cut_of(self, index, count)
        own = Shard(self.name, shape, self.name, tuple(ShardBox(self.name, *each) for each in boxes))
        return next(tensor for _, tensor in cut(lambda _: full, [own]))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The full parameter from what all tensor-parallel ranks hold: the inverse of ``shard``."""
        full = parts[0].new_zeros(self.shape)
        for index, part in enumerate(parts):
            shape, boxes = cut_of(self, index, len(parts))
            self._check(part, shape)
            for there, here in boxes:
                full[tuple(slice(*ends) for ends in there)] = part[tuple(slice(*ends) for ends in here)]
        return full

    def _check(self, tensor: Tensor, shape: Shape) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"'{self.name}' has the shape {tuple(tensor.shape)}, the configuration says {shape}")


@dataclass(frozen=True, kw_only=True)
class Family:
    """``settings``: how config.json is read and written. ``tensors``: Megatron's names, without `.weight` and `.bias`
    where the line holds for both, → lines; ``layer``: the same within a layer, whose Hugging Face names begin with
    ``prefix``; ``memory``: lines of both that are others where transformers has the model in memory. ``computed``: the
    ends of names of buffers that old checkpoints have and no model needs."""

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
        """Whether a config.json is of this family."""
        named, known = hf.get("architectures"), self.architectures
        return (any(each in known for each in named) if named else hf.get("model_type") in self.model_types) and (
            self.when(hf)
        )

    def config(self, hf: Mapping[str, Any]) -> MegatronConfig:
        """From a config.json. ValueError naming the key: one that is missing, or a value that Megatron cannot have."""
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
        """A config.json that describes the same model: the inverse of ``config``."""
        found: dict[str, Any] = {"architectures": [self.architectures[0]], "model_type": self.model_types[0]}
        for setting in self.settings:
            found |= setting.write(config)
        return found

    def parameters(
        self, config: MegatronConfig, *, vocab_divisor: int = 1, in_memory: bool = False
    ) -> dict[str, Parameter]:
        """All parameters of the Megatron model by canonical names (the local spec's, with the whole model's numbers of
        layers and experts), in its order.

        ``vocab_divisor``: what the padded vocabulary is a multiple of (Megatron's default is 128 × tensor parallel).
        ``in_memory``: they are made of a transformers model's tensors, not a file's (5.x stacks experts).
        """
        padded = -(-config.vocab_size // vocab_divisor) * vocab_divisor
        memory = self.memory if in_memory else {}
        made = (self._parameter(config, held, memory) for held in holds(config, padded))
        return {parameter.name: parameter for parameter in made}

    def sources(self, config: MegatronConfig, *, in_memory: bool = False) -> dict[str, HuggingFaceTensor]:
        """All Hugging Face tensors by name."""
        found: dict[str, HuggingFaceTensor] = {}
        for parameter in self.parameters(config, in_memory=in_memory).values():
            found |= parameter.sources
        return found

    def _parameter(
        self, config: MegatronConfig, held: MegatronParameter, memory: Mapping[str, TensorRule]
    ) -> Parameter:
        layered = held.layer is not None
        table, prefix = (self.layer, self.prefix) if layered else (self.tensors, "")
        table = {**table, **memory}
        relative = held.template.removeprefix(LAYER)
        line, suffix = table.get(relative), ""
        if line is None:
            module, _, last = relative.rpartition(".")
            line, suffix = table[module], f".{last}"
        numbers = {"layer": held.layer, "expert": held.expert}
        real = (config.vocab_size, *held.shape[1:]) if held.kind == "vocabulary" else held.shape
        parts = [
            (replace(source, name=(prefix + source.name).format_map(numbers)), *rows)
            for source, *rows in line.parts(config, suffix, real)
        ]
        known = {field.name: getattr(held, field.name) for field in fields(held)}
        return Parameter(**known, sources={part[0].name: part[0] for part in parts}, pieces=pieces(parts, held.expert))

    def stored_names(self, config: MegatronConfig, names: Iterable[str]) -> dict[str, str]:
        """Of each Hugging Face tensor, its name among ``names``, those of a checkpoint.

        These may lack ``base`` in front of all of them, and there may be computed buffers and the copy of a tied head.
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
        """The layer that a Hugging Face tensor is of, by its name; None: of none."""
        found = re.match(re.escape(self.prefix).replace(r"\{layer\}", r"(\d+)"), name)
        return None if found is None else int(found[1])

    @property
    def heads(self) -> tuple[str, ...]:
        """Names that the output layer has where it is not tied."""
        line = self.tensors.get("output_layer")
        return (f"{line.name}.weight",) if line else ()
