"""A flow with a loop and a branch: prompts that no sample solves are tried again, then PPO learns from the best.

coalign check examples/custom/second_try.yaml
"""

import torch

from coalign.data.batch import Batch
from coalign.recipes.ppo import PPO
from coalign.types import Stat, Stats

APART = 2**40  # between the groups of one try and of the next: the same group would draw the same random numbers


class SecondTry(PPO):
    """PPO on the best of several samples, drawn until one is good enough or ``tries`` are used up.

    What is selected is no longer what the policy would write on average: it is pulled towards its own best responses.
    """

    tries = 3
    enough = 1.0  # the reward at which a prompt counts as solved

    def env_flow(self, prompts):
        tried = []
        for number in range(self.tries):
            out = self.policy.generate(self.transform(renumbered, prompts, number=number))
            tried.append(self.join(out, self.reward.forward_step(out)))
            prompts = self.transform(unsolved, prompts, tried[-1], enough=self.enough)
            if not len(prompts.result()):  # the only place where the flow waits for what it has asked for
                break
        best = self.transform(best_of, *tried)
        return self.join(best, self.reference.forward_step(best), self.value.forward_step(best))


def renumbered(prompts: Batch, *, number: int) -> Batch:
    return prompts.with_(group=prompts["group"] + number * APART)


def unsolved(prompts: Batch, tried: Batch, *, enough: float) -> Batch:
    """The prompts of which no sample has a reward of ``enough``."""
    solved = set((tried["group"][tried["reward"] >= enough] % APART).tolist())
    return prompts.select(torch.tensor([group not in solved for group in prompts["group"].tolist()], dtype=torch.bool))


def best_of(*tried: Batch) -> tuple[Batch, Stats]:
    """One sample of each prompt, the best over all tries (of equals the first), in the order of the prompts."""
    samples = Batch.concat(tried)
    groups, rewards = (samples["group"] % APART).tolist(), samples["reward"].tolist()
    best = {}
    for row, group in enumerate(groups):
        if group not in best or rewards[row] > rewards[best[group]]:
            best[group] = row
    rows = torch.tensor([best[group] for group in sorted(best)], dtype=torch.int64)
    chosen = samples.select(rows)
    return chosen.with_(group=chosen["group"] % APART), {"tries": Stat.of(chosen["group"] // APART + 1)}
