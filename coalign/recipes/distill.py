"""distill"""

from coalign.roles import Scorer, Trainable
from coalign.runtime.offline import Offline
from coalign.runtime.vocabulary import check_same_vocabulary


class Distill(Offline):
    """Knowledge distillation: the student follows the teacher's distribution over the responses of a data set (1503.02531).

    The teacher tells the log-probs of its `models.teacher.candidates` likeliest tokens at every position.

    Conversations in, a student out. Teacher and student share a tokenizer.
    """

    models = {"trainer": Trainable, "teacher": Scorer}
    source = "conversations"
    evaluates = ("trainer", "teacher")
    defaults = {
        "loss": {"fn": "distillation"},
        "models": {
            "trainer": {"module": "fsdp", "optimizer": {"lr": 1e-5, "schedule": "cosine", "min_lr_ratio": 0.1}},
            "teacher": {"module": "fsdp", "frozen": True},
        },
    }

    @classmethod
    def check(cls, config):
        if {"trainer", "teacher"} <= set(config.models):
            check_same_vocabulary(config.models["trainer"], config.models["teacher"], ("trainer", "teacher"))

    def env_flow(self, batch):
        return self.join(batch, self.teacher.top_logprobs(batch))
