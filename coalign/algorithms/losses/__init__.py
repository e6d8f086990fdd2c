"""Losses: records of settings with a formula over the trained tokens of a micro-batch.

``policy.py`` has those of PPO and its relatives, ``preference.py`` those of DPO, ``supervised.py`` SFT. Their fields
are the settings of the YAML. They return values; the framework weighs and sums them (coalign.algorithms.objective).
"""

from coalign.algorithms.losses import policy, preference, supervised
from coalign.algorithms.objective import Loss

_LOSSES: dict[str, type[Loss]] = {  # by the names that `loss.fn` has for them
    "aot": preference.AOTLoss,
    "aot_unpaired": preference.AOTUnpairedLoss,
    "apo_down": preference.APODownLoss,
    "apo_zero": preference.APOZeroLoss,
    "apo_zero_unpaired": preference.APOZeroUnpairedLoss,
    "bco_pair": preference.BCOPairLoss,
    "bradley_terry": supervised.BradleyTerryLoss,
    "cispo": policy.CISPOLoss,
    "cpo": preference.CPOLoss,
    "discopop": preference.DiscoPOPLoss,
    "distillation": supervised.DistillationLoss,
    "dpo": preference.DPOLoss,
    "exo_pair": preference.EXOPairLoss,
    "gmpo": policy.GMPOLoss,
    "gspo": policy.GSPOLoss,
    "hinge": preference.HingeLoss,
    "ipo": preference.IPOLoss,
    "kl_cov": policy.KLCovLoss,
    "kto": preference.KTOLoss,
    "nca_pair": preference.NCAPairLoss,
    "orpo": preference.ORPOLoss,
    "policy_gradient": policy.PolicyGradient,
    "process_reward": supervised.ProcessRewardLoss,
    "reinforce": policy.ReinforceLoss,
    "sapo": policy.SAPOLoss,
    "sft": supervised.SFTLoss,
    "simpo": preference.SimPOLoss,
    "sppo_hard": preference.SPPOHardLoss,
    "topr": policy.TOPRLoss,
    "value": policy.ValueLoss,
}
__all__ = [*_LOSSES]


def __getattr__(name: str) -> type[Loss]:
    if name not in _LOSSES:
        raise AttributeError(f"module 'coalign.algorithms.losses' has no attribute '{name}'")
    return _LOSSES[name]
