"""Supervised fine-tuning, conditional fine-tuning, and continued pre-training."""

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
    """Conditional SFT (SteerLM, 2310.05344; 2308.12050): each prompt ends with the score of its response.

    At inference the prompt asks for the highest score. The rows need a key `score`.
    """

    defaults = {**SFT.defaults, "data": {"prompt_format": "{prompt} <rm_score>: {score:.2f} "}}


class Pretrain(Offline):
    """Continued pre-training on every token of documents, in steps of a number of tokens.

    Documents are packed side by side in one row and attend only to themselves; one longer than `data.max_tokens` is cut
    into pieces. Documents in, a language model out.
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
