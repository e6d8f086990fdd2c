"""Builds this rank's chunks of a megatron-core model: process groups, configuration, modules, weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers import PreTrainedModel

from coalign.backends import lora as adapters
from coalign.backends import pretrained, process_group
from coalign.backends.base import HEADS
from coalign.backends.hf import linear_layers
from coalign.backends.hf.heads import LanguageModelHead
from coalign.backends.hf.row_sharding import RankAxis, RowSharding
from coalign.config.errors import suggest
from coalign.config.schema import ModelConfig
from coalign.hub import find_directory
from coalign.memory import move_module
from coalign.roles import Context
from coalign_megatron import families
from coalign_megatron.backend import lora
from coalign_megatron.backend.attention import compute_attention_factor
from coalign_megatron.backend.model import PackedGPT, ScalarGPT
from coalign_megatron.backend.partition import (
    ALWAYS,
    EXPERTS,
    LATENT,
    OWNED,
    SCORE,
    ParallelSizes,
    WeightPartition,
    read_sizes,
)
from coalign_megatron.backend.training import MegatronPipeline
from coalign_megatron.backend.vision import PipelineVision
from coalign_megatron.convert.huggingface import HuggingFaceReader
from coalign_megatron.families import MegatronConfig

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}
# Fused kernels that layers without Transformer Engine do not have.
UNFUSED = dict.fromkeys(
    (
        "persist_layer_norm",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
    ),
    False,
)


def create_transformer_config(
    model: MegatronConfig, sizes: ParallelSizes, *, dtype: torch.dtype = torch.float32, te: bool = False, **more: Any
) -> TransformerConfig:
    """Create the configuration.

    te: the layers are Transformer Engine's. more: further fields, by megatron-core's names.
    """
    fields: dict[str, Any] = {name: getattr(model, name) for name in ALWAYS}
    if model.num_moe_experts:
        fields |= {name: getattr(model, name) for name in EXPERTS}
        # A list makes checkpoints store each layer by itself; 1 means that all layers have experts.
        fields["moe_layer_freq"] = list(model.moe_layer_freq) if 0 in model.moe_layer_freq else 1
        # No auxiliary loss of pre-training, unless the user sets one.
        fields |= {"moe_router_load_balancing_type": "none", "moe_router_bias_update_rate": 0.0}
        fields |= {"moe_router_dtype": "fp32", "moe_grouped_gemm": te}
        fields["expert_model_parallel_size"], fields["expert_tensor_parallel_size"] = sizes.expert, sizes.expert_tensor
    if model.multi_latent_attention:
        fields |= {name: getattr(model, name) for name in LATENT} | {"rope_type": "rope"}
        if (scaling := model.rope_scaling) is not None:  # also scales the scores
            fields |= {"rotary_scaling_factor": scaling.factor, "mscale_all_dim": scaling.mscale_all_dim or 0.0}
    fields |= {
        "activation_func": ACTIVATIONS[model.activation_func],
        "hidden_dropout": 0.0,  # megatron-core's default is 0.1
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual if sizes.virtual > 1 else None,
        "context_parallel_size": sizes.context,
        "sequence_parallel": sizes.tensor > 1,
        "variable_seq_lengths": True,  # rows are as long as their sequences
        "moe_token_dispatcher_type": "alltoall",  # needed for variable lengths
        "batch_p2p_sync": False,
        # With virtual stages, two ranks are each other's next and previous: batched messages would be mixed up.
        "overlap_p2p_comm": sizes.virtual > 1,
        "batch_p2p_comm": sizes.virtual == 1,
        "calculate_per_token_loss": True,  # gradients are sums: the loss has global denominators
        # Weights come from Hugging Face tensors, but only initialised parameters get their partition attributes.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _initialise_nothing),
    }
    if not te:
        fields |= UNFUSED
    config_class = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    config = config_class(**fields | more)
    if (factor := compute_attention_factor(model.rope_scaling)) != 1.0:
        # megatron-core reads these attributes, which are no fields, and computes 1 + mscale · ln(scaling factor) / 10.
        vars(config).update(yarn_rotary_scaling_factor=math.e, yarn_mscale=10 * (factor - 1), yarn_mscale_all_dim=0.0)
    return config


def _initialise_nothing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_joined: ParallelSizes | None = None  # the partition of all models of this process
_models = 0  # models that use the groups
_owns_process_group = False  # whether `leave_ranks` ends torch's process group


def join_ranks(sizes: ParallelSizes, context: Context) -> None:
    """Join the other ranks. All models of a process share megatron-core's groups, which are global to it.

    Raises ValueError for a second model of the process with another partition.
    """
    global _joined, _models, _owns_process_group
    if _joined not in (None, sizes):
        raise ValueError(
            f"megatron-core cuts all models of a process alike: {_joined} before, {sizes} now; give the models "
            "processes of their own (no common `runtime.colocation` group), or the same sizes"
        )
    if _joined is None:
        if not dist.is_initialized():
            process_group.join_process_group(context, host=True)
            _owns_process_group = True
        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            sizes.virtual if sizes.virtual > 1 else None,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            distributed_timeout_minutes=int(process_group.COLLECTIVE_TIMEOUT.total_seconds() // 60),
        )
        # Dropout differs between ranks with different rows or shards of a layer, and is equal elsewhere.
        tensor_parallel.model_parallel_cuda_manual_seed(context.seed)
        _joined = sizes
    _models += 1


def leave_ranks() -> None:
    """Leave; the last model of the process destroys the groups."""
    global _joined, _models, _owns_process_group
    _models -= 1
    if _models == 0:
        parallel_state.destroy_model_parallel()
        if _owns_process_group:
            dist.destroy_process_group()
        _joined, _owns_process_group = None, False


def get_data_group() -> dist.ProcessGroup:
    """Return the group of ranks that differ from this one only in their rows."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())


# Transformer Engine's hybrid recipe (2209.05433): E4M3 forward, E5M2 for gradients of outputs, factors scaled by the
# largest entries of the last calls.
EIGHT_BITS = {
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
}


def uses_transformer_engine(config: ModelConfig, device: torch.device) -> bool:
    """Whether the layers are Transformer Engine's. Raises ValueError if they are set and it is not installed."""
    there, wanted = find_spec("transformer_engine") is not None, config.megatron.transformer_engine
    if wanted is None and pretrained.has_adapters(config):  # adapters read what the norm that it fuses leaves
        return False
    if wanted and not there:
        raise ValueError("megatron.transformer_engine is true: it is not installed (transformer-engine)")
    return there and device.type != "cpu" if wanted is None else wanted


def build_pipeline(
    config: ModelConfig, context: Context, weights: WeightPartition, carrier: PreTrainedModel | None, *, te: bool
) -> MegatronPipeline:
    """Build this rank's chunks of the model, without their weights, with the adapters of ``carrier``.

    The ranks have joined.
    """
    device, model = torch.device(context.device), weights.layout.config
    dtype = getattr(torch, config.compute_dtype or config.dtype)
    more = _compute_fields(config) | (EIGHT_BITS if config.fp8 else {})
    settings = create_transformer_config(model, read_sizes(config), dtype=dtype, te=te, **more)
    chunks, vision = [], None
    if config.vision is not None:
        vision = PipelineVision(config, context, first=parallel_state.is_pipeline_first_stage())
    for chunk in range(len(weights.layout.stages[0])):
        virtual = chunk if len(weights.layout.stages[0]) > 1 else None
        ends = {
            "first": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            "last": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        }
        more = {"vocabulary": weights.padded, "chunk": virtual, "te": te, "vision": vision, **ends}
        module = _build_chunk(config, context, model, settings, **more)
        move_module(module, device)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(settings.params_dtype)
        chunks.append(module.requires_grad_(not config.frozen and carrier is None))
        if vision is not None:
            vision.freeze()
        if carrier is not None and config.head != "lm" and ends["last"]:  # trained beside the adapters, as they are
            module.output_layer.float().requires_grad_(not config.frozen)
    adapted = [] if carrier is None else lora.attach(chunks, weights, carrier, context.rank, frozen=config.frozen)
    rows = RowSharding(
        RankAxis.of(cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())),
        RankAxis(),
        multiple=config.tensor_parallel * (linear_layers.FLOAT8_MULTIPLE if config.fp8 else 1),
    )
    distributed = config.megatron.distributed_optimizer
    return MegatronPipeline(chunks, rows, adapted, trained=not config.frozen, distributed_optimizer=distributed)


def read_weights(config: ModelConfig, context: Context, weights: WeightPartition) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's weights, one at a time, from where ``config.load``, ``init`` and ``head_init`` say.

    Raises ValueError for weights that are missing, or too many, or misshapen.
    """
    if config.init == "random":
        state = pretrained.load(config, seed=context.seed, name=context.model, packed=False).state_dict()
        return weights.read(context.rank, state.__getitem__, in_memory=True)
    folder = pretrained.get_directory(config)
    return weights.read(
        context.rank, _select_stored(config, weights, HuggingFaceReader(folder, pickled=False)), in_memory=False
    )


def load_head(chunks: Sequence[torch.nn.Module], name: str) -> None:
    """Read the head that was trained beside adapters from their directory, where the last of ``chunks`` has one."""
    _, tensors = adapters.read_adapter(find_directory(name))
    if (head := lora.find_head(chunks)) is not None:
        head.data.copy_(tensors[adapters.PREFIX + SCORE])


def _select_stored(config: ModelConfig, weights: WeightPartition, reader: HuggingFaceReader) -> Callable[[str], Tensor]:
    model, names = weights.layout.config, set(reader.names)
    if not weights.scalar:
        stored = weights.family.stored_names(model, names)
        return lambda name: reader.tensor(stored[name])
    # The body is stored as that of a tied model, which has no head of its own.
    stored = weights.family.stored_names(replace(model, share_embeddings_and_output_weights=True), names - {SCORE})
    if config.head_init == "load" and SCORE not in names:
        advice = "it was not trained as one" if config.frozen else "head_init: zero starts a new head"
        raise ValueError(f"{config.load} lacks ['{SCORE}'] for a model with head '{config.head}'; {advice}")

    def tensor(name: str) -> Tensor:
        if name != SCORE:
            return reader.tensor(stored[name])
        return torch.zeros(1, model.hidden_size) if config.head_init == "zero" else reader.tensor(SCORE)

    return tensor


def _build_chunk(
    config: ModelConfig, context: Context, model: families.MegatronConfig, settings: TransformerConfig, **more: Any
) -> PackedGPT:
    if config.head != "lm":
        return ScalarGPT(model, settings, output=HEADS[config.head][0], **more)
    # Greedy sampling (temperature 0) has no distribution of its own; its log-probs are the model's.
    read = LanguageModelHead(temperature=config.sampling.temperature or 1.0, top=config.candidates)
    read.forbid(pretrained.list_forbidden_ids(config, context, model.vocab_size), model.vocab_size)
    return PackedGPT(model, settings, read=read, **more)


def _compute_fields(config: ModelConfig) -> dict[str, Any]:
    settings = config.megatron
    fields: dict[str, Any] = {
        "sequence_parallel": settings.sequence_parallel and config.tensor_parallel > 1,
        "num_layers_in_first_pipeline_stage": settings.first_stage_layers,
        "num_layers_in_last_pipeline_stage": settings.last_stage_layers,
        "deterministic_mode": config.deterministic,
    }
    if config.activation_checkpointing == "full" and not config.frozen:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        fields |= {"recompute_num_layers": settings.recompute_num_layers}
    elif config.activation_checkpointing == "selective" and not config.frozen:
        fields |= {"recompute_granularity": "selective", "recompute_modules": list(settings.recompute_modules)}
    return fields | settings.config


def check_machine(config: ModelConfig, device: torch.device) -> None:
    """Raise ValueError for a missing Transformer Engine or GPU, and for fields that megatron-core does not have."""
    te = uses_transformer_engine(config, device)
    if config.fp8:
        linear_layers.check_float8_device(device, "fp8")
        if not te:
            raise ValueError(
                "fp8 of Megatron's layers needs Transformer Engine (pip install 'transformer-engine[pytorch]')"
            )
    field_names = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    if unknown := [name for name in config.megatron.config if name not in field_names]:
        close = suggest(unknown[0], field_names - set(OWNED))
        raise ValueError(f"megatron.config.{unknown[0]} is no field of megatron-core's TransformerConfig{close}")
