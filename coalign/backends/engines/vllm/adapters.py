"""Loads LoRA adapters into vLLM's own LoRA layers, from tensors that arrive with the weights.

Their names are those of peft's files. The scaling is part of B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast, get_args

import torch
from torch import Tensor
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

PREFIX, PART = "base_model.model.", ".lora_"
ID = 1
REQUEST = LoRARequest("coalign", ID, "in memory")  # vLLM reads the path of an adapter that it does not have


def adapter_capacity(rank: int, model: str) -> int:
    """Return the smallest rank >= ``rank`` for which vLLM can reserve memory. Raises ValueError if there is none."""
    if sizes := [size for size in get_args(MaxLoRARanks) if size >= rank]:
        return min(sizes)
    largest = max(get_args(MaxLoRARanks))
    raise ValueError(
        f"sync.adapters is `apart`, and vLLM ({model}) takes adapters of a rank up to {largest}; the trainer's "
        f"`lora.rank` is {rank}: use `merged`, which is the default"
    )


def adapted_weight(name: str) -> str | None:
    """Return the weight whose adapter a tensor is part of; None for a tensor that is no adapter."""
    layer, part, _ = name.partition(PART)
    return f"{layer.removeprefix(PREFIX)}.weight" if part else None


def check_adapters(tensors: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size], rank: int) -> None:
    """Raise ValueError for adapters (their shapes by name) that are incomplete or do not fit these weights.

    shapes: [out, in] of the weights. rank: of every adapter.
    """
    for name, shape in tensors.items():
        layer, _, factor = name.partition(PART)
        weight = shapes.get(f"{layer.removeprefix(PREFIX)}.weight")
        if weight is None or factor not in ("A.weight", "B.weight"):
            raise ValueError(f"the weights do not fit: '{name}' is no adapter of a weight of the model")
        needed = (rank, weight[1]) if factor == "A.weight" else (weight[0], rank)
        if tuple(shape) != needed:
            raise ValueError(f"weight '{name}' has shape {list(shape)}; the model needs {list(needed)}")
        other = f"{layer}{PART}{'B' if factor == 'A.weight' else 'A'}.weight"
        if other not in tensors:
            raise ValueError(f"the weights do not fit: missing ['{other}'], the other half of '{name}'")


class AdaptedModel(Protocol):
    """vLLM's model with its LoRA layers, as far as it is used here."""

    lora_manager: Any
    embedding_modules: dict[str, str]


def install_adapters(model: AdaptedModel, config: LoRAConfig, tensors: Mapping[str, Tensor]) -> None:
    """Compute with these adapters from now on, unfinished requests included; without tensors, with none.

    ``model``: vLLM's, with its LoRA layers. Raises ValueError for an adapter of a layer without LoRA in vLLM.
    """
    manager = model.lora_manager
    adapter = _read(model, config, tensors) if tensors else manager.create_dummy_lora(ID, 1, model.embedding_modules)
    manager.remove_adapter(ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ID)


def _read(model: AdaptedModel, config: LoRAConfig, tensors: Mapping[str, Tensor]) -> LoRAModel:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ID,
        dict(tensors),
        PEFTHelper(r=config.max_lora_rank, lora_alpha=config.max_lora_rank, target_modules=[]),
        device="cpu",
        dtype=cast(torch.dtype, config.lora_dtype),
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    manager = model.lora_manager
    # vLLM computes some layers as one; adapters go by the names of the separate ones.
    layers = {layer for name in manager.modules for layer in manager.packed_modules.get(name, [name])}
    if strange := sorted(adapter.loras.keys() - layers):
        raise ValueError(
            f"vLLM has no LoRA for {strange[:3]}{' …' * (len(strange) > 3)} of {type(model).__name__}; use "
            "`sync.adapters: merged`, or leave them out (models.*.lora.target)"
        )
    return adapter
