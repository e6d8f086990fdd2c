"""Keys of other libraries' configurations and what they are called here, for the message about an unknown key.

The commonest only: TRL's arguments (those of transformers' TrainingArguments among them), and verl's by their paths.
Keys that Coalign has renamed are here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coalign.config.errors import Key

_LR = "models.trainer.optimizer.lr"
_NEW_TOKENS = "models.policy.sampling.max_new_tokens"

TRL = {
    "model_name_or_path": "models.NAME.load",
    "output_dir": "output",
    "dataset_name": "data.train",
    "train_dataset": "data.train",
    "eval_dataset": "data.eval",
    "learning_rate": _LR,
    "lr_scheduler_type": "models.trainer.optimizer.schedule",
    "warmup_steps": "models.trainer.optimizer.warmup",
    "weight_decay": "models.trainer.optimizer.weight_decay",
    "max_grad_norm": "models.trainer.optimizer.clip_grad_norm",
    "num_train_epochs": "runtime.epochs",
    "max_steps": "runtime.steps",
    "per_device_train_batch_size": "runtime.prompts_per_step (rows of a step on all devices; micro-batches follow from "
    "models.trainer.max_tokens_per_micro)",
    "gradient_accumulation_steps": "models.trainer.max_tokens_per_micro (micro-batches follow from it)",
    "gradient_checkpointing": "models.trainer.activation_checkpointing",
    "bf16": "models.trainer.compute_dtype: bfloat16",
    "logging_steps": "not needed (every step is logged)",
    "save_steps": "runtime.save_every",
    "eval_steps": "runtime.eval_every",
    "report_to": "runtime.trackers",
    "num_generations": "runtime.samples_per_prompt",
    "max_completion_length": _NEW_TOKENS,
    "max_prompt_length": "data.max_prompt_tokens",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "temperature": "models.policy.sampling.temperature",
    "beta": "loss.beta (DPO and its relatives), loss.kl_coef (GRPO) or kl.coef (PPO)",
    "epsilon": "loss.clip_low and loss.clip_high",
    "loss_type": "loss.fn",
    "reward_funcs": "reward",
    "use_vllm": "models.policy.module: vllm",
    "use_peft": "models.trainer.lora",
    "lora_r": "models.trainer.lora.rank",
    "lora_alpha": "models.trainer.lora.alpha",
}
VERL = {
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "runtime.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": _NEW_TOKENS,
    "actor_rollout_ref.model.path": "models.policy.load",
    "actor_rollout_ref.actor.optim.lr": _LR,
    "actor_rollout_ref.actor.ppo_mini_batch_size": "models.trainer.updates_per_batch (how many of them a batch makes)",
    "actor_rollout_ref.actor.ppo_epochs": "models.trainer.epochs_per_batch",
    "actor_rollout_ref.actor.clip_ratio": "loss.clip_low and loss.clip_high",
    "actor_rollout_ref.actor.kl_loss_coef": "loss.kl_coef",
    "actor_rollout_ref.actor.loss_agg_mode": "loss.aggregation",
    "actor_rollout_ref.rollout.n": "runtime.samples_per_prompt",
    "actor_rollout_ref.rollout.name": "models.policy.module",
    "actor_rollout_ref.rollout.temperature": "models.policy.sampling.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "models.policy.tensor_parallel",
    "actor_rollout_ref": "models.policy, models.trainer, models.reference and rollout",
    "critic.model.path": "models.value.load",
    "critic.optim.lr": "models.value.optimizer.lr",
    "critic": "models.value",
    "algorithm.adv_estimator": "advantage.fn (and `algorithm: grpo` names the recipe)",
    "algorithm.gamma": "advantage.gamma",
    "algorithm.lam": "advantage.lam",
    "algorithm.kl_ctrl.kl_coef": "kl.coef",
    "algorithm": "the name of a recipe, such as `algorithm: grpo`",
    "custom_reward_function.path": "reward.fn (my.module:function)",
    "custom_reward_function": "reward.fn (my.module:function)",
    "reward_model.model.path": "models.reward.load",
    "trainer.total_epochs": "runtime.epochs",
    "trainer.total_training_steps": "runtime.steps",
    "trainer.n_gpus_per_node": "models.NAME.num_gpu",
    "trainer.save_freq": "runtime.save_every",
    "trainer.test_freq": "runtime.eval_every",
    "trainer.logger": "runtime.trackers",
    "trainer.default_local_dir": "output",
    "trainer": "runtime",
}
_MOST = 3  # keys of a section that a message translates


# Keys of Coalign that have another name now, by their paths.
RENAMED = {"data.on_missing_key": "data.bad_rows", "data.on_bad_image": "data.bad_rows"}


def describe_renaming(key: Key) -> str | None:
    """Say what a key of an earlier version is called now, as the end of a sentence; None for others."""
    new = RENAMED.get(".".join(map(str, key)))
    return None if new is None else f"is called {new} now"


def translate_key(key: Key, value: Any) -> str | None:
    """Say what a key of TRL or verl, or those below it, are called here, as the end of a sentence; None for others."""
    path = ".".join(map(str, key))
    if path in VERL:
        below = [f"{name} is {VERL[name]}" for name in _list_paths(path, value) if name in VERL and name != path]
        return f"is verl's; here {', '.join(below[:_MOST]) or f'it is {VERL[path]}'}"
    if key and key[-1] in TRL:
        return f"is TRL's; here it is {TRL[str(key[-1])]}"
    return None


def _list_paths(path: str, value: Any) -> Iterator[str]:
    """Yield the paths of all values at ``path`` and below that hold no further keys."""
    if not isinstance(value, dict):
        yield path
        return
    for name, item in value.items():
        yield from _list_paths(f"{path}.{name}", item)
