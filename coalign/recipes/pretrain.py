"""pretrain"""

from coalign.runtime.offline import Offline


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
