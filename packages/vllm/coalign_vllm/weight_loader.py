"""Loads new weights into vLLM's live model: an extension of its workers (``worker_extension_cls``).

vLLM reloads a model layer by layer. Weights come in any order, and as soon as a layer is complete it is packed into the
storage that it computes with. Workers in other processes of this host get the weights in parcels, one after the other,
through the same shared memory.

LoRA adapters arrive with the weights, by their names in peft's files. vLLM's own LoRA layers compute with them. The
scaling is part of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from coalign.backends import lora
from coalign.weights.sync.segment import Address, SharedMemorySegment, TensorEntry, pack

PARCEL_SIZE = 64 * 2**20  # bytes of a parcel; a larger tensor gets its own


@dataclass(frozen=True, slots=True)
class _WeightParcel:
    """Describes some weights in shared memory to other processes. Valid until the next parcel is made."""

    address: Address
    entries: list[TensorEntry]

    def open(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, as views that must not be written to."""
        memory = SharedMemorySegment.open(self.address).bytes
        for entry in self.entries:
            yield entry.name, entry.tensor(memory)


class WeightOutlet:
    """Owns the shared memory of parcels, allocated with the first one."""

    def __init__(self, size: int = PARCEL_SIZE) -> None:
        self.size = size
        self.segment: SharedMemorySegment | None = None

    def parcels(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[_WeightParcel]:
        """Yield parcels with all of the weights, each as soon as it is full."""
        for bucket in pack(weights, self.size):
            entries = [entry for entry, _ in bucket]
            size = entries[-1].offset + entries[-1].size
            if self.segment is None or size > len(self.segment.bytes):
                self.segment = SharedMemorySegment.create(max(self.size, size))
            for entry, tensor in bucket:
                entry.tensor(self.segment.bytes).copy_(tensor)
            yield _WeightParcel(self.segment.address, entries)


class WeightLoader:
    """Is mixed into vLLM's worker class; the prefix keeps its methods from clashing with vLLM's."""

    vllm_config: VllmConfig
    model_runner: Any
    coalign_adapters: dict[str, Tensor]  # those of the load in progress
    coalign_kernels: list[tuple[Any, Any]]  # (method, kernel) of layers with experts, taken out during the load

    def coalign_setup(self, eager: bool) -> dict[str, list[str]]:
        """Return the layers that vLLM computes as one: its name -> their names in Hugging Face's model. ``eager``:
        compile nothing in this process (see VLLMEngine.step)."""
        if eager:
            torch.compiler.set_stance("force_eager")
        return dict(getattr(self.model_runner.get_model(), "packed_modules_mapping", {}))

    def coalign_dtype(self) -> torch.dtype | None:
        """Return the dtype of all weights, if there is one; attention scales (`_…` buffers) do not count."""
        state = self.model_runner.get_model().state_dict()
        weights = [tensor for name, tensor in state.items() if not name.rpartition(".")[2].startswith("_")]
        dtypes = {tensor.dtype for tensor in weights if tensor.is_floating_point()}
        return dtypes.pop() if len(dtypes) == 1 else None

    @torch.no_grad()
    def coalign_begin(self) -> None:
        """Prepare for weights and adapters."""
        self.coalign_adapters = {}
        model = self.model_runner.get_model()
        self.coalign_kernels = _take_kernels(model) if current_platform.is_cpu() else []
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    @torch.no_grad()
    def coalign_take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some weights by their Hugging Face names."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(self.coalign_without_adapters(weights))

    def coalign_without_adapters(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; keep the adapters for the end of the load."""
        for name, tensor in weights:
            if lora.INFIX not in name:
                yield name, tensor
            else:
                self.coalign_adapters[name] = tensor.cpu().clone()

    def coalign_unpack(self, parcel: _WeightParcel) -> None:
        """Load a parcel, in a worker of another process. The tensors are copied: a layer keeps them until it is
        complete, and the next parcel uses the same memory."""
        self.coalign_take([(name, tensor.clone()) for name, tensor in parcel.open()])

    @torch.no_grad()
    def coalign_end(self, complete: bool) -> None:
        """Finish the load; ``complete`` is False if it failed."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            for method, kernel in self.coalign_kernels:  # layers whose experts were not loaded keep theirs
                method.moe_kernel = method.moe_kernel or kernel
            _repack_shared(model)
            if complete and (config := self.vllm_config.lora_config) is not None:
                _install_adapters(model, config, self.coalign_adapters)
        self.coalign_adapters = {}


def _take_kernels(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return (method, its kernel) of all layers with experts, and leave the methods without one. vLLM 0.32.0 packs
    experts for its kernels on CPUs only when it makes the kernel: with one there, it would compute with new weights
    that are not packed, and nothing would tell."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels


def _repack_shared(model: nn.Module) -> None:
    """Let layers that share a weight (tied embeddings) derive again what depends on it. Only one of them was reloaded.
    The other may have, for example, a packed copy that CPUs compute logits with."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for sharing in owners.values():
        for module in sharing if len(sharing) > 1 else ():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)


ADAPTER_ID = 1
# vLLM reads the path only of an adapter that it does not have.
ADAPTER_REQUEST = LoRARequest("coalign", ADAPTER_ID, "in memory")


def adapter_capacity(rank: int, model: str) -> int:
    """Return the smallest rank >= ``rank`` for which vLLM can reserve memory. Raises ValueError if there is none."""
    if sizes := [size for size in get_args(MaxLoRARanks) if size >= rank]:
        return min(sizes)
    largest = max(get_args(MaxLoRARanks))
    raise ValueError(
        f"sync.adapters is `apart`, and vLLM ({model}) takes adapters of a rank up to {largest}; the trainer's "
        f"`lora.rank` is {rank}: use `merged`, which is the default"
    )


def check_adapters(tensors: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size], rank: int) -> None:
    """Raise ValueError for adapters (their shapes by name) that are incomplete or do not fit these weights. shapes:
    [out, in] of the weights. rank: that of every adapter."""
    for name, shape in tensors.items():
        layer, _, factor = name.partition(lora.INFIX)
        weight = shapes.get(f"{layer.removeprefix(lora.PREFIX)}.weight")
        if weight is None or factor not in ("A.weight", "B.weight"):
            raise ValueError(f"the weights do not fit: '{name}' is no adapter of a weight of the model")
        needed = (rank, weight[1]) if factor == "A.weight" else (weight[0], rank)
        if tuple(shape) != needed:
            raise ValueError(f"weight '{name}' has shape {list(shape)}; the model needs {list(needed)}")
        sibling = f"{layer}{lora.INFIX}{'B' if factor == 'A.weight' else 'A'}.weight"
        if sibling not in tensors:
            raise ValueError(f"the weights do not fit: missing ['{sibling}'], the other half of '{name}'")


def _install_adapters(model: Any, config: LoRAConfig, tensors: Mapping[str, Tensor]) -> None:
    """Compute with these adapters from now on, unfinished requests included; without tensors, with none. ``model``:
    vLLM's, with its LoRA layers. Raises ValueError for an adapter of a layer without LoRA in vLLM."""
    manager = model.lora_manager
    if tensors:
        adapter = _read_adapter(model, config, tensors)
    else:
        adapter = manager.create_dummy_lora(ADAPTER_ID, 1, model.embedding_modules)
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)


def _read_adapter(model: Any, config: LoRAConfig, tensors: Mapping[str, Tensor]) -> LoRAModel:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
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
