"""dapo"""

from coalign.recipes.grpo import GRPO


class DAPO(GRPO):
    """DAPO (2503.14476): GRPO with a higher upper clip, other prompts for those that teach nothing, and no cut answers.

    Clip-higher, token mean, dynamic sampling (`filter`), overlong filtering (`truncated`).

    The soft punishment of long responses is a reward function beside the others: `length_penalty`.
    """

    defaults = {
        **GRPO.defaults,
        "filter": {"fn": "varied"},
        "truncated": {"fn": "mask_truncated"},
        "loss": {"fn": "policy_gradient", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"},
    }
