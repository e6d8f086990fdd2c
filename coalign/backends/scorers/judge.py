"""A language model that writes what it thinks of responses (2306.05685), as a model of a run that scores.

Between a policy's responses and a model that judges them: samples become questions in the judge's own tokens, and
its verdicts become rewards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from coalign.backends.engines.native.module import NativeModule
from coalign.backends.pretrained import context_length, read_config, read_tokenizer
from coalign.config.functions import bind, resolve
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.data.templates import is_finished, load_template, read_samples
from coalign.rewards.judge_questions import Judging
from coalign.roles import Context
from coalign.types import Sample, Stat, Stats, Status, Total, merge_stats

log = logging.getLogger(__name__)

# Each question is a group of its own to the judge: else all about one group would be answered by the same random
# numbers.
QUESTIONS = 2**16


class JudgeReply(NamedTuple):
    """A verdict, or None and the reason why there is none; ``text``: what the judge said, for messages."""

    verdict: float | None
    reason: str = "unreadable"
    text: str = ""


def judging(config: ModelConfig, name: str) -> Judging:
    """What ``models.<name>.judge`` names. ValueError (ConfigError) where it is missing or has wrong arguments."""
    if config.judge is None:
        raise ValueError(f"models.{name}.judge is missing: what the model is asked (`pointwise`, `pairwise`)")
    cls = resolve(config.judge.fn, "coalign.rewards.judge_questions")
    return cls(**bind(cls, config.judge.arguments, f"models.{name}.judge"))


class Examiner:
    """Asks what ``config.judge`` says, in the words of the model's own tokenizer and ``config.chat_template``.

    ``reserved``: tokens of the model's context that a question has to leave free.
    """

    def __init__(self, config: ModelConfig, context: Context, reserved: int) -> None:
        """Raises ValueError where nobody says whose tokens the responses are, or how to ask."""
        if context.tokenizer is None:
            raise ValueError(f"model '{context.model}' reads responses, and the context names no tokenizer for them")
        self.judging = judging(config, context.model)
        self.tokenizer = read_tokenizer(config)
        self._template = load_template(self.tokenizer, config.chat_template or "auto")
        self._policys = AutoTokenizer.from_pretrained(context.tokenizer, trust_remote_code=config.trust_remote_code)
        self._longest = (context_length(read_config(config)) or 2**31) - reserved

    def score(self, batch: Batch, answer: Callable[[Batch], list[JudgeReply]], name: str) -> dict[str, Any]:
        """The columns ``name`` f32[N] and ``status`` u8[N], NaN and ERROR where a response has no reward, and
        ``name``/failure, strings that say why; rows that are not at their end are left as they are. Stats: the mean
        verdict `<name>/verdict` (of a pairwise judge the share of the response shown first: ½ unless it is biased), the
        counts `<name>/failed/<reason>` of answers.

        ``answer`` is given questions (columns tokens and group). ``batch`` may be a part of a roll-out, so whether too
        little could be judged is for others to say.
        """
        rows = is_finished(batch["status"]).nonzero().flatten()
        samples = read_samples(batch.select(rows), self._policys)
        groups = [list(some) for _, some in groupby(samples, key=lambda sample: sample.group)]
        answers = self._ask(groups, answer)
        verdicts = [[one.verdict for one in some] for some in answers]
        rewards = [self.judging.rewards(len(group), some) for group, some in zip(groups, verdicts, strict=True)]
        column = torch.full((len(batch),), float("nan"))
        column[rows] = torch.tensor([float("nan") if r is None else r for some in rewards for r in some])
        status = batch["status"].clone()
        status[rows[column[rows].isnan()]] = int(Status.ERROR)
        failures = [""] * len(batch)
        told = [_failure(some) for group, some in zip(groups, answers, strict=True) for _ in group]
        for row, text in zip(rows.tolist(), told, strict=True):
            failures[row] = text if bool(column[row].isnan()) else ""
        flat = [one for some in answers for one in some]
        _report(flat)
        return {name: column, "status": status, f"{name}/failure": failures, **_stats(flat, name)}

    def _ask(
        self, groups: Sequence[list[Sample]], answer: Callable[[Batch], list[JudgeReply]]
    ) -> list[list[JudgeReply]]:
        """The answers about each group, in the order of its questions; those that are too long are not asked."""
        questions = [[self._template.prompt(messages) for messages in self.judging.ask(group)] for group in groups]
        fitting = [
            (group[0].group * QUESTIONS + number, tokens)
            for group, some in zip(groups, questions, strict=True)
            for number, tokens in enumerate(some)
            if len(tokens) <= self._longest
        ]
        given = iter(answer(_packed(fitting)) if fitting else [])
        return [
            [next(given) if len(tokens) <= self._longest else JudgeReply(None, "long") for tokens in some]
            for some in questions
        ]


def _failure(answers: Sequence[JudgeReply]) -> str:
    """Why a response of a group has no reward, if it has none."""
    if not answers:
        return (
            "nothing to compare with: its prompt has no other response (in evaluation as many as runtime.eval_samples "
            "says)"
        )
    return next((f"{answer.reason}: {answer.text!r:.300}" for answer in answers if answer.verdict is None), "")


def _report(answers: Sequence[JudgeReply]) -> None:
    failed = [answer for answer in answers if answer.verdict is None]
    if failed:
        counts = f"{len(failed)} of {len(answers)} questions to the judge have no verdict"
        log.warning(f"{counts}; the first: {_failure(failed)}")


def _packed(questions: Sequence[tuple[int, list[int]]]) -> Batch:
    """(group, tokens) as a Batch."""
    return Batch(
        torch.tensor([len(tokens) for _, tokens in questions]),
        {"tokens": torch.tensor([token for _, tokens in questions for token in tokens], dtype=torch.int32)},
        {"group": torch.tensor([group for group, _ in questions])},
    )


def _stats(answers: Sequence[JudgeReply], name: str) -> Stats:
    return merge_stats(
        {f"{name}/failed/{answer.reason}": Total(1.0)}
        if answer.verdict is None
        else {f"{name}/verdict": Stat(answer.verdict)}
        for answer in answers
    )


class JudgeModule(NativeModule):
    """Generates an answer to each question of ``config.judge`` about a group of responses, as ``config.sampling`` says.

    ``forward_step`` gives rewards; ``generate`` stays what it is.
    """

    @classmethod
    def columns(cls, config: ModelConfig, context: Context) -> tuple[str, ...]:
        judging(config, context.model)
        return ("reward", "status")

    def setup(self) -> None:
        """Raises what NativeModule and Examiner raise."""
        self.examiner = Examiner(self.config, self.context, reserved=self.config.sampling.max_new_tokens)
        super().setup()

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Any]:
        """See Examiner.score; ``into`` is another name for `reward`."""
        return self.examiner.score(batch, self._answers, into or "reward")

    def _answers(self, questions: Batch) -> list[JudgeReply]:
        said = read_samples(self.generate(questions, samples=1), self.examiner.tokenizer)
        texts = [sample.response for sample in said]
        return [JudgeReply(self.examiner.judging.verdict(text), text=text) for text in texts]
