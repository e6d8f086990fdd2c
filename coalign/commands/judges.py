"""Scores for responses: by reward functions, or by a reward model with its own tokenizer and template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from coalign.algorithms.combine import combine
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.scorers.retokenize import ConversationReader
from coalign.backends.scorers.reward import reward_functions
from coalign.config.schema import JudgeConfig, ModelConfig
from coalign.data.messages import Message, format_prompt, get_text
from coalign.engine.reward import terms_of
from coalign.rewards.calls import Caller, RewardError, RewardFailure
from coalign.roles import Context
from coalign.types import Sample


@dataclass(frozen=True, slots=True)
class JudgedResponse:
    """A response (the messages that follow the prompt) to score; ``row`` is what a reward function may compare with.

    Neighbours of one ``group`` answer the same prompt. ``tokens`` of the response, if somebody has counted them.
    ``text``: the whole conversation as it was rendered already; a reward model then reads that, without its template.
    """

    prompt: list[Message]
    response: list[Message]
    row: dict[str, Any]
    group: int
    index: int = 0
    tokens: int = 0
    tools: list[dict[str, Any]] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score (higher is better; None: there is none, counted by the judge, and ``why`` says the reason), and of
    several functions each value."""

    score: float | None
    parts: dict[str, float] = field(default_factory=dict)
    why: str = ""


class Judge(Protocol):
    """``failed`` counts the responses without a score by their reason; ``first`` says what happened to the first.
    ``compares`` names the functions that see the responses to a prompt together."""

    failed: Counter[str]
    first: str
    compares: Sequence[str]

    def __call__(self, answers: Sequence[JudgedResponse]) -> list[Verdict]: ...

    def close(self) -> None: ...


def open_judge(config: JudgeConfig) -> Judge | None:
    """The one that the configuration names, ready to score; None if it names none."""
    if config.reward:
        return FunctionJudge(config)
    return ModelJudge(config) if config.reward_model else None


class FunctionJudge:
    """Reward functions, summed by weight. They get Samples without token ids: a loss mask of the response's length
    where it is known, and the texts."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ValueError (ConfigError) for a function that is not there or gets wrong arguments."""
        self.failed: Counter[str] = Counter()
        self.first = ""
        self._functions, self._terms = reward_functions(config.reward), terms_of(config.reward)
        self.compares = [function.name for function in self._functions if function.takes == "group"]
        self._caller = Caller()
        self._scored = False

    def __call__(self, answers: Sequence[JudgedResponse]) -> list[Verdict]:
        """Raises RewardError, with the function's own exception as cause, if nothing could be scored so far."""
        outcomes = self._caller.score(self._functions, [_sample(answer) for answer in answers])
        verdicts = [
            self._verdict(each, answer) for each, answer in zip(zip(*outcomes, strict=True), answers, strict=True)
        ]
        self._scored |= any(verdict.score is not None for verdict in verdicts)
        if answers and not self._scored:
            failure = next(outcome for each in outcomes for outcome in each if isinstance(outcome, RewardFailure))
            raise RewardError(f"no response could be scored; {self.first}") from failure.error
        return verdicts

    def close(self) -> None:
        self._caller.close()

    def _verdict(self, outcomes: Sequence[Any], answer: JudgedResponse) -> Verdict:
        by_name = {term.name: outcome for term, outcome in zip(self._terms, outcomes, strict=True)}
        parts = {name: outcome["reward"] for name, outcome in by_name.items() if not isinstance(outcome, RewardFailure)}
        lacking = [term.name for term in self._terms if term.weight and term.name not in parts]
        if lacking:
            return Verdict(None, parts, self._noted(lacking[0], by_name[lacking[0]], answer))
        values = torch.tensor([[parts.get(term.name, 0.0)] for term in self._terms], dtype=torch.float64)
        total = combine(values, torch.zeros(1, dtype=torch.int64), self._terms, {})
        return Verdict(total.item(), parts if len(self._terms) > 1 else {})

    def _noted(self, name: str, failure: RewardFailure, answer: JudgedResponse) -> str:
        self.failed[failure.reason] += 1
        self.first = self.first or f"reward function '{name}' on group {answer.group}, index {answer.index}: {failure}"
        return str(failure)


class ModelJudge:
    """A reward model: the number at the last token of the whole conversation, as its own template renders it."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ValueError if the directory has no reward head, or its tokenizer no template."""
        self.failed: Counter[str] = Counter()
        self.first = ""
        self.compares = ()
        model = ModelConfig(
            load=config.reward_model,
            head="reward",
            frozen=True,
            dtype=config.dtype,
            max_tokens_per_micro=config.reward_tokens,
            chat_template=config.reward_template,
        )
        self._module = FSDPModule(model, Context(model="reward_model", device=config.device))
        self._module.setup()
        self._reader = ConversationReader(model)

    def __call__(self, answers: Sequence[JudgedResponse]) -> list[Verdict]:
        read = [self._read(answer) for answer in answers]
        verdicts = [self._verdict(len(tokens), answer) for (tokens, _), answer in zip(read, answers, strict=True)]
        if fits := [i for i, verdict in enumerate(verdicts) if not verdict.why]:
            batch = self._reader.packed([read[i] for i in fits], [answers[i].group for i in fits])
            scores = self._module.forward_step(batch)
            for i, score in zip(fits, scores["reward"].tolist(), strict=True):
                verdicts[i] = Verdict(score)
        return verdicts

    def close(self) -> None:
        self._module.close()

    def _read(self, answer: JudgedResponse) -> tuple[list[int], int]:
        if answer.text is not None:
            return self._reader.rendered(answer.text)
        return self._reader.read([*answer.prompt, *answer.response], answer.tools)

    def _verdict(self, length: int, answer: JudgedResponse) -> Verdict:
        """Before it is scored; for good, if it is too long."""
        if length <= self._reader.longest:
            return Verdict(None)
        why = f"has {length} tokens; the reward model takes {self._reader.longest}"
        self.failed["long"] += 1
        self.first = self.first or f"group {answer.group}, index {answer.index} {why}"
        return Verdict(None, why=why)


def _sample(answer: JudgedResponse) -> Sample:
    response = get_text(answer.response[-1])
    return Sample(
        group=answer.group,
        index=answer.index,
        tokens=torch.zeros(0, dtype=torch.int32),
        loss_mask=torch.ones(answer.tokens, dtype=torch.bool),
        logprobs=torch.zeros(0),
        prompt=format_prompt(answer.prompt),
        response=response,
        raw_response=response,
        messages=[*answer.prompt, *answer.response],
        meta=answer.row,
    )
