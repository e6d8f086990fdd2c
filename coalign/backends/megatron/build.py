"""Builds this rank's part of a megatron-core model from a model's configuration and its Hugging Face directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from coalign.backends import pretrained
from coalign.backends.base import HEADS
from coalign.backends.hf import float8
from coalign.backends.hf.heads import LanguageModelHead
from coalign.backends.hf.rows import RankAxis, RowSharding
from coalign.backends.megatron import ranks
from coalign.backends.megatron.config import create_transformer_config
from coalign.backends.megatron.model import PackedGPT, ScalarGPT
from coalign.backends.megatron.partition import OWNED, read_sizes
from coalign.backends.megatron.training import MegatronPipeline
from coalign.backends.megatron.weights import SCORE, WeightPartition
from coalign.config.errors import suggest
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from coalign.weights import families
from coalign.weights.convert.huggingface import HuggingFaceReader

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
    if wanted and not there:
        raise ValueError("megatron.transformer_engine is true: it is not installed (transformer-engine)")
    return there and device.type != "cpu" if wanted is None else wanted


def build_pipeline(config: ModelConfig, context: Context, weights: WeightPartition, *, te: bool) -> MegatronPipeline:
    """Build this rank's chunks of the model, without their weights; the ranks have joined."""
    device, model = torch.device(context.device), weights.layout.config
    dtype = getattr(torch, config.compute_dtype or config.dtype)
    more = _compute_fields(config) | (EIGHT_BITS if config.fp8 else {})
    settings = create_transformer_config(model, read_sizes(config), dtype=dtype, te=te, **more)
    chunks = []
    for chunk in range(len(weights.layout.stages[0])):
        virtual = chunk if len(weights.layout.stages[0]) > 1 else None
        ends = {
            "first": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            "last": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        }
        module = _build_chunk(config, model, settings, vocabulary=weights.padded, chunk=virtual, te=te, **ends)
        module = module.to(device)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(settings.params_dtype)
        chunks.append(module.requires_grad_(not config.frozen))
    rows = RowSharding(
        ranks.get_context_axis(), RankAxis(), multiple=config.tensor_parallel * (float8.MULTIPLE if config.fp8 else 1)
    )
    return MegatronPipeline(
        chunks, rows, trained=not config.frozen, distributed_optimizer=config.megatron.distributed_optimizer
    )


def read_weights(config: ModelConfig, context: Context, weights: WeightPartition) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's weights, one at a time, from where ``config.load``, ``init`` and ``head_init`` say.

    Raises ValueError for weights that are missing, or too many, or misshapen.
    """
    if config.init == "random":
        state = pretrained.load(config, seed=context.seed, name=context.model, packed=False).state_dict()
        return weights.read(context.rank, state.__getitem__, in_memory=True)
    folder = Path(str(config.load))
    return weights.read(
        context.rank, _select_stored(config, weights, HuggingFaceReader(folder, pickled=False)), in_memory=False
    )


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
    config: ModelConfig, model: families.MegatronConfig, settings: TransformerConfig, **more: Any
) -> PackedGPT:
    if config.head != "lm":
        return ScalarGPT(model, settings, output=HEADS[config.head][0], **more)
    # Greedy sampling (temperature 0) has no distribution of its own; its log-probs are the model's.
    read = LanguageModelHead(temperature=config.sampling.temperature or 1.0, top=config.candidates)
    return PackedGPT(model, settings, read=read, **more)


def _compute_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of megatron-core's configuration that say how it computes."""
    own = config.megatron
    fields: dict[str, Any] = {
        "sequence_parallel": own.sequence_parallel and config.tensor_parallel > 1,
        "num_layers_in_first_pipeline_stage": own.first_stage_layers,
        "num_layers_in_last_pipeline_stage": own.last_stage_layers,
        "deterministic_mode": config.deterministic,
    }
    if config.activation_checkpointing == "full" and not config.frozen:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        fields |= {"recompute_num_layers": own.recompute_num_layers}
    elif config.activation_checkpointing == "selective" and not config.frozen:
        fields |= {"recompute_granularity": "selective", "recompute_modules": list(own.recompute_modules)}
    return fields | own.config


def check_machine(config: ModelConfig, device: torch.device) -> None:
    """Raise ValueError for a missing Transformer Engine or GPU, and for fields that megatron-core does not have."""
    te = uses_transformer_engine(config, device)
    if config.fp8:
        float8.check_device(device, "fp8")
        if not te:
            raise ValueError(
                "fp8 of Megatron's layers needs Transformer Engine (pip install 'transformer-engine[pytorch]')"
            )
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    if unknown := [name for name in config.megatron.config if name not in known]:
        close = suggest(unknown[0], known - set(OWNED))
        raise ValueError(f"megatron.config.{unknown[0]} is no field of megatron-core's TransformerConfig{close}")
