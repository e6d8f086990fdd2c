"""Distillation from a teacher: on the responses of a data set, or on the student's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.config.schema import RunConfig
from coalign.data.batch import Batch
from coalign.engine.reward import list_reward_parts
from coalign.engine.vocabulary import check_same_vocabulary
from coalign.recipes.offline import Offline
from coalign.recipes.online import Online
from coalign.roles import Rollout, Scorer, Trainable
from coalign.types import Stat, Stats

if TYPE_CHECKING:
    from coalign.algorithms.objective import Objective
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
    are compared (coalign.backends.scorers.retokenize).

    The loss decides what the teacher computes. `policy_gradient`: the log-prob of each token that the student sampled,
    which becomes its advantage (`reverse_kl`). `distillation` (GKD with on-policy data only): the log-probs of the
    teacher's `models.teacher.candidates` likeliest tokens.

    Further models `teacher_<name>` are teachers of the rows whose key `teacher` is `<name>`, as in 2601.02780 (experts
    of several domains in one student). `teacher` teaches the rows without that key.
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
        return _compares_distributions(self.plan.loss)

    @classmethod
    def roles(cls, config, loss):
        roles = {name: role for name, role in cls.models.items() if name != "reward" or list_reward_parts(config)}
        return roles | dict.fromkeys(_list_teachers(config), Scorer)

    @classmethod
    def check(cls, config, loss):
        if not {"policy", "teacher"} <= set(config.models):
            return
        student, distributions = config.models["policy"], _compares_distributions(loss)
        for name in _list_teachers(config):
            teacher = config.models[name]
            if not teacher.chat_template:
                check_same_vocabulary(student, teacher, ("policy", name))
            elif loss is not None and distributions:
                raise ValueError(
                    f"loss.fn: `{loss.name}` compares distributions over one vocabulary, and "
                    f"models.{name}.chat_template has the teacher read text with its own; use `policy_gradient`"
                )
            if not teacher.frozen:
                raise ValueError(f"models.{name}.frozen is false, and a teacher does not learn; write `like: teacher`")
            candidates = config.models["teacher"].candidates if distributions else teacher.candidates
            for key, value, wanted, model in (
                ("sampling.temperature", teacher.sampling.temperature, student.sampling.temperature, "policy"),
                ("candidates", teacher.candidates, candidates, "teacher"),
            ):
                if value != wanted:
                    raise ValueError(f"models.{name}.{key} is {value}, that of models.{model} {wanted}: set them alike")

    def ask_teachers(self, out, method):
        """Return the columns of all samples, each computed by the teacher of its row."""
        names = _list_teachers(self.config)
        if len(names) == 1:
            return getattr(self.teacher, method)(out)
        answers = [
            getattr(getattr(self, name), method)(self.transform(_select_for_teacher, out, name=name, names=names))
            for name in names
        ]
        return self.transform(_merge_teachers, out, *answers, names=names)

    def env_flow(self, prompts):
        out = self.policy.generate(prompts)
        return self.join(out, self.ask_teachers(out, "top_logprobs" if self.wants_distribution else "forward_step"))

    def train_flow(self, batch):
        if not self.wants_distribution:
            return self.trainer.train_step(self.apply(self.advantage, batch))
        truncated = self.read_section("truncated")
        return self.trainer.train_step(self.apply(truncated, batch) if truncated else batch)

    def eval_flow(self, prompts):
        out = self.policy.generate(prompts, samples=1)  # sampled as in training: a divergence compares distributions
        measured = self.apply(teacher_kl, out, self.ask_teachers(out, "forward_step"))
        return super().eval_flow(prompts) if self.reward else measured


def teacher_kl(rollout_logprobs, ref_logprobs, loss_mask):
    """KL(student ‖ teacher) in nats per token, estimated on the student's own samples."""
    return {"teacher_kl": Stat.of(rollout_logprobs - ref_logprobs, loss_mask)}


def _compares_distributions(loss: Objective | None) -> bool:
    """Whether the loss compares distributions, not the tokens that the student chose."""
    return loss is not None and "candidate_logprobs" in loss.needs


def _list_teachers(config: RunConfig) -> list[str]:
    """List the teachers: `teacher`, then each `teacher_<name>` of the configuration."""
    return ["teacher", *(name for name in config.models if name.startswith("teacher_"))]


def _assign_teachers(batch: Batch, names: Sequence[str]) -> Tensor:
    """i64[N]: which of the models ``names`` teaches each sequence, by the key `teacher` of its row.

    ValueError for a row that names another one.
    """
    assigned = []
    for row in batch["rows"]:
        name = "teacher" if (key := row.get("teacher")) is None else f"teacher_{key}"
        if name not in names:
            keys = ", ".join(repr(teacher.removeprefix("teacher_")) for teacher in names[1:])
            raise ValueError(f"a row has the teacher {key!r}, and there is no models.{name}; expected {keys}, or none")
        assigned.append(names.index(name))
    return torch.tensor(assigned, dtype=torch.int64)


def _select_for_teacher(batch: Batch, *, name: str, names: Sequence[str]) -> Batch:
    """Select a teacher's sequences; the first one if there are none, since not every model takes an empty batch."""
    rows = (_assign_teachers(batch, names) == names.index(name)).nonzero().flatten()
    return batch.select(rows if len(rows) else [0] * min(1, len(batch)))


def _merge_teachers(batch: Batch, *answers: Batch, names: Sequence[str]) -> tuple[Batch, Stats]:
    """Merge the teachers' columns for all sequences. Metrics: `teacher_kl/<name>` over each teacher's tokens."""
    assigned, mask, stats = _assign_teachers(batch, names), batch["loss_mask"], Stats()
    columns: dict[str, Any] = {
        name: column.new_zeros(batch.tokens_total, *column.shape[1:]) for name, column in answers[0].token.items()
    }
    for number, (teacher, answer) in enumerate(zip(names, answers, strict=True)):
        is_taught = (assigned == number)[batch.segment]
        for name, column in columns.items():
            if is_taught.any():
                column[is_taught] = answer[name]
        if "ref_logprobs" in columns:
            log_ratio = batch["rollout_logprobs"] - columns["ref_logprobs"]
            stats[f"teacher_kl/{teacher.removeprefix('teacher_')}"] = Stat.of(log_ratio, is_taught & mask)
    return Batch(batch.lengths, columns), stats
