"""dr_grpo"""

from coalign.recipes.grpo import GRPO


class DrGRPO(GRPO):
    """Dr. GRPO (2503.20783): GRPO without the two divisions that favour easy prompts and long wrong answers.

    A group's advantages are not divided by its standard deviation, nor a response's sum by its own length.

    That sum is divided by a constant instead, the most tokens that a response may have.
    """

    defaults = {
        **GRPO.defaults,
        "advantage": {"fn": "group", "scale": "none"},
        "loss": {
            "fn": "policy_gradient",
            "aggregation": "constant",
            "constant_length": "${models.policy.sampling.max_new_tokens}",
        },
        "models": {**GRPO.defaults["models"], "policy": {"module": "native", "sampling": {"max_new_tokens": 256}}},
    }
