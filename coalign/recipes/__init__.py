"""Recipes: each is an ``Engine`` with the flow of one algorithm and its defaults; `algorithm` names one of ``CLASSES``.

Start with ``grpo.py``. ``online.py`` is the base of recipes with rollouts, ``offline.py`` of those that learn from a
data set. Related recipes share a file.
"""

CLASSES = {
    "grpo": "coalign.recipes.grpo:GRPO",
    "dr_grpo": "coalign.recipes.grpo:DrGRPO",
    "dapo": "coalign.recipes.grpo:DAPO",
    "gspo": "coalign.recipes.grpo:GSPO",
    "cispo": "coalign.recipes.grpo:CISPO",
    "sapo": "coalign.recipes.grpo:SAPO",
    "gmpo": "coalign.recipes.grpo:GMPO",
    "clip_cov": "coalign.recipes.grpo:ClipCov",
    "kl_cov": "coalign.recipes.grpo:KLCov",
    "gpg": "coalign.recipes.grpo:GPG",
    "opo": "coalign.recipes.grpo:OPO",
    "gigpo": "coalign.recipes.grpo:GiGPO",
    "ppo": "coalign.recipes.ppo:PPO",
    "rlaif": "coalign.recipes.ppo:RLAIF",
    "reinforce_pp": "coalign.recipes.reinforce:ReinforcePP",
    "reinforce_pp_baseline": "coalign.recipes.reinforce:ReinforcePPBaseline",
    "rloo": "coalign.recipes.reinforce:RLOO",
    "remax": "coalign.recipes.reinforce:ReMax",
    "topr": "coalign.recipes.reinforce:TOPR",
    "online_dpo": "coalign.recipes.online_dpo:OnlineDPO",
    "on_policy_distillation": "coalign.recipes.distillation:OnPolicyDistillation",
    "distill": "coalign.recipes.distillation:Distill",
    "sft": "coalign.recipes.sft:SFT",
    "conditional_sft": "coalign.recipes.sft:ConditionalSFT",
    "pretrain": "coalign.recipes.sft:Pretrain",
    "reward_model": "coalign.recipes.dpo:RewardModel",
    "process_reward": "coalign.recipes.dpo:ProcessReward",
    "dpo": "coalign.recipes.dpo:DPO",
    "simpo": "coalign.recipes.dpo:SimPO",
    "orpo": "coalign.recipes.dpo:ORPO",
    "kto": "coalign.recipes.dpo:KTO",
}
