"""What Coalign adds to vLLM's workers (``worker_extension_cls``): new weights for the live model.

vLLM reloads a model layer by layer: weights come in any order, and as soon as a layer has all of its own they are
packed into the storage that it computes with.

Weights for workers in other processes of this host: a parcel after the other through the same shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from coalign.backends.engines.vllm import adapters
from coalign.weights.sync.segment import Address, SharedMemorySegment, TensorEntry, align

SIZE = 64 * 2**20  # bytes of a parcel; a larger tensor has one to itself


@dataclass(frozen=True, slots=True)
class WeightParcel:
    """Some weights, as far as other processes are told of them. Valid until the next parcel is made."""

    address: Address
    entries: list[TensorEntry]

    def open(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, as views that must not be written to."""
        memory = SharedMemorySegment.open(self.address).bytes
        for entry in self.entries:
            yield entry.name, entry.tensor(memory)


class WeightOutlet:
    """The memory that parcels are made in, taken when the first one is."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.segment: SharedMemorySegment | None = None

    def parcels(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[WeightParcel]:
        """All of them, each as soon as it is full."""
        entries: list[TensorEntry] = []
        filled = 0
        for name, tensor in weights:
            if entries and filled + tensor.nbytes > self.size:
                yield WeightParcel(self.segment.address, entries)
                entries, filled = [], 0
            if self.segment is None or tensor.nbytes > self.size:
                self.size = max(self.size, tensor.nbytes)
                self.segment = SharedMemorySegment.create(self.size)
            entry = TensorEntry(name, tensor.dtype, tuple(tensor.shape), filled)
            entry.tensor(self.segment.bytes).copy_(tensor)
            entries.append(entry)
            filled += align(tensor.nbytes)
        if entries:
            yield WeightParcel(self.segment.address, entries)


class WeightLoader:
    """Mixed into vLLM's worker class, whose own names it must not meet."""

    vllm_config: Any
    model_runner: Any
    coalign_adapters: dict[str, Tensor]  # that came with the weights under way

    def coalign_setup(self, eager: bool) -> dict[str, list[str]]:
        """The layers that vLLM computes as one: its name for them -> theirs in Hugging Face's model. ``eager``: nothing
        is compiled in this process (see VLLMEngine.step)."""
        if eager:
            torch.compiler.set_stance("force_eager")
        return dict(getattr(self.model_runner.get_model(), "packed_modules_mapping", {}))

    def coalign_dtype(self) -> torch.dtype | None:
        """Of all weights, if it is one; without the scales of attention, buffers with a leading underscore."""
        state = self.model_runner.get_model().state_dict()
        weights = [tensor for name, tensor in state.items() if not name.rpartition(".")[2].startswith("_")]
        kinds = {tensor.dtype for tensor in weights if tensor.is_floating_point()}
        return kinds.pop() if len(kinds) == 1 else None

    @torch.no_grad()
    def coalign_begin(self) -> None:
        """Weights follow, and the adapters, if there are any."""
        self.coalign_adapters = {}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    @torch.no_grad()
    def coalign_take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Some of them, by their Hugging Face names."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(self.coalign_beneath(weights))

    def coalign_beneath(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights without the adapters, which are put aside."""
        for name, tensor in weights:
            if adapters.adapted_weight(name) is None:
                yield name, tensor
            else:
                self.coalign_adapters[name] = tensor.cpu().clone()

    def coalign_unpack(self, parcel: WeightParcel) -> None:
        """As ``coalign_take``, for workers in other processes. A layer keeps what it has until it is complete, and the
        next parcel comes in the same memory: so the tensors are copied."""
        self.coalign_take([(name, tensor.clone()) for name, tensor in parcel.open()])

    @torch.no_grad()
    def coalign_end(self, whole: bool) -> None:
        """That was all of them, or something went wrong."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_shared(model)
            if whole and (config := self.vllm_config.lora_config) is not None:
                adapters.install(model, config, self.coalign_adapters)
        self.coalign_adapters = {}


def _repack_shared(model: nn.Module) -> None:
    """A layer whose weight is another one's (tied embeddings) got its new values without being told: let it derive
    again what it derives from them, such as the packed copy that CPUs compute logits with."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for sharing in owners.values():
        for module in sharing if len(sharing) > 1 else ():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)
