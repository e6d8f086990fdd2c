"""rlaif"""

from coalign.recipes.grpo import GRPO


class RLAIF(GRPO):
    """Reinforcement learning from AI feedback (2212.08073, 2309.00267): a language model judges the responses.

    GRPO whose reward is what the model `judge` thinks of a response: by default its grade.

    `models.judge.judge: pairwise` has it compare the responses to a prompt; with `module: preference` it does so by the
    probabilities of two labels, and writes nothing. Other parts of the reward go beside it: `reward: [{model: judge},
    {fn: …}]`. A judge goes into any other recipe in the same way: `algorithm: online_dpo`, `reward: {model: judge}`.
    """

    defaults = {
        **GRPO.defaults,
        "reward": [{"model": "judge"}],
        "models": {
            **GRPO.defaults["models"],
            "judge": {
                "module": "judge",
                "frozen": True,
                "judge": {"fn": "pointwise"},
                "sampling": {"max_new_tokens": 512, "temperature": 0.0},
            },
        },
    }
