"""Adapters of low rank that arrive beside the weights, for vLLM's own LoRA layers: from tensors, without files.

Their names are those of peft's files. The scaling is part of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

PREFIX, PART = "base_model.model.", ".lora_"
ID = 1
REQUEST = LoRARequest("coalign", ID, "in memory")  # vLLM reads the path of an adapter that it does not have


def adapter_capacity(rank: int, model: str) -> int:
    """The rank that vLLM keeps room for. ValueError if ``rank`` is above all of them."""
    if sizes := [size for size in get_args(MaxLoRARanks) if size >= rank]:
        return min(sizes)
    largest = max(get_args(MaxLoRARanks))
    raise ValueError(
        f"sync.adapters is `apart`, and vLLM ({model}) takes adapters of a rank up to {largest}; the trainer's "
        f"`lora.rank` is {rank}: use `merged`, which is the default"
    )


def adapted_weight(name: str) -> str | None:
    """The weight whose adapter a tensor is part of; None if it is none."""
    layer, part, _ = name.partition(PART)
    return f"{layer.removeprefix(PREFIX)}.weight" if part else None


def check(tensors: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size], rank: int) -> None:
    """Raises ValueError for adapters (the shapes of their parts by name) that are not whole, or not of these weights.
    ``shapes``: [out, in] of the weights. ``rank``: of each."""
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


def install(model: Any, config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Compute with these adapters from now on, requests under way included; with none, as without.

    model: of vLLM, with its LoRA layers; config: vLLM's LoRAConfig. Raises ValueError for an adapter of a layer that
    vLLM has no LoRA for.
    """
    manager = model.lora_manager
    made = _made(model, config, tensors) if tensors else manager.create_dummy_lora(ID, 1, model.embedding_modules)
    manager.remove_adapter(ID)
    manager.add_adapter(made)
    manager.activate_adapter(ID)


def _made(model: Any, config: Any, tensors: Mapping[str, Tensor]) -> LoRAModel:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    made = LoRAModel.from_lora_tensors(
        ID,
        dict(tensors),
        PEFTHelper(r=config.max_lora_rank, lora_alpha=config.max_lora_rank, target_modules=[]),
        device="cpu",
        dtype=config.lora_dtype,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    if strange := sorted(made.loras.keys() - set(_layers(model.lora_manager))):
        raise ValueError(
            f"vLLM has no LoRA for {strange[:3]}{' …' * (len(strange) > 3)} of {type(model).__name__}; use "
            "`sync.adapters: merged`, or leave them out (models.*.lora.target)"
        )
    return made


def _layers(manager: Any) -> Iterable[str]:
    """The layers that adapters can be of, by the names of before vLLM computes some of them as one."""
    for name in manager.modules:
        yield from manager.packed_modules.get(name, [name])
