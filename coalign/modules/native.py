"""The embedded engine as a model of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from coalign.modules.generating import RolloutModule
from coalign.native.engine import NativeEngine
from coalign.native.model import Model


class NativeModule(RolloutModule):
    """Generates with coalign.native, in this process."""

    adopts = True
    engine: NativeEngine

    def build(self, architecture: PreTrainedConfig) -> NativeEngine:
        config, native = self.config, self.config.native
        model = Model(
            architecture,
            dtype=getattr(torch, config.compute_dtype or config.dtype),
            device=self.context.device,
            trust_remote_code=config.trust_remote_code,
        )
        return NativeEngine(
            model,
            seed=self.context.seed,
            max_sequences=native.max_sequences,
            kv_tokens=native.kv_tokens,
            prefill_tokens=native.prefill_tokens,
            end_tokens=self.end_tokens(architecture),
            decoder=self.decoder,
            reserve=lambda size: self.arena.reserve(self.context.model, "kv", size),
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, live tensor) of all weights that it computes with, to compare them with the trainer's."""
        return self.engine.model.weights()

    def tensors(self, part: str) -> Iterable[Tensor]:
        return self.engine.model.module.parameters() if part == "weights" else ()
