"""The settings that only models read which learn: optimizer, losses, updates, and how their training is spread."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from coalign.config.errors import Conflict
from coalign.config.schema.section import Continuable, LossConfig, Probability, Section


class OptimizerConfig(Section):
    """An optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "adafactor", "muon"] = "adamw"
    """`adamw_8bit` stores moments in 8 bits (needs bitsandbytes; one process). `adafactor` stores means of rows and
    columns; its `lr` is relative to the size of a parameter. `muon` updates the matrices of the layers, AdamW the rest;
    its steps are scaled to AdamW's, so it takes the same `lr`. `betas` and `eps` are AdamW's."""
    lr: NonNegativeFloat = 1e-6
    betas: Annotated[tuple[Probability, Probability], Field(strict=False)] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Not applied to parameters of one dimension (biases, norms)."""
    clip_grad_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """`linear` and `cosine` decay to lr * min_lr_ratio over the run; `wsd` keeps lr, and decays in the last `decay`."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of `warmup`, `decay` and the length of the run: optimizer steps, or trained tokens (then `runtime.tokens` is
    the length)."""
    warmup: NonNegativeInt = 0
    decay: NonNegativeInt = 0
    """For `wsd`: length of the linear decay at the end."""
    min_lr_ratio: Probability = 0.0

    def check(self) -> None:
        if self.decay and self.schedule != "wsd":
            raise Conflict(("decay",), f"has no effect with schedule `{self.schedule}`; use `wsd`")


class EmaConfig(Section):
    """A moving average of the weights: average = decay * average + (1 - decay) * weights, after each update."""

    decay: Probability = 0.999


class TrainerSettings(Section):
    """What only a model reads that learns."""

    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig | None = None
    """This model's own loss; None: the run's."""
    ema: EmaConfig | None = None
    """Keep a moving average of the weights, which checkpoints export as well."""
    learns_after: NonNegativeInt = 0
    """Steps of the run before this model starts to learn (a policy, while its value model warms up)."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps per batch (PPO mini-batches)."""
    epochs_per_batch: PositiveInt = 1
    activation_checkpointing: Continuable[Literal["full", "selective"] | None] = None
    """Recompute activations in backward to save memory: `full` layers, or `selective`: all but matrix products and
    attention."""
    reduction: Literal["fast", "exact"] = "fast"
    """How gradients are added. `exact`: in an order that does not depend on the number of processes, so trained weights
    are the same bit for bit for any number of them (module `fsdp`, data-parallel processes only)."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Trainers with experts: factor of the loss that balances their load (2101.03961), over all tokens of an update.
    With several micro-batches it costs a forward of its own, which counts the tokens of each expert."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Trainers with experts: factor of the loss that keeps the routers' logits small (2202.08906)."""
    export_experts: Literal["separate", "stacked"] = "separate"
    """Names of experts in exported checkpoints: one tensor for each, as most published files and engines have them, or
    one for all (`experts.gate_up_proj`), as transformers 5 has them in memory. transformers reads both."""
