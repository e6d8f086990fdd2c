"""conditional_sft"""

from coalign.recipes.sft import SFT


class ConditionalSFT(SFT):
    """Conditional SFT (SteerLM, 2310.05344; 2308.12050): the response is learned given the score that somebody gave it.

    At inference the prompt asks for the highest score. The rows need a key `score`.

    SFT whose prompts end with the score of the response that follows.
    """

    defaults = {**SFT.defaults, "data": {"prompt_format": "{prompt} <rm_score>: {score:.2f} "}}
