"""One model of a run: what it is, where it comes from, how it computes and learns, where it runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.base import Input, Probability, Section
from coalign.config.schema.functions import LossConfig
from coalign.config.schema.sampling import NativeConfig, SamplingConfig


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule (in optimizer steps)."""

    lr: NonNegativeFloat = 1e-6
    betas: Annotated[tuple[Probability, Probability], Field(strict=False)] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Not applied to biases and norms (parameters of one dimension)."""
    clip_grad_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    min_lr_ratio: Probability = 0.0


class ModelConfig(Section):
    """One model of the run: what it is, where it comes from, how it computes, where it runs."""

    module: str = "fsdp"
    """Backend: `fsdp`, `native`, `reward`, … or a dotted path to a Module subclass."""
    like: str | None = None
    """Take every key that is not given here from this model."""
    load: Annotated[str, Input("directory")] | None = None
    """A Hugging Face model directory."""
    init: Literal["load", "random"] = "load"
    """`random` takes only config and tokenizer from the directory and draws the weights from the seed."""
    tokenizer: Annotated[str, Input("directory")] | None = None
    """A tokenizer directory, when it is not in `load`."""
    head: Literal["lm", "value", "reward"] = "lm"
    """Language-model head; a scalar per token; a scalar per sequence (at its last token)."""
    head_init: Literal["load", "zero"] = "load"
    """`load` refuses a checkpoint without the head; `zero` starts a new one."""
    frozen: bool = False
    trust_remote_code: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the stored parameters (a trainer's master weights)."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Of matrix products; None: `dtype`."""
    num_gpu: NonNegativeInt = 0
    """Devices of the whole model; 0: it runs on CPU."""
    num_process: PositiveInt | None = None
    """Processes of the whole model; None: one per GPU, one on CPU."""
    tensor_parallel: PositiveInt = 1
    threads: PositiveInt | None = None
    """CPU threads of each process; None: `runtime.threads`."""
    max_tokens_per_micro: PositiveInt | None = 16384
    """Token budget of one forward / backward: bounds activation memory."""
    gradient_checkpointing: bool = False
    share_prefix: bool = True
    """Compute the prompt of a group once for all of its samples (exact; needs attention-only mixing of tokens)."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps a batch is cut into (PPO mini-batches)."""
    epochs_per_batch: PositiveInt = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig | None = None
    """This model's own loss; None: the run's."""
    sampling: SamplingConfig = SamplingConfig()
    native: NativeConfig = NativeConfig()
    vllm: dict[str, Any] = {}
    """Passed through to the engine."""

    @model_validator(mode="after")
    def _processes_divide(self) -> Self:
        processes = self.num_process or max(1, self.num_gpu)
        if processes % self.tensor_parallel:
            given = "num_process" if self.num_process else "num_gpu"
            raise Conflict(
                ("tensor_parallel",), f"is {self.tensor_parallel}, which does not divide {given} ({processes})"
            )
        return self
