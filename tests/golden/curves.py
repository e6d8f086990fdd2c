"""The runs whose curves are kept: every recipe, a few steps, on a model of a few thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runs import metrics, run, settings

STEPS = 6
COMPARED = ("loss/value", "loss/grad_norm", "loss/margin")
WATCHED = {
    "pretrain": ("loss/value", "loss/grad_norm"),
    "sft": ("loss/value", "loss/grad_norm"),
    "reward_model": (*COMPARED, "loss/scores_squared"),
    "process_reward": ("loss/value", "loss/grad_norm", "loss/positive"),
    "dpo": COMPARED,
    "dpo_lora": COMPARED,
    "orpo": (*COMPARED, "loss/nll"),
    "simpo": COMPARED,
    "kto": ("loss/value", "loss/grad_norm", "loss/kl"),
    "distill": ("loss/value", "loss/grad_norm", "loss/nll"),
    "grpo": ("loss/grad_norm", "reward/mean", "tokens/response"),
    "grpo_kl": ("loss/value", "loss/grad_norm", "loss/kl_ref", "reward/mean"),
    "ppo": ("loss/grad_norm", "reward/mean", "kl", "value/loss/value"),
}

VARIANTS = ("grpo_kl", "dpo_lora")


def configuration(name: str, directory: Path) -> dict[str, Any]:
    algorithm, _, variant = name.partition("_") if name in VARIANTS else (name, "", "")
    config = settings(directory, algorithm, steps=STEPS, eval_at_start=False)
    config["data"].pop("eval")
    if variant == "lora":
        config["models"]["trainer"]["lora"] = {"rank": 4, "target": ["*.q_proj", "*.v_proj"]}
    if variant == "kl":
        config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05, "aggregation": "sequence_mean_token_mean"}
        config["models"]["trainer"]["updates_per_batch"] = 2
    return config


def curve(name: str, directory: Path) -> dict[str, list[float]]:
    """The watched metrics of a fresh run, step by step."""
    config = configuration(name, directory)
    run(config)
    return {key: [line[key] for line in metrics(config)] for key in WATCHED[name]}
