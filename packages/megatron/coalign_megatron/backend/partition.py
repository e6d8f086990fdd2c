"""Plans which rank has which shards of a model, reads Hugging Face tensors into the ranks, and exports them from there.

It also lists the fields of megatron-core's configuration that Coalign sets. megatron-core is not imported here.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coalign.backends.lora import find_block
from coalign.backends.pretrained import get_directory
from coalign.config.schema import ModelConfig
from coalign.files import read_model_config
from coalign_megatron import families
from coalign_megatron.families import Family, Parameter
from coalign_megatron.families.family import HuggingFaceTensor, keep_whole
from coalign_megatron.layouts.megatron import MegatronLayout, Mesh, split_layers
from coalign_megatron.layouts.megatron_model import MegatronConfig
from coalign_megatron.layouts.shards import Box, BoxCopy, Shard, ShardBox, cut, plan

SCORE = "score.weight"  # the head of a value or reward model, in every Hugging Face directory


@dataclass(frozen=True, slots=True)
class AdaptedShard:
    """A rank's shard of the weight of a linear layer, made of Hugging Face weights some of which have adapters.

    layer: `<chunk>/<name in the chunk>`. sources: the adapted weights. expert: which one of a stack they are. row: the
    columns are cut, not the rows. columns: those of A, from start to stop. rows: for each row of the shard the row of
    B, counted through all sources; for a row without an adapter the number of all these rows.
    """

    layer: str
    sources: tuple[str, ...]
    expert: int | None
    row: bool
    columns: tuple[int, int]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class WeightPartition:
    """Knows which tensors each rank of ``layout`` has.

    vocabulary: the padded vocabulary is a multiple of it. scalar: the head is one row.
    """

    family: Family
    layout: MegatronLayout
    vocabulary: int
    scalar: bool = False
    _cache: dict[bool, dict[str, Parameter]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def padded(self) -> int:
        """Rows of the embedding and the output layer."""
        return -(-self.layout.config.vocab_size // self.vocabulary) * self.vocabulary

    def parameters(self, *, in_memory: bool) -> dict[str, Parameter]:
        """Return the parameters of the whole model; ``in_memory``: from tensors of a transformers model, not a file."""
        if in_memory not in self._cache:  # thousands of experts take seconds
            self._cache[in_memory] = self._parameters(in_memory)
        return self._cache[in_memory]

    def _parameters(self, in_memory: bool) -> dict[str, Parameter]:
        config = self.layout.config
        parameters = self.family.parameters(config, vocab_divisor=self.vocabulary, in_memory=in_memory)
        if self.scalar:
            parameters["output_layer.weight"] = keep_whole("output_layer.weight", SCORE, (1, config.hidden_size))
        return parameters

    def sources(self, *, in_memory: bool) -> dict[str, HuggingFaceTensor]:
        return {name: s for p in self.parameters(in_memory=in_memory).values() for name, s in p.sources.items()}

    def shards(self, rank: int, *, in_memory: bool) -> list[Shard]:
        """List a rank's tensors, in all of its chunks, by `<chunk>/<name in the chunk>`."""
        parameters, at = self.parameters(in_memory=in_memory), self.layout.mesh.at(rank)
        return [
            replace(shard, name=f"{chunk}/{shard.name}")
            for chunk in range(len(self.layout.stages[at.pipeline[0]]))
            for shard in self.layout.shards(parameters, at, chunk)
        ]

    def adapted_shards(self, rank: int, adapted: Collection[str]) -> Iterator[AdaptedShard]:
        """Yield a rank's shards of weights made of ``adapted`` ones, by the names of transformers in memory."""
        parameters, at = self.parameters(in_memory=True), self.layout.mesh.at(rank)
        for chunk in range(len(self.layout.stages[at.pipeline[0]])):
            for parameter, shard in self.layout.place(parameters, at, chunk):
                sources = [name for name in parameter.sources if name in adapted]
                if not sources:
                    continue
                *starts, end = accumulate((parameter.sources[name].shape[-2] for name in sources), initial=0)
                first, rows = dict(zip(sources, starts, strict=True)), [end] * shard.shape[0]
                for piece in (piece for piece in shard.pieces if piece.name in first):
                    (start, stop), _ = piece.full[-2:]
                    rows[slice(*piece.local[-2])] = range(first[piece.name] + start, first[piece.name] + stop)
                layer, row = f"{chunk}/{shard.name.removesuffix('.weight')}", parameter.sharding == "row"
                expert = parameter.expert if parameter.sources[sources[0]].experts else None
                yield AdaptedShard(layer, tuple(sources), expert, row, shard.pieces[0].full[-1], tuple(rows))

    def find_unfit_target(self, adapted: Set[str]) -> str | None:
        """Return an ``adapted`` weight that no column- or row-parallel layer holds, as a gate of shared experts."""
        parameters = self.parameters(in_memory=True).values()
        linear = (p for p in parameters if re.search(r"\.linear_\w+\.weight$", p.template))
        held = {name for parameter in linear for name in parameter.sources}
        return next((name for name in adapted if name not in held), None)

    def find_bare_stage(self, adapted: Set[str]) -> int | None:
        """Return a pipeline stage without ``adapted`` weights, or without those of the experts that others have: its
        ranks would have no optimizer for them."""
        held: dict[int, set[bool]] = {stage: set() for stage in range(self.layout.mesh.pipeline)}
        for parameter in self.parameters(in_memory=True).values():
            if not adapted.isdisjoint(parameter.sources):
                held[self.layout.stage_of(parameter)[0]].add(parameter.expert is not None)
        every = set().union(*held.values())
        return next((stage for stage, types in held.items() if types != every), None)

    def read(self, rank: int, tensor: Callable[[str], Tensor], *, in_memory: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield a rank's tensors, made from Hugging Face ones. Raises ValueError for a wrong shape."""
        sources = self.sources(in_memory=in_memory)
        return cut(lambda name: sources[name].read(tensor(name)), self.shards(rank, in_memory=in_memory))


class HuggingFaceExport:
    """Makes Hugging Face tensors from those of the ranks; each on one rank only, spread evenly.

    The ranks of a pipeline stage make the tensors of its layers among themselves, one for each rank at a time, and send
    each other only the missing boxes. ``blocks``: leave out weights that are in none of these modules.
    """

    def __init__(self, weights: WeightPartition, rank: int, *, in_memory: bool, blocks: Set[str] | None = None) -> None:
        mesh = weights.layout.mesh
        self.rank, self.sources = rank, weights.sources(in_memory=in_memory)
        self.stage = [r for r in range(mesh.size) if mesh.at(r).pipeline == mesh.at(rank).pipeline]
        self.held = [weights.shards(r, in_memory=in_memory) for r in self.stage]
        # A tied embedding is also on the last stage, which does not export it again.
        parameters, stage = weights.parameters(in_memory=in_memory), mesh.at(rank).pipeline[0]
        here = {name for p in parameters.values() if weights.layout.stage_of(p)[0] == stage for name in p.sources}
        self.names = [name for name in self.sources if name in here and (blocks is None or find_block(name) in blocks)]

    @cached_property
    def moves(self) -> dict[str, list[BoxCopy]]:
        """For each tensor, which boxes its owner takes from which rank of the stage."""
        moves: dict[str, list[BoxCopy]] = {}
        for number, name in enumerate(self.names):
            owner = number % len(self.stage)
            box: Box = tuple((0, size) for size in self.sources[name].shape)
            target = Shard(name, self.sources[name].shape, name, (ShardBox(name, box, box),))
            moves |= plan([target], self.held, near=owner)
        return moves

    def tensors(self, local: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) that this rank exports, from its own tensors by `<chunk>/<name>`.

        A collective of the stage's ranks.
        """
        me, ranks = self.stage.index(self.rank), len(self.stage)
        for start in range(0, len(self.names), ranks):
            together = self.names[start : start + ranks]
            received = _exchange(together, self.moves, local, self.stage, me)
            if me < len(together):
                name = together[me]
                yield name, self.sources[name].write(_assemble(self.sources[name], received))


def _exchange(
    names: Sequence[str],
    moves: Mapping[str, Sequence[BoxCopy]],
    local: Mapping[str, Tensor],
    stage: Sequence[int],
    me: int,
) -> list[tuple[BoxCopy, Tensor]]:
    """Return the boxes of this rank's tensor; rank i of the stage makes the i-th of ``names``.

    Each rank sends each other one at most one message.
    """
    mine = moves[names[me]] if me < len(names) else []
    out: dict[int, list[Tensor]] = defaultdict(list)
    for owner, name in enumerate(names):
        for move in moves[name]:
            if move.rank == me and owner != me:
                out[owner].append(_box(local[move.source], move.source_box).reshape(-1))
    come: dict[int, list[BoxCopy]] = defaultdict(list)
    for move in mine:
        if move.rank != me:
            come[move.rank].append(move)
    like = next(iter(local.values()))
    buffers = {r: like.new_empty(sum(_size(m.source_box) for m in chunks)) for r, chunks in come.items()}
    operations = [dist.P2POp(dist.isend, torch.cat(chunks), stage[r]) for r, chunks in sorted(out.items())]
    operations += [dist.P2POp(dist.irecv, buffer, stage[r]) for r, buffer in sorted(buffers.items())]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    pieces = {r: iter(buffer.split([_size(m.source_box) for m in come[r]])) for r, buffer in buffers.items()}
    return [(m, _box(local[m.source], m.source_box) if m.rank == me else next(pieces[m.rank])) for m in mine]


def _assemble(source: HuggingFaceTensor, chunks: Sequence[tuple[BoxCopy, Tensor]]) -> Tensor:
    first = chunks[0][1]
    if len(chunks) == 1 and tuple(first.shape) == source.shape:
        return first  # a single rank exports its live tensors
    view = first.new_empty(source.shape)
    for move, chunk in chunks:
        target = _box(view, move.target_box)
        target.copy_(chunk.reshape(target.shape))
    return view


def _box(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(*ends) for ends in box)]


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def choose_vocabulary_multiple(config: MegatronConfig, ranks: int) -> int:
    """Return Megatron's 128 for each rank if that leaves every rank real tokens, else the number of ranks."""
    return 128 * ranks if config.vocab_size > 128 * ranks * (ranks - 1) else ranks


def collect_tensors(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the live tensors of a rank's chunks by `<chunk>/<name in the chunk>`."""
    states = enumerate(chunk.state_dict(keep_vars=True) for chunk in chunks)
    return {f"{i}/{name}": t for i, state in states for name, t in state.items() if isinstance(t, Tensor)}


# Fields that MegatronConfig and megatron-core's configuration both have, with the same name and meaning.
ALWAYS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "rotary_interleaved",
    "window_size",
)
EXPERTS = (
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
)
LATENT = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rotary_base",
)
# Fields that users must not set, and why.
MODEL, FIXED = "config.json of the model says it", "Coalign computes with a value of its own"
OWNED = {
    **dict.fromkeys((*ALWAYS, *EXPERTS, *LATENT, "moe_layer_freq", "activation_func", "rope_type"), MODEL),
    "tensor_model_parallel_size": "it is `tensor_parallel`",
    "pipeline_model_parallel_size": "it is `pipeline_parallel`",
    "virtual_pipeline_model_parallel_size": "it is `megatron.virtual_pipeline`",
    "context_parallel_size": "it is `context_parallel`",
    "expert_model_parallel_size": "it is `expert_parallel`",
    "expert_tensor_parallel_size": "it is `megatron.expert_tensor_parallel`",
    "sequence_parallel": "it is `megatron.sequence_parallel`",
    "num_layers_in_first_pipeline_stage": "it is `megatron.first_stage_layers`",
    "num_layers_in_last_pipeline_stage": "it is `megatron.last_stage_layers`",
    "deterministic_mode": "it is `deterministic`",
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_router_load_balancing_type"), "it is `router_aux_loss_coef`"),
    "moe_z_loss_coeff": "it is `router_z_loss_coef`",
    "fp8": "it is `fp8`",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "it is `compute_dtype`"),
    **dict.fromkeys(("recompute_granularity", "recompute_method"), "it is `activation_checkpointing`"),
    "recompute_num_layers": "it is `megatron.recompute_num_layers`",
    "recompute_modules": "it is `megatron.recompute_modules`",
    **dict.fromkeys(
        ("variable_seq_lengths", "calculate_per_token_loss", "perform_initialization", "use_cpu_initialization"), FIXED
    ),
}


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Degrees of parallelism. ``virtual``: chunks of layers in a pipeline stage."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1

    def mesh(self, ranks: int) -> Mesh:
        """Return the mesh of the weights, in which context-parallel ranks count as data-parallel: they have the same.

        Raises ValueError where the sizes do not divide the ranks.
        """
        together = self.tensor * self.pipeline * self.context
        if ranks % together:
            raise ValueError(
                f"{ranks} ranks do not divide by tensor_parallel × pipeline_parallel × context_parallel = {together}"
            )
        data = ranks // (self.tensor * self.pipeline)
        return Mesh(self.tensor, self.pipeline, data, self.expert, self.expert_tensor)


def read_sizes(config: ModelConfig) -> ParallelSizes:
    megatron = config.megatron
    return ParallelSizes(
        config.tensor_parallel,
        config.pipeline_parallel,
        config.context_parallel,
        config.expert_parallel,
        megatron.expert_tensor_parallel or config.tensor_parallel,
        megatron.virtual_pipeline,
    )


def check_recomputed(model: MegatronConfig, modules: Sequence[str]) -> None:
    """Raise ValueError for ``modules`` to recompute in backward that Coalign's layers do not have."""
    key = "megatron.recompute_modules has"
    if model.multi_latent_attention and "mla_up_proj" in modules:
        raise ValueError(f"{key} 'mla_up_proj', which attention over packed rows does not have")
    if model.parallel_residual != "none" and (lacking := {"layernorm", "mlp"}.intersection(modules)):
        raise ValueError(
            f"{key} {sorted(lacking)}, which layers whose attention and MLP read the same residual do not have"
        )


def partition_weights(config: ModelConfig, count: int, *, te: bool = False) -> WeightPartition:
    """Plan which rank of ``count`` has which shards of ``config.load``. ``te``: with Transformer Engine's layers.

    Raises ValueError for an unknown architecture, for one that contradicts the configuration, and for sizes that do not
    divide.
    """
    hf = read_model_config(get_directory(config))
    # The architecture names the head of the file; the configuration decides the head of this model.
    family = families.find_family(hf if config.head == "lm" else hf | {"architectures": None})
    _check_vision(config, family)
    model, sizes, megatron = family.config(hf), read_sizes(config), config.megatron
    if model.deepstack_layers and config.activation_checkpointing == "full" and not config.frozen:
        raise ValueError(
            f"activation_checkpointing is full: the first {model.deepstack_layers} layers of {config.load} add "
            "features of images, which are not computed again; use `selective`, or `module: fsdp`"
        )
    actual = {
        "swiglu": model.gated_linear_unit and model.activation_func == "silu",
        "position_embedding_type": model.position_embedding_type,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "add_bias_linear": model.add_bias_linear,
        "normalization": model.normalization,
    }
    for key, value in actual.items():
        if (wanted := getattr(megatron, key)) not in (None, value):
            raise ValueError(f"megatron.{key} is {wanted}; the model in {config.load} has {value}")
    if config.activation_checkpointing == "selective" and not config.frozen:
        check_recomputed(model, megatron.recompute_modules)
    if config.head != "lm":
        model = replace(model, share_embeddings_and_output_weights=False)
    ends = {"first": megatron.first_stage_layers, "last": megatron.last_stage_layers}
    split = split_layers(model.num_layers, sizes.pipeline, sizes.virtual, **ends)
    if (here := len(split[0][0])) < model.deepstack_layers:
        raise ValueError(
            f"pipeline_parallel {sizes.pipeline} gives the first stage {here} layers: the first "
            f"{model.deepstack_layers} add features of images (deepstack) and have to be there; use fewer stages, or "
            "megatron.first_stage_layers"
        )
    layout = MegatronLayout(model, sizes.mesh(count), split, "te" if te else "local")
    return WeightPartition(family, layout, choose_vocabulary_multiple(model, sizes.tensor), scalar=config.head != "lm")


def _check_vision(config: ModelConfig, family: Family) -> None:
    """Raise ValueError for a model that would lose its tower, and for one without a tower in a run with images."""
    if family.tower is None and config.vision is not None:
        raise ValueError(f"models of the family {family.name} read no images under `megatron` (data.images)")
    if family.tower is not None and config.vision is None:
        raise ValueError(
            f"{config.load} is a vision-language model, which `megatron` trains with images alone: set data.images, or "
            "use `module: fsdp`"
        )
