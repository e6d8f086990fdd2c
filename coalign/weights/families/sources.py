"""The tensor rules of a family's table: which rows of which Hugging Face tensors make a Megatron parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from coalign.weights.layouts.megatron_config import MegatronConfig
from coalign.weights.layouts.shards import Box, Shape, ShardBox


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


def locate_pieces(parts: list[SourceRows], expert: int | None) -> tuple[ShardBox, ...]:
    """Return the rows as boxes, full in the other dimensions; of stacked experts this one."""
    made = []
    for source, start, stop, at in parts:
        front = ((expert, expert + 1),) if source.experts and expert is not None else ()
        others: Box = tuple((0, size) for size in source.shape[len(front) + 1 :])
        made.append(ShardBox(source.name, (*front, (start, stop), *others), ((at, at + stop - start), *others)))
    return tuple(made)
