"""The policy module of the native engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from coalign.backends import pretrained
from coalign.backends.engines.module import RolloutModule
from coalign.backends.engines.native import kernels
from coalign.backends.engines.native.engine import NativeEngine
from coalign.backends.engines.native.model import NativeModel
from coalign.config.schema import ModelConfig


class NativeModule(RolloutModule):
    """Generates with the native engine, in this process."""

    adopts = True
    engine: NativeEngine

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        _build_model(pretrained.read_config(config), config, "cpu")

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        if config.num_gpu:
            return ()
        model = _build_model(pretrained.read_config(config), config, "cpu")
        notes = [str(model.kernel)] if model.kernel else []
        if config.compute_dtype == "bfloat16" and model.dtype == torch.float32:
            notes.append(kernels.FLOAT32_INSTEAD)
        if parts := model.variant_parts:
            notes.append(f"log-probs may differ in their last bits from batch to batch: {', '.join(parts)}")
        return notes

    def build(self, architecture: PreTrainedConfig) -> NativeEngine:
        native = self.config.native
        return NativeEngine(
            _build_model(architecture, self.config, self.context.device),
            seed=self.context.seed,
            max_sequences=native.max_sequences,
            kv_tokens=native.kv_tokens,
            prefill_tokens=native.prefill_tokens,
            end_tokens=self.find_end_tokens(architecture),
            decoder=self.decoder,
            reserve=lambda size: self.arena.reserve(self.context.model, "kv", size),
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, live tensor) of all weights, to compare them with the trainer's."""
        return self.engine.model.weights()

    def tensors(self, part: str) -> Iterable[Tensor]:
        return self.engine.model.module.parameters() if part == "weights" else ()


def _build_model(architecture: PreTrainedConfig, config: ModelConfig, device: str) -> NativeModel:
    dtype = kernels.choose_compute_dtype(getattr(torch, config.compute_dtype or config.dtype), torch.device(device))
    return NativeModel(architecture, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code)
