"""sft

conditional_sft

pretrain
"""

from coalign.recipes.offline import Offline


class SFT(Offline):
    """Supervised fine-tuning: negative log-likelihood of the responses, averaged over the tokens of the whole batch.

    Conversations in, one model trained on the assistant's turns.
    """

    source = "conversations"
    defaults = {
        "loss": {"fn": "sft", "aggregation": "token_mean"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 1e-5, "schedule": "cosine", "min_lr_ratio": 0.1}}},
    }


class ConditionalSFT(SFT):
    """Conditional SFT (SteerLM, 2310.05344; 2308.12050): the response is learned given the score that somebody gave it.

    At inference the prompt asks for the highest score. The rows need a key `score`.

    SFT whose prompts end with the score of the response that follows.
    """

    defaults = {**SFT.defaults, "data": {"prompt_format": "{prompt} <rm_score>: {score:.2f} "}}


class Pretrain(Offline):
    """Continued pre-training: every token of the documents is learned, in steps of a number of tokens.

    Documents lie side by side in one packed row and attend to themselves alone; one longer than `data.max_tokens` is cut
    into pieces.

    Documents in, a language model out.
    """

    source = "documents"
    defaults = {
        "runtime": {"tokens_per_step": 65536},
        "data": {"max_tokens": 4096, "chat_template": "none"},
        "loss": {"fn": "sft", "aggregation": "token_mean"},
        "models": {
            "trainer": {
                "module": "fsdp",
                "optimizer": {
                    "lr": 1e-4,
                    "betas": [0.9, 0.95],
                    "weight_decay": 0.1,
                    "schedule": "cosine",
                    "min_lr_ratio": 0.1,
                },
            }
        },
    }
