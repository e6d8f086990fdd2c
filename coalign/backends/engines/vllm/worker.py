"""Loads new weights into vLLM's live model: an extension of its workers (``worker_extension_cls``).

vLLM reloads a model layer by layer. Weights come in any order, and as soon as a layer is complete it is packed into the
storage that it computes with. Workers in other processes of this host get the weights in parcels, one after the other,
through the same shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from coalign.backends.engines.vllm import adapters
from coalign.weights.sync.segment import Address, SharedMemorySegment, TensorEntry, align

SIZE = 64 * 2**20  # bytes of a parcel; a larger tensor gets its own


@dataclass(frozen=True, slots=True)
class WeightParcel:
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

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.segment: SharedMemorySegment | None = None

    def parcels(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[WeightParcel]:
        """Yield parcels with all of the weights, each as soon as it is full."""
        entries: list[TensorEntry] = []
        filled = 0
        for name, tensor in weights:
            segment = self.segment
            if entries and segment is not None and filled + tensor.nbytes > self.size:
                yield WeightParcel(segment.address, entries)
                entries, filled = [], 0
            if segment is None or tensor.nbytes > self.size:
                self.size = max(self.size, tensor.nbytes)
                segment = self.segment = SharedMemorySegment.create(self.size)
            entry = TensorEntry(name, tensor.dtype, tuple(tensor.shape), filled)
            entry.tensor(segment.bytes).copy_(tensor)
            entries.append(entry)
            filled += align(tensor.nbytes)
        if entries and self.segment is not None:
            yield WeightParcel(self.segment.address, entries)


class WeightLoader:
    """Is mixed into vLLM's worker class; the prefix keeps its methods from clashing with vLLM's."""

    vllm_config: VllmConfig
    model_runner: Any
    coalign_adapters: dict[str, Tensor]  # those of the load in progress

    def coalign_setup(self, eager: bool) -> dict[str, list[str]]:
        """Return the layers that vLLM computes as one: its name -> their names in Hugging Face's model.

        ``eager``: compile nothing in this process (see VLLMEngine.step).
        """
        if eager:
            torch.compiler.set_stance("force_eager")
        return dict(getattr(self.model_runner.get_model(), "packed_modules_mapping", {}))

    def coalign_dtype(self) -> torch.dtype | None:
        """Return the dtype of all weights, if there is one; attention scales (`_…` buffers) do not count."""
        state = self.model_runner.get_model().state_dict()
        weights = [tensor for name, tensor in state.items() if not name.rpartition(".")[2].startswith("_")]
        kinds = {tensor.dtype for tensor in weights if tensor.is_floating_point()}
        return kinds.pop() if len(kinds) == 1 else None

    @torch.no_grad()
    def coalign_begin(self) -> None:
        """Prepare for weights and adapters."""
        self.coalign_adapters = {}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    @torch.no_grad()
    def coalign_take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some weights by their Hugging Face names."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(self.coalign_without_adapters(weights))

    def coalign_without_adapters(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; keep the adapters for the end of the load."""
        for name, tensor in weights:
            if adapters.adapted_weight(name) is None:
                yield name, tensor
            else:
                self.coalign_adapters[name] = tensor.cpu().clone()

    def coalign_unpack(self, parcel: WeightParcel) -> None:
        """Load a parcel, in a worker of another process.

        The tensors are copied: a layer keeps them until it is complete, and the next parcel uses the same memory.
        """
        self.coalign_take([(name, tensor.clone()) for name, tensor in parcel.open()])

    @torch.no_grad()
    def coalign_end(self, complete: bool) -> None:
        """Finish the load; ``complete`` is False if it failed."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_shared(model)
            if complete and (config := self.vllm_config.lora_config) is not None:
                adapters.install_adapters(model, config, self.coalign_adapters)
        self.coalign_adapters = {}


def _repack_shared(model: nn.Module) -> None:
    """Let layers that share a weight (tied embeddings) derive again what depends on it.

    Only one of them was reloaded. The other may have, for example, a packed copy that CPUs compute logits with.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for sharing in owners.values():
        for module in sharing if len(sharing) > 1 else ():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)
