"""`models.<name>.vllm`: which of vLLM's engine arguments a user may set, and what Coalign sets itself."""

from __future__ import annotations

from collections.abc import Iterable

from coalign.config.errors import near

OWNED = {
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
}


def check_owned(options: Iterable[str], model: str) -> None:
    """Raises ValueError for an option that is Coalign's."""
    if owned := [name for name in options if name in OWNED]:
        raise ValueError(f"models.{model}.vllm.{owned[0]} is set by Coalign: {OWNED[owned[0]]}")


def check_known(options: Iterable[str], known: Iterable[str], model: str) -> None:
    """Raises ValueError for an option that vLLM does not have. ``known``: those that it has."""
    if unknown := [name for name in options if name not in known]:
        close = near(unknown[0], sorted(each for each in known if each not in OWNED))
        raise ValueError(f"models.{model}.vllm.{unknown[0]} is no engine argument of vLLM{close}")
