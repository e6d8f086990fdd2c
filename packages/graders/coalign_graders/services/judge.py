"""Scores responses by the verdicts of a language model: written ones (2306.05685), or probabilities of two labels.

Samples of the policy become questions in the judge's own tokens, and the judge's verdicts become rewards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.pretrained import (
    read_config,
    read_context_length,
    read_placeholders,
    read_run_tokenizer,
    read_tokenizer,
)
from coalign.config.functions import bind, resolve
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.data.images.placeholders import show_images
from coalign.data.sources import BadRow
from coalign.data.templates import is_finished, load_template, locate_images, read_samples
from coalign.roles import Context
from coalign.types import ImageSpan, Sample, Stat, Stats, Status, Total, merge_stats
from coalign_graders.services.images import list_images
from coalign_graders.services.questions import JudgeQuestions, Messages, Reward, Verdict, name_images

log = logging.getLogger(__name__)

# Each question gets a group number of its own: random numbers of sampling are drawn by group.
QUESTIONS = 2**16  # per group of responses, at most
_BAD_ROW = "row"  # why there is no verdict: the row does not say what to ask

Answers = Sequence[str] | Sequence[float]  # texts, or verdicts


class JudgeReply(NamedTuple):
    """A verdict, or None and the reason why there is none; ``text``: the judge's answer, for messages."""

    verdict: Verdict | None
    reason: str = "unreadable"
    text: str = ""


class _JudgeQuestion(NamedTuple):
    """A question in the judge's tokens, and where images stand in them."""

    tokens: list[int]
    images: tuple[ImageSpan, ...] = ()


def _build_judging(config: ModelConfig, name: str) -> JudgeQuestions:
    """Build what ``models.<name>.judge`` names. ValueError where it is missing, ConfigError for wrong arguments."""
    if config.judge is None:
        raise ValueError(f"models.{name}.judge is missing: what the model is asked (`pointwise`, `pairwise`)")
    cls = resolve(config.judge.fn, config.judge.home)
    return cls(**bind(cls, config.judge.arguments, f"models.{name}.judge"))


class JudgeRunner:
    """Asks the questions of ``config.judge``, with the judge's own tokenizer and ``config.chat_template``.

    ``reserved``: tokens of the judge's context that a question must leave free. Raises ValueError if the context names
    no tokenizer of the responses, and what `_build_judging` raises.
    """

    def __init__(self, config: ModelConfig, context: Context, reserved: int) -> None:
        if context.tokenizer is None:
            raise ValueError(f"model '{context.model}' reads responses, and the context names no tokenizer for them")
        self.judging = _build_judging(config, context.model)
        self.tokenizer = read_tokenizer(config)
        self._template = load_template(
            self.tokenizer,
            config.chat_template or "auto",
            config.chat_template_kwargs,
            placeholders=read_placeholders(config, context.images),
        )
        asked = (config.judge.arguments if config.judge else {}).get("template", "")
        self._template.guard.check_setting(asked, f"models.{context.model}.judge.template")
        self._policy_tokenizer = read_run_tokenizer(context)
        self._longest = (read_context_length(read_config(config)) or 2**31) - reserved

    def score(self, batch: Batch, answer: Callable[[Batch], Answers], name: str) -> dict[str, Any]:
        """Judge the finished responses of ``batch``; ``answer`` maps questions (columns tokens, group) to answers.

        An episode of several rows is judged once, by the main conversation.

        Returns the columns ``name`` f32[N] and ``status`` u8[N], with NaN and ERROR where a response has no reward, and
        ``name``/failure, strings that say why. Unfinished rows keep their status. Stats: `<name>/verdict`, the mean
        verdict (of a pairwise judge, the share of the response shown first: ½ unless it is biased), and the counts
        `<name>/failed/<reason>` of replies; `<name>/markers`, the special tokens that questions spell, and that the
        judge reads as text; the means `<name>/<key>` of what `rewards` logs, and `<name>/<key>/count`, of how many
        responses. The caller decides whether too many have failed.
        """
        everything, batch = batch, batch.first_branches()
        status = cast(Tensor, batch["status"]).clone()
        rows = is_finished(status).nonzero().flatten()
        samples = read_samples(batch.select(rows), self._policy_tokenizer)
        if self._template.placeholders is None:
            samples = name_images(samples)
        groups = [list(some) for _, some in groupby(samples, key=lambda sample: sample.group)]
        spelled = self._template.guard.codes_read
        answers = self._ask(groups, answer)
        markers = {f"{name}/markers": Total(float(self._template.guard.codes_read - spelled))}
        rewards = [one for pair in zip(groups, answers, strict=True) for one in self._reward(*pair)]
        logged = [one if isinstance(one, Mapping) else {"reward": one} for one in rewards]
        values = [one["reward"] for one in logged]
        column = torch.full((len(batch),), float("nan"))
        column[rows] = torch.tensor([float("nan") if value is None else value for value in values])
        status[rows[column[rows].isnan()]] = int(Status.ERROR)
        failures = [""] * len(batch)
        texts = [_failure(some) for group, some in zip(groups, answers, strict=True) for _ in group]
        for row, text in zip(rows.tolist(), texts, strict=True):
            failures[row] = text if bool(column[row].isnan()) else ""
        flat = [one for some in answers for one in some]
        if failed := [one for one in flat if one.verdict is None]:
            counts = f"{len(failed)} of {len(flat)} questions to the judge have no verdict"
            log.warning(f"{counts}; the first: {_failure(failed)}")
        columns = everything.spread({name: column, "status": status, f"{name}/failure": failures})
        return {**columns, **_stats(flat, name), **_log(logged, name), **markers}

    def _reward(self, group: Sequence[Sample], replies: Sequence[JudgeReply]) -> Sequence[Reward]:
        if any(reply.reason == _BAD_ROW for reply in replies):
            return [None] * len(group)
        return self.judging.rewards(group, [reply.verdict for reply in replies])

    def _ask(self, groups: Sequence[list[Sample]], answer: Callable[[Batch], Answers]) -> list[list[JudgeReply]]:
        """The replies about each group, in the order of its questions. Questions that are too long are not asked.

        A group whose row does not say what to ask has one reply, which is why.
        """
        asked, refused = list[list[Messages]](), dict[int, JudgeReply]()
        for number, group in enumerate(groups):
            try:
                asked.append(self.judging.ask(group))
            except BadRow as error:
                refused[number] = JudgeReply(None, _BAD_ROW, str(error))
                asked.append([])
        questions = [
            [self._write(messages, group) for messages in some] for group, some in zip(groups, asked, strict=True)
        ]
        fitting = [
            (group[0].group * QUESTIONS + number, question)
            for group, some in zip(groups, questions, strict=True)
            for number, question in enumerate(some)
            if len(question.tokens) <= self._longest
        ]
        answers = iter(answer(_pack_questions(fitting)) if fitting else [])
        return [
            [refused[number]]
            if number in refused
            else [
                self._read(next(answers), group) if len(one.tokens) <= self._longest else JudgeReply(None, "long")
                for one in some
            ]
            for number, (group, some) in enumerate(zip(groups, questions, strict=True))
        ]

    def _read(self, answer: str | float, group: Sequence[Sample]) -> JudgeReply:
        if isinstance(answer, str):
            return JudgeReply(self.judging.verdict(answer, group), text=answer)
        return JudgeReply(answer)

    def _write(self, messages: Messages, group: Sequence[Sample]) -> _JudgeQuestion:
        """A question about a group in the judge's tokens. A judge that sees is shown the images of the prompt."""
        if self._template.placeholders is not None:
            messages = show_images(messages, list_images(group[0].meta.get("messages") or ()))
        tokens = self._template.prompt(messages)
        return _JudgeQuestion(tokens, locate_images(self._template, tokens, messages))


def _failure(answers: Sequence[JudgeReply]) -> str:
    """Why a response of a group has no reward; empty if it has one."""
    if not answers:
        return "nothing to compare with: its prompt has no other response (in evaluation see runtime.eval_samples)"
    return next((f"{answer.reason}: {answer.text!r:.300}" for answer in answers if answer.verdict is None), "")


def _pack_questions(questions: Sequence[tuple[int, _JudgeQuestion]]) -> Batch:
    groups, asked = [group for group, _ in questions], [question for _, question in questions]
    return Batch(
        torch.tensor([len(question.tokens) for question in asked]),
        {"tokens": torch.tensor([token for question in asked for token in question.tokens], dtype=torch.int32)},
        {"group": torch.tensor(groups), "images": [question.images for question in asked]},
    )


def _stats(answers: Sequence[JudgeReply], name: str) -> Stats:
    return merge_stats(
        {f"{name}/failed/{answer.reason}": Total(1.0)}
        if answer.verdict is None
        else {f"{name}/verdict": Stat(sum(answer.verdict), len(answer.verdict))}
        if isinstance(answer.verdict, list)
        else {f"{name}/verdict": Stat(answer.verdict)}
        for answer in answers
    )


def _log(entries: Sequence[Mapping[str, Any]], name: str) -> Stats:
    """The mean of what `JudgeQuestions.rewards` logs besides the reward, and of how many responses it is."""
    return merge_stats(
        {f"{name}/{key}": Stat(value), f"{name}/{key}/count": Total(1.0)}
        for entry in entries
        for key, value in entry.items()
        if key != "reward"
    )


class JudgeModule(NativeModule):
    """Scores responses by the answers that it generates to the questions of ``config.judge``."""

    @classmethod
    def columns(cls, config: ModelConfig, context: Context) -> tuple[str, ...]:
        _build_judging(config, context.model)
        return ("reward", "status")

    def setup(self) -> None:
        """Raises what NativeModule and JudgeRunner raise."""
        self.examiner = JudgeRunner(self.config, self.context, reserved=self.config.sampling.max_new_tokens)
        super().setup()

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Any]:
        """See JudgeRunner.score; ``into`` renames the column `reward`."""
        return self.examiner.score(batch, self._answers, into or "reward")

    def _answers(self, questions: Batch) -> list[str]:
        answered = cast(Batch, self.generate(questions, samples=1))  # no statistics: no environment
        return [sample.response for sample in read_samples(answered, self.examiner.tokenizer)]


class PreferenceModule(FSDPModule):
    """A frozen model that compares by ``config.judge``, whose ``labels`` are two texts of one token each.

    One forward pass instead of a written answer: for pairwise preference models (2405.07863, section 2.2) and direct
    judgements of any model (RLAIF, 2309.00267, section 2.2).
    """

    @classmethod
    def columns(cls, config: ModelConfig, context: Context) -> tuple[str, ...]:
        _read_labels(_build_judging(config, context.model), context.model)
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
        self.labels = [self._token(label) for label in _read_labels(self.examiner.judging, self.context.model)]
        super().setup()

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Any]:
        """See JudgeRunner.score; ``into`` renames `reward`. A verdict is P(first) / (P(first) + P(second))."""
        return self.examiner.score(batch, self._answers, into or "reward")

    def _answers(self, questions: Batch) -> list[float]:
        chances = torch.empty(len(questions))
        for micro, out in self.compute_outputs(_append_label(questions, self.labels), needs=("candidate_logprobs",)):
            chances[cast(Tensor, micro["row"])] = out["candidate_logprobs"].softmax(1)[:, 0].float().cpu()
        return chances.tolist()

    def _token(self, label: str) -> int:
        tokens = self.examiner.tokenizer(label, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            raise ValueError(
                f"models.{self.context.model}.judge.labels: '{label}' is {len(tokens)} tokens; a preference model "
                "compares the probabilities of two single ones"
            )
        return tokens[0]


def _read_labels(judging: JudgeQuestions, name: str) -> tuple[str, str]:
    """The two texts that a preference model compares. ValueError for questions that it cannot answer by one of them."""
    if (labels := getattr(judging, "labels", None)) is None:
        raise ValueError(
            f"models.{name}.judge: a preference model writes nothing, it compares two labels; `pairwise` has them, "
            "and `rubric` with `judged: alone`"
        )
    return labels


def _append_label(questions: Batch, labels: list[int]) -> Batch:
    """The questions, each followed by a label: the position where the candidates are compared."""
    lengths = questions.lengths + 1
    last = lengths.cumsum(0) - 1
    mask = torch.zeros(int(lengths.sum()), dtype=torch.bool).index_fill(0, last, True)
    tokens = torch.full((len(mask),), labels[0], dtype=torch.int32)
    tokens[~mask] = questions.token["tokens"]
    candidates = torch.tensor(labels, dtype=torch.int32).repeat(len(mask), 1)
    return Batch(
        lengths, {"tokens": tokens, "loss_mask": mask, "candidates": candidates}, {"images": questions["images"]}
    )
