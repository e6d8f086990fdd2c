"""Supervised fine-tuning: negative log-likelihood of the responses, averaged over the tokens of the whole batch."""

from coalign.runtime.engine import Engine
from coalign.types import Trainable


class SFT(Engine):
    """Conversations in, one model trained on the assistant's turns."""

    models = {"trainer": Trainable}
    source = "conversations"
    evaluates = ("trainer",)
    defaults = {
        "loss": {"fn": "sft", "aggregation": "token_mean"},
        "models": {"trainer": {"module": "fsdp", "optimizer": {"lr": 1e-5, "schedule": "cosine", "min_lr_ratio": 0.1}}},
    }

    def train_flow(self, batch):
        return self.trainer.train_step(batch)

    def eval_flow(self, batch):
        return self.trainer.eval_step(batch)
