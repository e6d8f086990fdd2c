"""gspo"""

from coalign.recipes.grpo import GRPO


class GSPO(GRPO):
    """Group Sequence Policy Optimisation (2507.18071): one importance ratio per response, and its clip.

    `loss.form: token` is GSPO-token. The clip range is far below PPO's: the ratio is a mean over the response.
    """

    defaults = {**GRPO.defaults, "loss": {"fn": "gspo", "aggregation": "sequence_mean_token_mean"}}
