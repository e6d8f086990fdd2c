"""What losses, advantages and filters refuse: each names its setting or column, the value, and what would be right."""

import math
from dataclasses import fields, replace

import pytest
import torch

from coalign.algorithms import losses
from coalign.algorithms.advantages import gigpo, pass_at_k
from coalign.algorithms.covariance import clip_cov, kl_cov
from coalign.algorithms.divergence import AdaptiveKL
from coalign.algorithms.group_filters import solve_rate
from coalign.algorithms.logprobs import VocabularyShard, candidate_logprobs, linear_logprobs
from coalign.algorithms.losses.policy import PolicyLoss
from coalign.algorithms.objective import Objective
from coalign.algorithms.shaping import shape_reward
from coalign.backends.base import build_objective
from coalign.config.functions import bind
from coalign.config.schema import LossConfig
from coalign.types import LossInput
from tests.algorithms.responses import responses
from tests.algorithms.test_covariance import GIVEN

T = torch.tensor
ONES, TEN = torch.ones(2), torch.zeros(10, 4)  # the head of a vocabulary of ten
PAIR = replace(
    responses([[-1.0], [-2.0]], ref=[[-1.0], [-2.0]], preference=[1, 0]),
    old=T([-1.0, -1.0]),
    advantages=T([1.0, -1.0]),
    values=T([0.0, 0.0]),
    returns=T([0.0, 0.0]),
    candidate_logprobs=T([[-1.0, -2.0]] * 2),
)
OWN = "tests.algorithms.test_policy_family:squared"
FIELDS = {field.name for field in fields(LossInput)}
MARKS = {"preference": T([1.0, 0.0]), "reference_point": torch.zeros(2), "high_covariance": T([True, False])}


def build(name, **settings):
    """The loss of that name with these settings is built."""
    return lambda: getattr(losses, name)(**settings)


def compute(name, *, without=None, **given):
    """It is computed of PAIR; ``given``: its settings, and other fields of its input than PAIR's."""
    changed = {key: given.pop(key) for key in FIELDS & given.keys()} | ({without: None} if without else {})
    return lambda: getattr(losses, name)(**given)(replace(PAIR, **changed))


def pass_at(k):
    return lambda: pass_at_k(T([1.0, 0, 1, 0]), T([0] * 4), T([True] * 4), torch.arange(4), k=k)


def compute_gigpo():
    return gigpo(ONES, torch.zeros(2), T([0, 5]), T([4, 4]), ONES > 0, T([0, 1]))


REFUSALS = {
    # settings
    "policy_gradient dual_clip": (build("policy_gradient", dual_clip=1.0), r"loss\.dual_clip is 1\.0: it bounds the"),
    **{
        f"{name} clip_low": (build(name, clip_low=-0.1), r"loss\.clip_low is -0\.1 .* neither may be below 0")
        for name in ("policy_gradient", "gspo", "cispo", "gmpo")
    },
    "gspo is_level": (build("gspo", is_level="token"), r"loss\.is_level is 'token': `gspo` in the form `sequence`"),
    "gmpo is_level": (build("gmpo", is_level="token"), r"loss\.is_level is 'token': in `gmpo` a response has one"),
    "topr is_level": (build("topr", is_level="token"), r"loss\.is_level is 'token': `topr` has the sampler in its own"),
    "topr ratio_limit": (build("topr", ratio_limit=0.0), r"loss\.ratio_limit is 0\.0: it bounds the weight of a mist"),
    "sapo tau_neg": (build("sapo", tau_neg=0.0), r"loss\.tau_pos is 1\.0 and loss\.tau_neg is 0\.0: both temperatures"),
    "is_low": (build("reinforce", is_level="token", is_low=1.5), r"loss\.is_low is 1\.5 and loss\.is_high is 2\.0"),
    "is_mode": (lambda: bind(PolicyLoss, {"is_mode": "trunc"}, "loss"), r"loss\.is_mode: is 'trunc'; expected"),
    "a name": (lambda: bind(PolicyLoss, {"kl_ceof": 1.0}, "loss"), r"loss\.kl_ceof: unknown argument of .* 'kl_coef'"),
    "no power": (lambda: build_objective(LossConfig(fn=OWN), "models.value.loss"), r"models\.value\.loss\.power: "),
    **{
        f"{name} label_smoothing": (build(name, label_smoothing=0.5), r"label_smoothing is 0\.5")
        for name in ("dpo", "cpo", "simpo", "aot", "aot_unpaired")
    },
    "exo_pair label_smoothing": (build("exo_pair", label_smoothing=0.0), "label_smoothing is 0"),
    "distillation kd_coef": (build("distillation", kd_coef=1.5), r"loss\.kd_coef is 1\.5"),
    "distillation jsd_beta": (build("distillation", divergence="jsd", jsd_beta=1.0), "jsd_beta is 1"),
    # aggregations
    "gspo token_mean": (lambda: Objective(losses.gspo(), name="gspo"), r"`token_mean`, which `gspo` .* sequence_mean"),
    "gmpo token_mean": (lambda: Objective(losses.gmpo(), name="gmpo"), "`token_mean`, which `gmpo` is not defined for"),
    "an own function's": (
        lambda: build_objective(LossConfig(fn=OWN, power=2, aggregation="sequence_mean_token_sum")),
        r"loss\.aggregation is `sequence_mean_token_sum`, which `.*:squared` is not defined",
    ),
    # what a loss is given
    "policy_gradient ref": (compute("policy_gradient", without="ref", kl_coef=0.1), r"needs `ref` because loss\.kl"),
    "policy_gradient advantages": (compute("policy_gradient", without="advantages"), "needs `advantages`"),
    **{
        f"{name} rollout": (compute(name, is_level="sequence", columns=MARKS), "needs `rollout`")
        for name in ("policy_gradient", "gspo", "cispo", "sapo", "gmpo", "reinforce", "kl_cov")
    },
    **{
        f"{name} entropy": (compute(name, entropy_coef=0.1, rollout=ONES, columns=MARKS), r"needs `entropy` because")
        for name in ("policy_gradient", "gspo", "cispo", "sapo", "gmpo", "reinforce", "kl_cov", "topr")
    },
    "kl_cov": (compute("kl_cov"), "needs the column `high_covariance`, but the batch has only"),
    "value old_values": (compute("value", clip=0.2), r"needs `old_values` because loss\.clip is set"),
    "dpo ref": (compute("dpo", without="ref"), "needs `ref`"),
    "ipo preference": (compute("ipo", columns={"margin": ONES}), r"needs the column `preference`.* only \['margin'\]"),
    "dpo margin": (compute("dpo", margin_coef=1.0), r"column `margin` because loss\.margin_coef is set"),
    "dpo collision": (compute("dpo", weighted=True), r"needs `collision` because loss\.weighted is set"),
    "kto reference_point": (compute("kto"), "column `reference_point`"),
    "kto ref": (compute("kto", without="ref", columns=MARKS), "needs `ref`"),
    "kto rankings": (compute("kto", columns=MARKS | {"preference": 2 * ONES}), "holds 2: this loss judges each"),
    "bradley_terry scores": (compute("bradley_terry"), "needs `scores`"),
    "bradley_terry preference": (compute("bradley_terry", scores=ONES, columns={}), "column `preference`"),
    "distillation teacher": (compute("distillation"), "column `teacher_logprobs`"),
    "distillation candidates": (compute("distillation", without="candidate_logprobs"), "needs `candidate_logprobs`"),
    "process_reward label": (compute("process_reward"), "column `label`"),
    "process_reward value": (compute("process_reward", columns={"label": -ONES}), "column `label` holds -1"),
    "process_reward candidates": (
        compute("process_reward", candidate_logprobs=torch.zeros(2, 3), columns={"label": ONES}),
        r"compares 2 candidates.* has 3",
    ),
    # log-probs
    "a temperature": (lambda: linear_logprobs(TEN[:2], TEN, T([0, 1]), temperature=0), "temperature is 0"),
    "a candidate": (lambda: candidate_logprobs(TEN[:1], TEN, T([[10]])), "candidate token 10 is .* vocabulary of 10"),
    "a candidate of no shard": (
        lambda: candidate_logprobs(TEN[:1], TEN, T([[21]]), shard=VocabularyShard(None, 11, 21)), "vocabulary of 21"
    ),
    # before a loss
    "kl without ref": (lambda: shape_reward(ONES, -ONES, ONES > 0, T([0, 1]), kl_coef=0.1), r"kl_coef is 0\.1, .*`ref"),
    "kl target": (lambda: AdaptiveKL(coef=0.1, target=0.0), "target=0"),
    "kl nan": (lambda: AdaptiveKL(coef=0.1, target=6.0).update(math.nan, samples=1), "divergence of this step is nan"),
    "filter bounds": (lambda: solve_rate(ONES, T([4, 4]), low=0.8, high=0.2), r"filter.low is 0.8 and filter.high 0.2"),
    **{
        f"pass_at_k {k}": (pass_at(k), rf"advantage\.k is {k}: expected 1 to 4, the samples of the largest") 
        for k in (0, 5)
    },
    "a turn without a state": (compute_gigpo, "`turn_states` has no state of 1 of 2 turns: see Episode"),
    "clip_cov share": (lambda: clip_cov(**GIVEN, share=2), r"covariance\.share is 2: expected a share of the trained"),
    "kl_cov share": (lambda: kl_cov(**GIVEN, share=2), r"covariance\.share is 2: .* tokens, from 0 to 1"),
    "clip_cov bounds": (lambda: clip_cov(**GIVEN, low=5.0, high=1.0), r"covariance\.low is 5.* and covariance\.high 1"),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_wrong_is_named(refusal):
    call, message = REFUSALS[refusal]
    with pytest.raises(ValueError, match=message):
        call()
