"""sft"""

from coalign.runtime.offline import Offline


class SFT(Offline):
    """Supervised fine-tuning: negative log-likelihood of the responses, averaged over the tokens of the whole batch.

    Conversations in, one model trained on the assistant's turns.
    """

    source = "conversations"
    defaults = {
        "loss": {"fn": "sft", "aggregation": "token_mean"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 1e-5, "schedule": "cosine", "min_lr_ratio": 0.1}}},
    }
