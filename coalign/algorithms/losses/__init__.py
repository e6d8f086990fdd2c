"""Losses: pure functions of one micro-batch of trained tokens. They return values; the framework weighs and adds up.

Keyword-only arguments are configuration. A loss says by attributes what its values stand for (``per``) and which inputs
it needs that are not there unasked (``needs``); see coalign.algorithms.traits.
"""

from coalign.algorithms.losses.cispo import cispo
from coalign.algorithms.losses.distillation import distillation
from coalign.algorithms.losses.gspo import gspo
from coalign.algorithms.losses.kto import apo_zero_unpaired, kto
from coalign.algorithms.losses.policy import policy_gradient
from coalign.algorithms.losses.preference import (
    apo_down,
    apo_zero,
    bco_pair,
    discopop,
    dpo,
    exo_pair,
    hinge,
    ipo,
    nca_pair,
    sppo_hard,
)
from coalign.algorithms.losses.ranking import bradley_terry
from coalign.algorithms.losses.reference_free import cpo, orpo, simpo
from coalign.algorithms.losses.sft import sft
from coalign.algorithms.losses.steps import process_reward
from coalign.algorithms.losses.transport import aot, aot_unpaired
from coalign.algorithms.losses.value import value

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
    "gspo",
    "hinge",
    "ipo",
    "kto",
    "nca_pair",
    "orpo",
    "policy_gradient",
    "process_reward",
    "sft",
    "simpo",
    "sppo_hard",
    "value",
]
