"""ChatLearn: what several of its keys decide together, for GRPO, GSPO and PPO."""

from __future__ import annotations

from typing import Any

from coalign_migrate.chatlearn_source import OLD_NAMES
from coalign_migrate.keys.foreign_keys import POLICY, SAMPLING, TRAINER, load_keys
from coalign_migrate.translation import (
    ForeignTranslation,
    count_updates,
    list_values,
    set_policy_parallel,
    set_reward_models,
    set_rows,
    set_trackers,
)

_RUNTIME, _ROLLOUT, _LEARNER = "runtime_args", "models.policy", "models.policy_trainer"
_ENGINES = {"rlhf": "ppo", "grpo": "grpo", "online_dpo": "online_dpo"}
_NAMES = {"policy": "policy", "policy_trainer": "trainer", "ref_policy": "reference", "reward": "reward"}
_NAMES |= {"value_trainer": "value"}
_MEGATRON = {
    "sequence_parallel": "sequence_parallel",
    "use_distributed_optimizer": "distributed_optimizer",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "decoder_first_pipeline_num_layers": "first_stage_layers",
    "decoder_last_pipeline_num_layers": "last_stage_layers",
}


def translate_chatlearn(values: dict[str, Any]) -> ForeignTranslation:
    """Translate the settings of a GRPO or PPO run, by dotted keys. ValueError for a file of another algorithm."""
    translation = ForeignTranslation(load_keys("chatlearn"), values, main="policy")
    algorithm = _choose_algorithm(translation)
    translation.set("algorithm", algorithm)
    translation.copy_same()
    translation.restrict(algorithm)
    _set_sizes(translation)
    _set_lengths(translation)
    _set_data(translation)
    _set_weights(translation, algorithm)
    _set_optimizer(translation)
    _set_loss(translation, algorithm)
    _set_rewards(translation)
    prefix = f"{_RUNTIME}.log_args_dict"
    used = {name: f"{prefix}.enable_{name}" for name in ("wandb", "tensorboard")}
    set_trackers(translation, f"{prefix}.wandb_project", f"{prefix}.wandb_name", used)
    _set_devices(translation, algorithm)
    set_policy_parallel(translation)
    return translation


def _choose_algorithm(translation: ForeignTranslation) -> str:
    models = {key.split(".")[1] for key in translation.given if key.startswith("models.")}
    if not {"policy", "policy_trainer"} <= models:
        raise ValueError("ChatLearn's files without a model that generates (`policy`) and one that learns are not read")
    engine = translation.get(f"{_LEARNER}.trainer_engine")
    if engine in _ENGINES:
        return _ENGINES[engine]
    if "value_trainer" in models:
        return "ppo"
    return "gspo" if translation.get(f"{_LEARNER}.use_group_sequence_policy", False) else "grpo"


def _set_sizes(translation: ForeignTranslation) -> None:
    """Set prompts, samples and updates: an episode counts samples, a step prompts."""
    samples, group = translation.get(f"{_RUNTIME}.sample_per_episode"), translation.run["runtime.samples_per_prompt"]
    if translation.run["algorithm"] == "ppo" and not translation.has(f"{_ROLLOUT}.num_inference_per_prompt"):
        translation.set("runtime.samples_per_prompt", group := 1)
    prompts = max(1, round(samples / group))
    translation.set("runtime.prompts_per_step", prompts)
    if prompts * group != samples:
        translation.notes.append(f"runtime.prompts_per_step is {prompts}: {samples} samples are no multiple of {group}")
    update = translation.get(f"{_RUNTIME}.train_global_batch_size", samples)
    updates = count_updates(translation, samples, update, "train_global_batch_size (of samples)")
    translation.set(f"{TRAINER}.updates_per_batch", updates)


def _set_lengths(translation: ForeignTranslation) -> None:
    """Set the limits of prompts and responses; `seq_length` is the limit of both together."""
    both = translation.get(f"{_ROLLOUT}.seq_length")
    response = translation.get(f"{_ROLLOUT}.max_response_tokens_length") or translation.get(
        f"{_ROLLOUT}.max_new_tokens"
    )
    if response is None and both is not None:
        response = both
        translation.notes.append(
            f"{SAMPLING}.max_new_tokens is {both}: seq_length counts the prompt, too; lower it by what prompts take"
        )
    elif both is not None and both > response:
        translation.run.setdefault("data.max_prompt_tokens", both - response)
    translation.set(f"{SAMPLING}.max_new_tokens", response)
    thinking = translation.get(f"{_ROLLOUT}.enable_thinking")
    if thinking is not None:
        translation.set("data.chat_template_kwargs", {"enable_thinking": thinking})
        translation.notes.append(
            "data.chat_template_kwargs: take enable_thinking out if the model's template does not read it"
        )
    for name, neutral in {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}.items():
        if translation.get(f"{_ROLLOUT}.{name}", neutral) != neutral:
            translation.refuse(f"{_ROLLOUT}.{name}", "no trainer computes log-probs of a distribution with a penalty")


def _set_data(translation: ForeignTranslation) -> None:
    """Set the rows; ChatLearn's own preparation of data leaves the truth where verl's does."""
    weights, limit = (translation.get(f"{_RUNTIME}.{name}") for name in ("data_ratio", "training_data_num_limit"))
    for key, ours in {"data_path": "data.train", "eval_data_path": "data.eval"}.items():
        rows = translation.get(f"{_RUNTIME}.{key}")
        keys = {"answer": "reward_model.ground_truth"}
        set_rows(translation, ours, rows, keys=keys, weights=weights, max_rows=limit)
    if translation.get(f"{_RUNTIME}.enable_resume_training", True) is False:
        translation.set("runtime.resume", "never")


def _set_weights(translation: ForeignTranslation, algorithm: str) -> None:
    """Set where weights are. Megatron's own checkpoints are not loaded: each backend reads Hugging Face directories."""
    policy, trainer = translation.get(f"{_ROLLOUT}.load"), translation.get(f"{_LEARNER}.load")
    translation.set(f"{POLICY}.load", policy or trainer)
    if policy is not None and trainer not in (None, policy):
        if translation.run.get(f"{TRAINER}.module") != "megatron":
            translation.set(f"{TRAINER}.load", trainer)
        else:
            translation.refuse(f"{_LEARNER}.load", "megatron reads the Hugging Face directory of the policy itself")
    reference = translation.get("models.ref_policy.load")
    if _has_reference(translation, algorithm) and reference not in (None, policy, trainer):
        translation.set("models.reference.load", reference)
    if f"{_LEARNER}.lr" in translation.names.values():  # in files before 2025, whose models are all Megatron's
        translation.run.setdefault(f"{TRAINER}.module", "megatron")
        translation.notes.append(
            "models.NAME.load: these are Megatron checkpoints; `coalign convert DIR -o NEW --to hf` makes others"
        )


def _set_optimizer(translation: ForeignTranslation) -> None:
    prefix = f"{_LEARNER}.optimizer"
    lr, least = translation.get(f"{prefix}.lr"), translation.get(f"{prefix}.min_lr")
    if least and translation.run.get(f"{TRAINER}.optimizer.schedule") in ("linear", "cosine"):
        translation.set(f"{TRAINER}.optimizer.min_lr_ratio", least / lr)
    betas = [translation.get(f"{prefix}.adam_beta{number}") for number in (1, 2)]
    translation.set(f"{TRAINER}.optimizer.betas", betas)
    megatron = translation.run.get(f"{TRAINER}.module") == "megatron"
    for name, ours in _MEGATRON.items():
        value = translation.get(f"{_LEARNER}.{name}")
        translation.set(f"{TRAINER}.megatron.{ours}", value if megatron else None)
    token_limit = translation.get(f"{_LEARNER}.max_token_in_packing")
    if translation.given.get(f"{_LEARNER}.packing"):
        translation.set(f"{TRAINER}.max_tokens_per_micro", token_limit)
    prefix = f"{_LEARNER}.lora"
    rank, scaling = translation.get(f"{prefix}.lora_dim", 8), translation.get(f"{prefix}.lora_scaling", 1.0)
    dropout = translation.get(f"{prefix}.lora_dropout")
    if translation.get(f"{prefix}.enable_lora", False):
        translation.set(f"{TRAINER}.lora.rank", rank)
        translation.set(f"{TRAINER}.lora.alpha", float(scaling * rank))
        translation.set(f"{TRAINER}.lora.dropout", dropout or None)


def _has_reference(translation: ForeignTranslation, algorithm: str) -> bool:
    return algorithm in ("ppo", "online_dpo") or bool(translation.get(f"{_LEARNER}.kl_coef", 0.0))


def _set_loss(translation: ForeignTranslation, algorithm: str) -> None:
    if algorithm == "gspo":
        translation.notes.append("loss.aggregation: ChatLearn means over tokens, `gspo` over responses, as its paper")
    if algorithm in ("grpo", "gspo"):
        coef = translation.number(f"{_LEARNER}.kl_coef", 0.0)
        translation.set("loss.kl_coef", coef)
        translation.set("loss.kl_estimator", "k3" if coef else None)
        bound = "`loss.dual_clip` bounds a token's loss by a multiple of its advantage, not by a constant"
        translation.refuse(f"{_LEARNER}.final_clip_ratio", bound)
        if not translation.has(f"{_LEARNER}.final_clip_ratio"):
            translation.notes.append(f"final_clip_ratio is 3 in ChatLearn; {bound}")
    coef = translation.number(f"{_LEARNER}.init_kl_coef", 0.02)
    fixed = translation.get(f"{_LEARNER}.fix_kl_coef", True)
    if algorithm == "ppo":
        translation.set("kl.coef", coef)
        if not fixed:
            translation.refuse(f"{_LEARNER}.fix_kl_coef", "the coefficient is fixed; see `kl: {fn: AdaptiveKL}`")


def _set_rewards(translation: ForeignTranslation) -> None:
    """Set the reward: a model where one is loaded, else the function that the examples' module computes."""
    load = translation.get("models.reward.load")
    rewards = set_reward_models(translation, [load] if load else [])
    translation.set("reward", rewards or [{"fn": "math"}])
    if not rewards:
        translation.notes.append(
            "reward: ChatLearn's is a module class; `math` is that of its examples. For a class of your own, write the "
            "function that it calls (docs/writing_a_reward.md)"
        )


def _set_devices(translation: ForeignTranslation, algorithm: str) -> None:
    """Set `num_gpu` and `runtime.colocation`, unless all models share all GPUs, which is what happens by itself."""
    counts = {name: translation.given.get(f"models.{name}.num_gpu") for name in _NAMES}
    if not _has_reference(translation, algorithm):
        counts["ref_policy"] = None
    if "models.reward" not in translation.run:
        counts["reward"] = None
    counts = {name: count for name, count in counts.items() if count}
    groups = _list_groups(translation.get(f"{_RUNTIME}.colocation"))
    shared = [[_NAMES[name] for name in group if name in counts] for group in groups]
    shared = [group for group in shared if len(group) > 1]
    if len(set(counts.values())) < 2 and any(len(group) == len(counts) for group in shared):
        return
    for name, count in counts.items():
        translation.get(f"models.{name}.num_gpu")
        translation.set(f"models.{_NAMES[name]}.num_gpu", count)
    translation.set("runtime.colocation", shared or None)


def _list_groups(colocation: Any) -> list[list[str]]:
    """Return groups of models: texts with commas are a group each; names alone are one group."""
    groups = [
        [OLD_NAMES.get(str(name), str(name)) for name in list_values(item)] for item in list_values(colocation or [])
    ]
    return groups if any(len(group) > 1 for group in groups) else [[name for group in groups for name in group]]
