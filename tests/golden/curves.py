"""The runs whose curves are kept: every recipe, a few steps, on a model of a few thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runs import metrics, run, settings

STEPS = 6
WATCHED = {
    "sft": ("loss/value", "loss/grad_norm"),
    "grpo": ("loss/grad_norm", "reward/mean", "tokens/response"),
    "grpo_kl": ("loss/value", "loss/grad_norm", "loss/kl_ref", "reward/mean"),
    "ppo": ("loss/grad_norm", "reward/mean", "kl", "value/loss/value"),
}


def configuration(name: str, directory: Path) -> dict[str, Any]:
    config = settings(directory, name.partition("_")[0], steps=STEPS, eval_at_start=False)
    config["data"].pop("eval")
    if name == "grpo_kl":
        config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05, "aggregation": "sequence_mean_token_mean"}
        config["models"]["trainer"]["updates_per_batch"] = 2
    return config


def curve(name: str, directory: Path) -> dict[str, list[float]]:
    """The watched metrics of a fresh run, step by step."""
    config = configuration(name, directory)
    run(config)
    return {key: [line[key] for line in metrics(config)] for key in WATCHED[name]}
