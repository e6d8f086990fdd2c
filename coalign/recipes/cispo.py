"""cispo"""

from coalign.recipes.grpo import GRPO


class CISPO(GRPO):
    """CISPO (2506.13585): the importance weight is clipped, and no token loses its gradient to the clip.

    REINFORCE with group advantages, a bounded weight on each token, and the mean over all tokens of the batch.
    """

    defaults = {**GRPO.defaults, "loss": {"fn": "cispo", "aggregation": "token_mean"}}
