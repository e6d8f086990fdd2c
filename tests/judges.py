"""Judges whose answers are known: everything is real but what they say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from coalign.backends.engines.request import begin_samples, extend_samples
from coalign.data.batch import Batch
from coalign.types import Response, Status
from coalign_graders.services.judge import JudgeModule


def answered(questions: Batch, answers: Sequence[str], tokenizer: Any) -> Batch:
    """What a model that answers the questions so would have generated."""
    tokens = [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32) for text in answers]
    responses = [Response(t, torch.zeros(len(t)), torch.zeros_like(t), Status.OK) for t in tokens]
    return extend_samples(begin_samples(questions, 1), range(len(questions)), responses)


class DigitJudge(JudgeModule):
    """Likes digits, and says so in the words that the templates of coalign_graders.services.questions ask for."""

    def generate(self, questions: Batch, *, samples: int) -> Batch:
        texts = [self.tokenizer.decode(row["tokens"]) for row in questions.rows()]
        return answered(questions, [self.opinion(text) for text in texts], self.tokenizer)

    def opinion(self, question: str) -> str:
        if criteria := re.findall(r"^(\d)\. Has the digit (\d)\.$", question, re.MULTILINE):
            (response,) = re.findall(r"<response>\n(.*?)\n</response>", question, re.DOTALL)
            return "\n".join(f"{number}: {'yes' if digit in response else 'no'}" for number, digit in criteria)
        shown = re.findall(r"<response(?: \w)?>\n(.*?)\n</response", question, re.DOTALL)
        shares = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in shown]
        if len(shares) == 1:
            return f"Some digits. Grade: {1 + 9 * shares[0]:.2f}"
        first, second = shares
        return f"Verdict: {'tie' if first == second else 'A' if first > second else 'B'}"
