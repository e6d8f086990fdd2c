"""What a Megatron parameter is made of: lines of a family's table, and the boxes of Hugging Face tensors they mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from coalign.weights.layouts.megatron_config import MegatronConfig
from coalign.weights.layouts.shards import Box, Shape, ShardBox


@dataclass(frozen=True, slots=True)
class HuggingFaceTensor:
    """A Hugging Face tensor. Boxes are of its view: [out, in], and without rows that mean nothing.

    ``shape``: of the view. ``transposed``: the file has [in, out] (GPT-2's Conv1D). ``skip``: rows in front of the view
    that the model never reads (OPT's positions); they come back as zeros. ``experts``: its first dimension counts them.
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
        """The view of the file's tensor. ValueError if its shape is not ``stored``."""
        if tuple(tensor.shape) != self.stored:
            raise ValueError(f"'{self.name}' has the shape {tuple(tensor.shape)}, the configuration says {self.stored}")
        return tensor.T if self.transposed else tensor[self.skip :]

    def write(self, view: Tensor) -> Tensor:
        """The file's tensor, from the view."""
        if self.transposed:
            return view.T.contiguous()
        if not self.skip:
            return view
        tensor = view.new_zeros(self.stored)
        tensor[self.skip :] = view
        return tensor


# Of a source, the rows from … to …, which lie from row … on in the parameter.
SourceRows = tuple[HuggingFaceTensor, int, int, int]


class TensorRule(Protocol):
    """A rule of a family's table. Names are relative to where the rule stands, and without `.weight` or `.bias`."""

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        """What a full parameter of this shape (a vocabulary without padding) is made of; ``suffix``: `.weight`, `.bias`
        or nothing."""


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
    """Tensors of one size, end to end: the gate, then what it gates."""

    names: tuple[str, ...]

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        rows = shape[0] // len(self.names)
        for i, name in enumerate(self.names):
            yield HuggingFaceTensor(name + suffix, (rows, *shape[1:])), 0, rows, i * rows


@dataclass(frozen=True, slots=True)
class QueryKeyValueTensors:
    """Queries, keys and values in three tensors; Megatron has group by group its queries, its key and its value."""

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
    """One expert's weight out of a tensor that has those of all experts. Its name has no `.weight`."""

    name: str

    def parts(self, config: MegatronConfig, suffix: str, shape: Shape) -> Iterator[SourceRows]:
        assert config.num_moe_experts is not None
        yield HuggingFaceTensor(self.name, (config.num_moe_experts, *shape), experts=True), 0, shape[0], 0


def _groups(config: MegatronConfig) -> Iterator[tuple[int, int, int, int]]:
    """Of queries (0), keys (1), values (2), rows from … to …, and where they lie when groups follow each other."""
    head, per = config.kv_channels, config.num_attention_heads // config.num_query_groups
    at = 0
    for group in range(config.num_query_groups):
        for which, count in enumerate((per, 1, 1)):
            yield which, group * count * head, (group + 1) * count * head, at
            at += count * head


def pieces(parts: list[SourceRows], expert: int | None) -> tuple[ShardBox, ...]:
    """Parts as boxes: rows, whole in the other dimensions; of stacked experts, this one."""
    made = []
    for source, start, stop, at in parts:
        front = ((expert, expert + 1),) if source.experts and expert is not None else ()
        others: Box = tuple((0, size) for size in source.shape[len(front) + 1 :])
        made.append(ShardBox(source.name, (*front, (start, stop), *others), ((at, at + stop - start), *others)))
    return tuple(made)
