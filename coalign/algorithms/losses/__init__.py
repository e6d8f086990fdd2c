"""Losses: pure functions of one micro-batch of trained tokens. They return values; the framework weighs and sums them.

``policy.py`` has those of PPO and its relatives, ``preference.py`` those of DPO, ``supervised.py`` SFT. Keyword-only
arguments are configuration. A loss declares by attributes whether it gives a value per token, sequence, group or batch
(``per``), and the inputs on request that it reads (``needs``): see coalign.algorithms.segments.
"""

from coalign.algorithms.losses.policy import cispo, gmpo, gspo, kl_cov, policy_gradient, reinforce, sapo, topr, value
from coalign.algorithms.losses.preference import (
    aot,
    aot_unpaired,
    apo_down,
    apo_zero,
    apo_zero_unpaired,
    bco_pair,
    cpo,
    discopop,
    dpo,
    exo_pair,
    hinge,
    ipo,
    kto,
    nca_pair,
    orpo,
    simpo,
    sppo_hard,
)
from coalign.algorithms.losses.supervised import bradley_terry, distillation, process_reward, sft

__all__ = [
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "apo_zero_unpaired",
    "bco_pair",
    "bradley_terry",
    "cispo",
    "cpo",
    "discopop",
    "distillation",
    "dpo",
    "exo_pair",
    "gmpo",
    "gspo",
    "hinge",
    "ipo",
    "kl_cov",
    "kto",
    "nca_pair",
    "orpo",
    "policy_gradient",
    "process_reward",
    "reinforce",
    "sapo",
    "sft",
    "simpo",
    "sppo_hard",
    "topr",
    "value",
]
