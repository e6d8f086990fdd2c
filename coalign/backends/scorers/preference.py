"""Compares two responses by a language model's probabilities of two labels as the next token.

For pairwise preference models (2405.07863, section 2.2) and direct judgements of any model (RLAIF, 2309.00267, section
2.2): one forward pass instead of a written answer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.scorers.judge import JudgeReply, JudgeRunner, build_judging
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context


class PreferenceModule(FSDPModule):
    """A frozen model that compares by ``config.judge``, whose ``labels`` are two texts of one token each."""

    @classmethod
    def columns(cls, config: ModelConfig, context: Context) -> tuple[str, ...]:
        build_judging(config, context.model)
        return ("reward", "status")

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        super().check_settings(config, name, device)
        if not config.frozen:
            raise ValueError(f"models.{name}.frozen: a preference model does not learn; set it to true")

    def setup(self) -> None:
        """Raises what the checks of Module raise, and ValueError for a label that is not a single token."""
        self.check_before_setup()
        self.examiner = JudgeRunner(self.config, self.context, reserved=1)
        self.labels = [self._token(label) for label in cast(Any, self.examiner.judging).labels]
        super().setup()

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Any]:
        """See JudgeRunner.score; ``into`` renames `reward`. A verdict is P(first) / (P(first) + P(second))."""
        return self.examiner.score(batch, self._answers, into or "reward")

    def _answers(self, questions: Batch) -> list[JudgeReply]:
        chances = torch.empty(len(questions))
        for micro, out in self.compute_outputs(_append_label(questions, self.labels), needs=("candidate_logprobs",)):
            chances[cast(Tensor, micro["row"])] = out["candidate_logprobs"].softmax(1)[:, 0].float().cpu()
        return [JudgeReply(chance) for chance in chances.tolist()]

    def _token(self, label: str) -> int:
        tokens = self.examiner.tokenizer(label, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            raise ValueError(
                f"models.{self.context.model}.judge.labels: '{label}' is {len(tokens)} tokens; a preference model "
                "compares the probabilities of two single ones"
            )
        return tokens[0]


def _append_label(questions: Batch, labels: list[int]) -> Batch:
    """The questions, each followed by a label: the position where the candidates are compared."""
    lengths = questions.lengths + 1
    last = lengths.cumsum(0) - 1
    mask = torch.zeros(int(lengths.sum()), dtype=torch.bool).index_fill(0, last, True)
    tokens = torch.full((len(mask),), labels[0], dtype=torch.int32)
    tokens[~mask] = questions.token["tokens"]
    candidates = torch.tensor(labels, dtype=torch.int32).repeat(len(mask), 1)
    return Batch(lengths, {"tokens": tokens, "loss_mask": mask, "candidates": candidates})
