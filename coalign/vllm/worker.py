"""What Coalign adds to vLLM's workers (``worker_extension_cls``): new weights for the live model.

vLLM reloads a model layer by layer: weights come in any order, and as soon as a layer has all of its own they are
packed into the storage that it computes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from coalign.vllm import adapters
from coalign.vllm.parcels import Parcel


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
            if adapters.adapted(name) is None:
                yield name, tensor
            else:
                self.coalign_adapters[name] = tensor.cpu().clone()

    def coalign_unpack(self, parcel: Parcel) -> None:
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
