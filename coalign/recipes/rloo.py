"""rloo"""

from coalign.runtime.online import KLOfResponse, need_several_samples


class RLOO(KLOfResponse):
    """REINFORCE leave-one-out (2402.14740): a sample's baseline is the mean reward of the *other* samples of its prompt.

    A response is one action: its whole divergence from the reference is subtracted from its reward, before the
    baseline is taken.
    """

    defaults = {
        **KLOfResponse.defaults,
        "runtime": {"samples_per_prompt": 4},
        "advantage": {"fn": "rloo"},
        "kl": {"fn": "FixedKL", "coef": 0.05},
        "loss": {"fn": "policy_gradient", "aggregation": "sequence_mean_token_sum"},
    }

    @classmethod
    def check(cls, config):
        super().check(config)
        need_several_samples(config)
