"""Scores for responses: by reward functions, or by a reward model with its own tokenizer and template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.scorers.retokenize import ConversationReader, TokenizedConversation
from coalign.backends.scorers.reward_functions import build_reward_functions
from coalign.config.schema import ImagesConfig, ModelConfig, VisionConfig
from coalign.data.messages import Message, format_prompt, get_text
from coalign.devices import count_devices
from coalign.engine.reward import build_terms, combine
from coalign.rewards.calls import RewardCaller, RewardError, RewardFailure, RewardOutcome
from coalign.roles import Context
from coalign.types import Sample, Status
from coalign_serve.config.stages import JudgeConfig
from coalign_serve.run_model import choose_template, fetch_in_dtype, find_model


@dataclass(frozen=True, slots=True)
class ResponseToScore:
    """A response (the messages that follow the prompt) to score; ``row`` is what a reward function may compare with.

    Neighbours of one ``group`` answer the same prompt. ``tokens`` counts those of the response (0: unknown). ``text``
    is the whole conversation if it was rendered already; a reward model then reads it without its template. One that
    was ``truncated`` has no end of turn. ``locate`` names its row in a file.
    """

    prompt: list[Message]
    response: list[Message]
    row: dict[str, Any]
    group: int
    index: int = 0
    tokens: int = 0
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    truncated: bool = False
    locate: Callable[[], str] | None = None

    def describe(self, problem: object) -> str:
        """Say what is wrong with this response, and where it comes from."""
        location = f" ({self.locate()})" if self.locate else ""
        return f"group {self.group}, index {self.index}{problem}{location}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score (higher is better), and with several reward functions the value of each in ``terms``.

    If the score is None, ``why`` says the reason.
    """

    score: float | None
    terms: dict[str, float] = field(default_factory=dict)
    why: str = ""


class ResponseJudge(ABC):
    """Scores responses, and counts those without a score.

    ``failed`` counts them by reason and ``first`` describes the first one. ``compares`` names the functions that see
    all responses to a prompt together. ``dtype``: the data type that a reward model computes in.
    """

    dtype: str = ""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self.first = ""
        self.compares: Sequence[str] = ()

    @abstractmethod
    def __call__(self, answers: Sequence[ResponseToScore]) -> list[Verdict]:
        """Return a verdict for each response, in order."""

    @abstractmethod
    def close(self) -> None:
        """Release threads or weights."""

    def _count_failure(self, reason: str, message: str) -> None:
        self.failed[reason] += 1
        self.first = self.first or message


def choose_device(name: str) -> str:
    """Return the name of a torch device; `auto` is the accelerator of this machine, or else `cpu`.

    Raises ValueError for another name than torch's, and for a device that this machine does not have.
    """
    if name == "auto":
        return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: {name!r} is no device; expected auto, cpu, cuda or cuda:1") from error
    count = count_devices(device.type)
    if device.type != "cpu" and (device.index or 0) >= count:
        raise ValueError(f"device: {name!r} is not here: this machine has {count} {device.type} devices; use cpu")
    return name


def open_judge(config: JudgeConfig, images: ImagesConfig | None = None, on_long: str = "drop") -> ResponseJudge:
    """Return the judge that the configuration names, ready to score. It must name one.

    ``images``: how a reward model reads them; None: it reads text alone. ``on_long``: as in `data`, for conversations
    that are longer than what a reward model reads.
    """
    choose_device(config.device)
    return RewardFunctionJudge(config) if config.reward else RewardModelJudge(config, images, on_long)


class RewardFunctionJudge(ResponseJudge):
    """Sums reward functions by weight.

    Their Samples have texts and no token ids. The loss mask has the response's length where that is known.
    """

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ValueError (ConfigError) for a function that does not exist or gets wrong arguments."""
        super().__init__()
        self._functions, self._terms = build_reward_functions(config.reward), build_terms(config.reward)
        self.compares = [function.name for function in self._functions if function.takes == "group"]
        self._caller = RewardCaller()
        self._caller.start(self._functions)
        self._has_scored = False

    def __call__(self, answers: Sequence[ResponseToScore]) -> list[Verdict]:
        """Raises RewardError, with the function's own exception as cause, if nothing could be scored so far."""
        outcomes = self._caller.score(self._functions, [_make_sample(answer) for answer in answers])
        by_answer = zip(zip(*outcomes, strict=True), answers, strict=True)
        verdicts = [self._combine(answer_outcomes, answer) for answer_outcomes, answer in by_answer]
        self._has_scored |= any(verdict.score is not None for verdict in verdicts)
        if answers and not self._has_scored:
            failure = next(outcome for row in outcomes for outcome in row if isinstance(outcome, RewardFailure))
            raise RewardError(f"no response could be scored; {self.first}") from failure.error
        return verdicts

    def close(self) -> None:
        self._caller.close()

    def _combine(self, outcomes: Sequence[RewardOutcome], answer: ResponseToScore) -> Verdict:
        terms: dict[str, float] = {}
        why = ""
        for term, outcome in zip(self._terms, outcomes, strict=True):
            if not isinstance(outcome, RewardFailure):
                terms[term.name] = outcome["reward"]
            elif term.weight and not why:
                why = str(outcome)
                self._count_failure(
                    outcome.reason, f"reward function '{term.name}' on {answer.describe(f': {outcome}')}"
                )
        if why:
            return Verdict(None, terms, why)
        values = torch.tensor([[terms.get(term.name, 0.0)] for term in self._terms], dtype=torch.float64)
        total = combine(values, torch.zeros(1, dtype=torch.int64), self._terms, {})
        return Verdict(total.item(), terms if len(self._terms) > 1 else {})


class RewardModelJudge(ResponseJudge):
    """A reward model: its head's value at the end of the conversation (`reward_score_at`), in its own template."""

    def __init__(self, config: JudgeConfig, images: ImagesConfig | None = None, on_long: str = "drop") -> None:
        """Raises ValueError if the directory has no reward head, or its tokenizer no template."""
        super().__init__()
        name = config.reward_model or ""
        chosen = choose_template(name, config.reward_template)
        self._on_long = on_long
        model = ModelConfig(
            load=find_model(name),
            head="reward",
            frozen=True,
            max_tokens_per_micro=config.reward_tokens,
            chat_template=chosen.chat_template,
            chat_template_kwargs=chosen.chat_template_kwargs,
            score_at=config.reward_score_at,
            vision=None if images is None else VisionConfig(),
        )
        device = choose_device(config.device)
        model = fetch_in_dtype(model, config.dtype, device)
        self.dtype = model.dtype
        context = Context(model="reward_model", device=device, images=images)
        self._module = FSDPModule(model, context)
        self._module.setup()
        self._reader = ConversationReader(model, images, chosen.reasoning)

    def __call__(self, answers: Sequence[ResponseToScore]) -> list[Verdict]:
        """A conversation with more tokens than the model takes gets no score, or loses its beginning, or is refused."""
        read = [self._read(answer) for answer in answers]
        verdicts, fits = [Verdict(None)] * len(answers), []
        for i, (conversation, answer) in enumerate(zip(read, answers, strict=True)):
            if len(conversation.tokens) <= self._reader.longest or self._on_long == "truncate_left":
                fits.append(i)
                continue
            why = f"has {len(conversation.tokens)} tokens; the reward model takes {self._reader.longest}"
            if self._on_long == "error":
                raise ValueError(answer.describe(f" {why}"))
            self._count_failure("long", answer.describe(f" {why}"))
            verdicts[i] = Verdict(None, why=why)
        if fits:
            batch = self._reader.pack([read[i] for i in fits], [answers[i].group for i in fits])
            scores = self._module.forward_step(batch)
            for i, score in zip(fits, scores["reward"].tolist(), strict=True):
                verdicts[i] = Verdict(score)
        return verdicts

    def close(self) -> None:
        self._module.close()

    def _read(self, answer: ResponseToScore) -> TokenizedConversation:
        if answer.text is not None:
            return self._reader.read_rendered(answer.text)
        return self._reader.read([*answer.prompt, *answer.response], answer.tools, truncated=answer.truncated)


def _make_sample(answer: ResponseToScore) -> Sample:
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
        status=Status.TRUNCATED if answer.truncated else Status.OK,
    )
