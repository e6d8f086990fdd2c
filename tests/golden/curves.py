"""The runs whose curves are kept: every recipe, a few steps, on a model of a few thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runs import metrics, other_model, run, settings
from tests.vision import let_see

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
    "ppo_tricks": ("loss/grad_norm", "advantages/abs", "kl", "value/loss/value"),
    "dr_grpo": ("loss/grad_norm", "reward/mean"),
    "dapo": ("loss/grad_norm", "reward/mean", "samples/masked", "filter/dropped"),
    "gspo": ("loss/grad_norm", "loss/clip_fraction", "reward/mean"),
    "gspo_token": ("loss/grad_norm", "loss/clip_fraction", "reward/mean"),
    "cispo": ("loss/grad_norm", "loss/clip_fraction", "reward/mean"),
    "sapo": ("loss/grad_norm", "loss/gate", "reward/mean"),
    "gmpo": ("loss/grad_norm", "loss/clip_fraction", "reward/mean"),
    "clip_cov": ("loss/grad_norm", "covariance/mean", "covariance/chosen"),
    "kl_cov": ("loss/grad_norm", "loss/cov_distance", "covariance/mean"),
    "gpg": ("loss/grad_norm", "advantages/abs", "advantages/alpha"),
    "opo": ("loss/grad_norm", "advantages/abs", "reward/mean"),
    "topr": ("loss/grad_norm", "loss/taper", "reward/mean"),
    "gigpo": ("loss/grad_norm", "advantages/abs", "turns/group"),
    "rloo": ("loss/grad_norm", "advantages/abs", "kl"),
    "reinforce_pp": ("loss/grad_norm", "returns/mean", "kl"),
    "reinforce_pp_baseline": ("loss/grad_norm", "loss/kl_ref", "advantages/abs"),
    "remax": ("loss/grad_norm", "baseline/mean", "kl"),
    "online_dpo": (*COMPARED, "pairs/count"),
    "rlaif": ("loss/grad_norm", "reward/std", "reward/judge/verdict"),
    "on_policy_distillation": ("loss/grad_norm", "teacher_kl"),
    "on_policy_distillation_gkd": ("loss/value", "loss/grad_norm", "loss/kd"),
    "sft_images": ("loss/value", "loss/grad_norm"),
    "dpo_images": COMPARED,
    "grpo_images": ("loss/grad_norm", "loss/kl_ref", "reward/mean", "tokens/response"),
}

IMAGES = ("sft_images", "dpo_images", "grpo_images")
VARIANTS = ("grpo_kl", "dpo_lora", "gspo_token", "ppo_tricks", "on_policy_distillation_gkd", *IMAGES)
FAMILY = (
    *("dr_grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "gpg", "topr"),
    *("rloo", "reinforce_pp", "reinforce_pp_baseline", "remax"),
)
SECTIONS: dict[str, dict[str, Any]] = {  # what else their files have
    "grpo_kl": {"loss": {"fn": "policy_gradient", "kl_coef": 0.05, "aggregation": "sequence_mean_token_mean"}},
    "grpo_images": {"loss": {"fn": "policy_gradient", "kl_coef": 0.05}},
    "gspo_token": {"loss": {"fn": "gspo", "form": "token", "clip_low": 0.005, "clip_high": 0.01}},
    "gmpo": {"loss": {"fn": "gmpo", "clip_low": 0.01, "clip_high": 0.01}},
    "cispo": {"loss": {"fn": "cispo", "clip_high": 0.02}},
    "clip_cov": {"covariance": {"fn": "clip_cov", "share": 0.05, "low": 0.2}},
    "kl_cov": {"covariance": {"fn": "kl_cov", "share": 0.1}},
    "gigpo": {"rollout": {"fn": "tests.golden.curves:two_tries"}, "reward": {"fn": "episode"}},
    "ppo_tricks": {"kl": {"fn": "AdaptiveKL", "coef": 0.05, "target": 0.1, "horizon": 100}}
    | {"loss": {"fn": "policy_gradient", "dual_clip": 3.0, "is_level": "token"}},
    "on_policy_distillation_gkd": {"loss": {"fn": "distillation", "divergence": "jsd"}},
}
ENDS = [chr(code) for code in range(ord("a"), ord("z") + 1)]  # so that responses differ in length


def name_all_ids(model: Path) -> None:
    """Give each id of the vocabulary a special token: when the curves were recorded, those without one were sampled."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    tokenizer.add_tokens([f"<|{i}|>" for i in range(len(tokenizer), rows)], special_tokens=True)
    tokenizer.save_pretrained(model)


def configuration(name: str, directory: Path) -> dict[str, Any]:
    algorithm, _, variant = name.rpartition("_") if name in VARIANTS else (name, "", "")
    other_model(directory / "model")  # of two layers, as when the curves were recorded
    config = settings(directory, algorithm, steps=STEPS, eval_at_start=False)
    config["data"].pop("eval")
    if variant == "lora":
        config["models"]["trainer"]["lora"] = {"rank": 4, "target": ["*.q_proj", "*.v_proj"]}
    if variant == "images":
        let_see(config, directory)
        config["models"]["trainer"]["optimizer"] |= {"eps": 1e-3}
    if algorithm in FAMILY:
        config["models"]["policy"]["sampling"] |= {"stop": ENDS}
    if algorithm in (*FAMILY, "gigpo") or variant == "kl":
        config["models"]["trainer"]["updates_per_batch"] = 2
    if algorithm in ("rloo", "remax"):
        # The reward has the KL in it, which is rounding alone before the first update. In a group whose rewards are
        # all equal that is the whole gradient, and Adam would make full steps of it, others on every processor.
        config["models"]["trainer"]["optimizer"] |= {"eps": 1e-5}
    config |= SECTIONS.get(name, {})
    if variant == "tricks":
        config["reward"] |= {"normalise": "running", "clip": 1.0}
        config["models"]["trainer"] |= {"learns_after": 2, "updates_per_batch": 2}
        config["models"]["value"] = {"optimizer": {"lr": 1e-2}}
    if algorithm == "on_policy_distillation":
        teacher = other_model(directory / "sure", seed=5, initializer_range=0.3)
        config["models"]["teacher"]["load"] = str(teacher)
    if algorithm == "rlaif":
        judge = other_model(directory / "judge", seed=3, initializer_range=0.3)
        config["reward"] = {"model": "judge"}
        config["models"]["judge"] = {
            "load": str(judge),
            "chat_template": "auto",
            "module": "preference",
            "judge": {"fn": "pairwise", "template": "{prompt}{first}{second}"},
        }
    if "policy" in config["models"]:
        for file in directory.glob("*/config.json"):
            name_all_ids(file.parent)
    return config


async def two_tries(episode: Any) -> None:
    """Two turns that earn a half for a digit each; the second one begins in another state after a digit."""
    for _ in range(2):
        turn = await episode.generate(max_new_tokens=4)
        right = any(map(str.isdigit, turn.text))
        episode.reward(0.5 * right)
        episode.anchor(f"after a digit: {right}")
        episode.write(" ")


def curve(name: str, directory: Path, trainer: dict[str, Any] | None = None) -> dict[str, list[float]]:
    """The watched metrics of a fresh run, by steps (of those that have them); ``trainer``: further keys of it."""
    config = configuration(name, directory)
    config["models"]["trainer"] |= trainer or {}
    run(config)
    return {key: [line[key] for line in metrics(config) if key in line] for key in WATCHED[name]}
