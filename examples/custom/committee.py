"""A flow of five models: a policy, two reward models and a judge that assess it, and a trainer.

    POLICY=… HELPFUL=… SAFE=… JUDGE=… PROMPTS=prompts.jsonl coalign check examples/custom/committee.yaml

A weighted sum of rewards needs no flow of one's own (`reward: [{model: helpful}, {model: safe}]`). This one decides: a
response that is not safe is worth what the safety model says of it, however helpful it is (2307.09288, section 3.2.3).
"""

import torch

from coalign.engine.engine import Engine, score
from coalign.roles import Rollout, Scorer, Trainable
from coalign.types import Stat


class Committee(Engine):
    """Helpful, well written, and never unsafe."""

    models = {"policy": Rollout, "helpful": Scorer, "safe": Scorer, "judge": Scorer, "trainer": Trainable}
    sync = [("trainer", "policy")]
    evaluates = ("policy", "helpful", "safe", "judge")
    defaults = {
        "runtime": {"samples_per_prompt": 4},
        "advantage": {"fn": "group"},
        "loss": {"fn": "policy_gradient"},
        "models": {
            "policy": {"module": "native"},
            "trainer": {"module": "fsdp", "like": "policy"},
            "helpful": {"head": "reward", "frozen": True},
            "safe": {"head": "reward", "frozen": True},
            "judge": {"module": "judge", "judge": {"fn": "pairwise"}, "sampling": {"temperature": 0.0}},
        },
    }
    limit = 0.0  # of the safety model: what is below it is not safe

    def env_flow(self, prompts):
        return self.assessed(self.policy.generate(prompts))

    def train_flow(self, batch):
        return self.trainer.train_step(self.apply(self.advantage, batch))

    def eval_flow(self, prompts):
        samples = self.config.runtime.samples_per_prompt  # the judge compares them
        out = self.policy.generate(prompts, samples=samples, **self.eval_sampling)
        return self.apply(score, self.assessed(out), prompts=len(prompts), samples=samples)

    def assessed(self, out):
        """The samples with a reward. The three models read them side by side, each in its own tokens."""
        opinions = [getattr(self, name).forward_step(out, into=name) for name in ("helpful", "safe", "judge")]
        return self.apply(decide, out, *opinions, limit=self.limit)


def decide(helpful, safe, judge, *, limit: float):
    """The reward f32[N], from what each model says of each response: columns of these names."""
    unsafe = safe < limit
    reward = torch.where(unsafe, safe - limit, torch.sigmoid(helpful) + judge)
    return {"reward": reward, "unsafe": Stat.of(unsafe)}
