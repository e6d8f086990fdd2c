"""remax"""

import torch

from coalign.data.batch import Batch
from coalign.runtime.online import KLOfResponse
from coalign.types import Status


class ReMax(KLOfResponse):
    """ReMax (2310.10505): the reward of the greedy response to a prompt is the baseline of its samples.

    Besides its samples each prompt gets one greedy response, which is scored and not trained on.

    The divergence from the reference is subtracted from the rewards of the samples, not from their baseline.
    """

    defaults = {
        **KLOfResponse.defaults,
        "runtime": {"samples_per_prompt": 1},
        "advantage": {"fn": "remax"},
        "kl": {"fn": "FixedKL", "coef": 0.01},
        "loss": {"fn": "policy_gradient", "aggregation": "sequence_mean_token_sum"},
    }

    def env_flow(self, prompts):
        out = self.generate(prompts)
        scored = self.scored(out)  # first: the baseline is normalised by the moments of these samples, too
        greedy = self.policy.generate(self.transform(prompts_of, out), samples=1, temperature=0.0)
        greedy = self.join(greedy, self.reward.forward_step(greedy, into="baseline"))
        return self.transform(with_baseline, scored, greedy)


def prompts_of(samples: Batch) -> Batch:
    """The prompt of each group, once."""
    group = samples["group"].tolist()
    first = samples.select([i for i in range(len(group)) if i == 0 or group[i] != group[i - 1]])
    place = torch.arange(first.tokens_total) - first.offsets[first.segment]
    tokens = first["tokens"][place < first["prompt_length"][first.segment]]
    sequence = {name: first[name] for name in ("group", "rows")}
    return Batch(first["prompt_length"].long(), {"tokens": tokens}, sequence)


def with_baseline(samples: Batch, greedy: Batch) -> Batch:
    """The samples with the column ``baseline``, that of the greedy response of their group.

    Samples of a group without one (its reward failed) have nothing to be compared with and become ERROR.
    """
    known = dict(zip(greedy["group"].tolist(), greedy["baseline"].tolist(), strict=True))
    baseline = torch.tensor([known.get(group, float("nan")) for group in samples["group"].tolist()])
    status = samples["status"].masked_fill(baseline.isnan(), int(Status.ERROR))
    return samples.with_(baseline=baseline, status=status)
