"""Distillation from a teacher: on the responses of a data set, or on the student's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coalign.engine.reward import list_reward_parts
from coalign.engine.vocabulary import check_same_vocabulary
from coalign.recipes.offline import Offline
from coalign.recipes.online import Online
from coalign.roles import Rollout, Scorer, Trainable
from coalign.types import Stat

if TYPE_CHECKING:
    from coalign.cluster.dist import DistModel


class Distill(Offline):
    """Knowledge distillation: the student learns the teacher's distribution over a data set's responses (1503.02531).

    The teacher computes the log-probs of its `models.teacher.candidates` likeliest tokens at every position.
    Conversations in, a student out. Teacher and student share a tokenizer.
    """

    teacher: DistModel[Scorer]

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
    def check(cls, config, loss):
        if {"trainer", "teacher"} <= set(config.models):
            if config.models["teacher"].chat_template:
                raise ValueError(
                    f"models.teacher.chat_template: `{config.algorithm}` compares distributions over one vocabulary; a "
                    "teacher with another tokenizer is for `on_policy_distillation`"
                )
            check_same_vocabulary(config.models["trainer"], config.models["teacher"], ("trainer", "teacher"))

    def env_flow(self, batch):
        return self.join(batch, self.teacher.top_logprobs(batch))


class OnPolicyDistillation(Online):
    """On-policy distillation: the student learns from the teacher's log-probs of its own responses (2306.13649).

    Policy, teacher and trainer. A reward, if there is one, is for evaluation. Student and teacher share a tokenizer,
    unless `models.teacher.chat_template` is set (`auto`): the teacher then reads the student's text, and spans of text
    are compared (coalign.backends.scorers.cross_tokenizer).

    The loss decides what the teacher computes. `policy_gradient`: the log-prob of each token that the student sampled,
    which becomes its advantage (`reverse_kl`). `distillation` (GKD with on-policy data only): the log-probs of the
    teacher's `models.teacher.candidates` likeliest tokens.
    """

    teacher: DistModel[Scorer]

    models = {"policy": Rollout, "teacher": Scorer, "reward": Scorer, "trainer": Trainable}
    evaluates = ("policy", "teacher", "reward")
    defaults = {
        "runtime": {"samples_per_prompt": 4},
        "advantage": {"fn": "reverse_kl"},
        "loss": {"fn": "policy_gradient"},
        "models": {
            "policy": {"module": "native"},
            "trainer": {"module": "fsdp", "like": "policy"},
            "teacher": {"module": "fsdp", "frozen": True},
        },
    }

    @property
    def wants_distribution(self):
        """Whether the loss compares distributions, not the tokens that the student chose."""
        return self.plan.loss is not None and "candidate_logprobs" in self.plan.loss.needs

    @classmethod
    def roles(cls, config, loss):
        return {name: role for name, role in cls.models.items() if name != "reward" or list_reward_parts(config)}

    @classmethod
    def check(cls, config, loss):
        if not {"policy", "teacher"} <= set(config.models):
            return
        student, teacher = config.models["policy"], config.models["teacher"]
        if not teacher.chat_template:
            check_same_vocabulary(student, teacher, ("policy", "teacher"))
        elif loss is not None and "candidate_logprobs" in loss.needs:
            raise ValueError(
                f"loss.fn: `{loss.name}` compares distributions over one vocabulary, and models.teacher.chat_template "
                "has the teacher read text with its own; use `policy_gradient`"
            )
        if student.sampling.temperature != teacher.sampling.temperature:
            raise ValueError(
                f"models.teacher.sampling.temperature is {teacher.sampling.temperature}, that of models.policy "
                f"{student.sampling.temperature}: the student would learn to be at its temperature what the teacher is "
                "at another; set them alike"
            )

    def env_flow(self, prompts):
        out = self.generate(prompts)
        tell = self.teacher.top_logprobs if self.wants_distribution else self.teacher.forward_step
        return self.join(out, tell(out))

    def train_flow(self, batch):
        batch = self.shape_rewards(batch)
        if not self.wants_distribution:
            batch = self.add_advantages(batch)
        return self.trainer.train_step(batch, **self.ptx())

    def eval_flow(self, prompts):
        out = self.policy.generate(prompts, samples=1)  # as it is trained: a divergence is one of distributions
        measured = self.apply(teacher_kl, out, self.teacher.forward_step(out))
        return super().eval_flow(prompts) if self.reward else measured


def teacher_kl(rollout_logprobs, ref_logprobs, loss_mask):
    """KL(student ‖ teacher) in nats per token, estimated on the student's own samples."""
    return {"teacher_kl": Stat.of(rollout_logprobs - ref_logprobs, loss_mask)}
