"""Runs models with a tokenizer of their own: samples become conversations, and these the model's own tokens.

A reward model scores these. A teacher's log-probs of spans of text are shared among the student's tokens: both texts of
a turn are cut where a token ends in the student's tokens and in the teacher's. Between two cuts lies a span, the end of
the turn is one more, and a span's log-prob is the sum over its tokens, in either tokenizer.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from coalign.backends import pretrained
from coalign.backends.base import Module
from coalign.config.functions import resolve_class
from coalign.config.schema import ImagesConfig, ModelConfig
from coalign.data import templates
from coalign.data.batch import Batch
from coalign.data.images.placeholders import split_images
from coalign.data.kinds import trim_after_last_trained
from coalign.data.messages import Message, ReasoningPolicy
from coalign.data.sources import BadRow
from coalign.data.templates import Tools, is_finished, list_special_tokens, read_samples
from coalign.roles import Context
from coalign.types import ImageSpan, Sample, Stat, Status, Total

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class RetokenizeModule(Module):
    """A scorer of class ``config.module`` with head `reward`, its own tokenizer and ``config.chat_template``."""

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ValueError for a model that is no frozen reward model."""
        if config.head != "reward" or not config.frozen:
            raise ValueError(f"models.{name}.chat_template: only a frozen model with head `reward` reads text")

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        self.check_before_setup()
        if context.tokenizer is None:
            key = f"models.{context.model}.chat_template"
            raise ValueError(f"{key}: the context names no tokenizer to read samples with")
        self.scorer = resolve_class(config.module, "coalign.backends")(config, context)

    def setup(self) -> None:
        self.policy_tokenizer = pretrained.read_run_tokenizer(self.context)
        self.reader = ConversationReader(self.config, self.context.images)
        self.scorer.arena = self.arena
        self.scorer.setup()

    def close(self) -> None:
        self.scorer.close()

    def move(self, to: str, components: Sequence[str]) -> None:
        self.scorer.move(to, components)

    def measure_memory(self) -> Mapping[str, int]:
        return self.scorer.measure_memory()

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Tensor | Total]:
        """The column ``reward`` f32[N] (``into`` renames it): NaN for unfinished rows and those the template refuses.
        `reward/cut` counts the conversations that are too long, whose beginning is left out, and `reward/markers` those
        in which a special token is spelled, which the model reads as text."""
        name, column = into or "reward", torch.full((len(batch),), float("nan"))
        rows = is_finished(cast(Tensor, batch["status"])).nonzero().flatten()
        samples = read_samples(batch.select(rows), self.policy_tokenizer)
        spelled = sum(self.reader.is_spelled(sample.messages) for sample in samples)
        read = self._read(samples)
        if read:
            packed = self.reader.pack(list(read.values()), [samples[i].group for i in read])
            (column[rows[list(read)]],) = self.scorer.forward_step(packed).values()
        cut = sum(len(conversation.tokens) > self.reader.longest for conversation in read.values())
        return {name: column, f"{name}/cut": Total(float(cut)), f"{name}/markers": Total(float(spelled))}

    def _read(self, samples: Sequence[Sample]) -> dict[int, TokenizedConversation]:
        """Read the samples, by number, without those whose messages the template refuses. BadRow if it refuses all."""
        read, refused = {}, []
        for i, sample in enumerate(samples):
            cut = sample.status == Status.TRUNCATED
            try:
                read[i] = self.reader.read(sample.messages, sample.meta.get("tools"), truncated=cut)
            except BadRow as error:
                refused.append(error)
        if refused and not read:
            raise refused[0]
        if refused:
            log.warning(
                f"models.{self.context.model} cannot read {len(refused)} of {len(samples)} samples: {refused[0]}"
            )
        return read


class TokenizedConversation(NamedTuple):
    """Tokens up to the one that a score is read at, how many come before the assistant's first one, where images stand
    in them, and a mask of the assistant's tokens and the ends of its turns."""

    tokens: list[int]
    prompt_length: int = 0
    images: tuple[ImageSpan, ...] = ()
    mask: list[bool] = []


class ConversationReader:
    """Tokenizes conversations for a reward model; ``longest``: the most tokens that the model can take. ``images``: how
    a model that sees reads them. ``reasoning``: what it was shown of thoughts. Raises ValueError if the tokenizer has
    no template and ``config.chat_template`` gives none."""

    def __init__(
        self, config: ModelConfig, images: ImagesConfig | None = None, reasoning: ReasoningPolicy | None = None
    ) -> None:
        settings = (config.chat_template or "auto", config.chat_template_kwargs, reasoning)
        placeholders = pretrained.read_placeholders(config, images)
        tokenizer = pretrained.read_tokenizer(config)
        self._template = templates.load_template(tokenizer, *settings, placeholders=placeholders)
        hf = pretrained.read_config(config)
        limits = (pretrained.read_context_length(hf), config.max_tokens_per_micro)
        self.longest = min(limit for limit in (*limits, 2**31) if limit)
        self._score_at = pretrained.find_score_at(config, hf)

    def read(
        self, messages: Sequence[Message], tools: Tools | None = None, *, truncated: bool = False
    ) -> TokenizedConversation:
        """Tokenize a conversation; the last message has no end of turn if it was ``truncated``. Raises BadRow if the
        template refuses the messages, or if an image cannot be used."""
        tokens, mask = self._template.conversation(messages, tools)
        images = templates.locate_images(self._template, tokens, messages)
        if self._score_at == "last_trained" or truncated:
            tokens, mask = trim_after_last_trained(tokens, mask)
        if truncated:
            tokens, _ = _split_end(self.tokenizer, tokens)
        return TokenizedConversation(tokens, min(mask.index(True), len(tokens)), images, mask[: len(tokens)])

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._template.tokenizer

    def is_spelled(self, messages: Sequence[Message]) -> bool:
        """Whether the messages spell a special token of the model's tokenizer."""
        return self._template.guard.is_spelled(messages)

    def read_rendered(self, text: str) -> TokenizedConversation:
        """As ``read``, of a conversation that a template has rendered already. BadRow if it is empty. What is blank
        after a special token at its end, as templates write it, comes after the last turn."""
        tokens = self._template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise BadRow("there is nothing to read: the text is empty", "empty")
        if self._score_at == "last_trained":
            special = list_special_tokens(self.tokenizer)
            stop = max((i + 1 for i, token in enumerate(tokens) if token in special), default=len(tokens))
            if not templates.decode(self.tokenizer, tokens[stop:]).strip():
                tokens = tokens[:stop]
        return TokenizedConversation(tokens)

    def pack(self, read: Sequence[TokenizedConversation], groups: Sequence[int]) -> Batch:
        """Conversations as a Batch, whose groups share prompts. The beginning of what is too long is left out."""
        bos = cast(int | None, self._template.tokenizer.bos_token_id)
        fitted = [_cut_left(text, self.longest, bos) for text in read]
        tokens = torch.tensor([token for text in fitted for token in text.tokens], dtype=torch.int32)
        prompts = torch.tensor([text.prompt_length for text in fitted], dtype=torch.int32)
        lengths = torch.tensor([len(text.tokens) for text in fitted])
        columns = {"group": torch.tensor(groups), "prompt_length": prompts, "images": [text.images for text in fitted]}
        return Batch(lengths, {"tokens": tokens}, columns)


def _cut_left(conversation: TokenizedConversation, longest: int, bos: int | None) -> TokenizedConversation:
    """Cut off the beginning: the score is read at the end. A BOS stays. An image goes as a whole."""
    tokens, prompt, spans, mask = conversation
    drop = max(0, len(tokens) - longest)
    if not drop:
        return conversation
    first = int(tokens[0] == bos)
    for image in split_images(spans):
        if image[0].start < first + drop < image[-1].stop:
            drop = image[-1].stop - first
    kept = tuple(replace(span, start=span.start - drop) for span in spans if span.start >= first + drop)
    tokens, mask = tokens[:first] + tokens[first + drop :], mask[:first] + mask[first + drop :]
    return TokenizedConversation(tokens, max(first, prompt - drop), kept, mask)


Span = tuple[list[int], list[int]]  # indices of the student's tokens, and of the teacher's


class CrossTokenizerModule(RetokenizeModule):
    """A teacher of class ``config.module`` with head `lm`, its own tokenizer and ``config.chat_template``."""

    @classmethod
    def columns(cls, config: ModelConfig, context: Context) -> tuple[str, ...]:
        return ("ref_logprobs",)

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ValueError for a model that is no frozen language model."""
        if config.head != "lm" or not config.frozen:
            raise ValueError(f"models.{name}.chat_template: only a frozen language model reads a student's text")

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Any]:
        """The column ``ref_logprobs`` f32[T], such that its sum over a span is the teacher's log-prob of that text.

        A token gets the student's own log-prob (the column `rollout_logprobs`) and an equal share of the span's
        difference, so each token of a span is credited alike. Where the tokenizers are one, these are the teacher's
        log-probs. Turns whose text the teacher's template changes, and conversations that it refuses or that are too
        long, keep the student's log-probs: nothing is learned from them. ValueError without `rollout_logprobs`.

        Metrics: `<model>/span`, the student's tokens in a span; `<model>/unaligned`, tokens that nothing is learned
        from; `<model>/cut`, conversations that were too long.
        """
        if "rollout_logprobs" not in batch:
            raise ValueError(f"models.{self.context.model} reads text: it needs the column `rollout_logprobs`")
        logprobs = cast(Tensor, batch["rollout_logprobs"]).double()
        result = logprobs.clone()
        rows = is_finished(cast(Tensor, batch["status"])).nonzero().flatten()
        samples = read_samples(batch.select(rows), self.policy_tokenizer)
        read = self._read(samples)
        fitting = {i: text for i, text in read.items() if len(text.tokens) <= self.reader.longest}
        spans: dict[int, list[Span]] = {}
        for i, text in fitting.items():
            student = samples[i].tokens.tolist(), samples[i].loss_mask.tolist()
            spans[i] = self._align(student, (text.tokens, text.mask))
        if fitting:
            packed = self.reader.pack([*fitting.values()], [samples[i].group for i in fitting])
            packed = packed.with_(loss_mask=torch.tensor([m for text in fitting.values() for m in text.mask]))
            scored = cast(Any, self.scorer).forward_step(packed)["ref_logprobs"].double()
            for i, begin in zip(fitting, packed.offsets[:-1].tolist(), strict=True):
                first = int(batch.offsets[rows[i]])
                for mine, theirs in spans[i]:
                    here = first + torch.tensor(mine)
                    difference = scored[begin + torch.tensor(theirs)].sum() - logprobs[here].sum()
                    result[here] += difference / len(mine)
        span_lengths = [len(mine) for some in spans.values() for mine, _ in some]
        trained = float(cast(Tensor, batch["loss_mask"]).sum())
        name = self.context.model
        return {
            into or "ref_logprobs": result.float(),
            f"{name}/span": Stat(float(sum(span_lengths)), float(len(span_lengths))),
            f"{name}/unaligned": Stat(trained - sum(span_lengths), trained),
            f"{name}/cut": Total(float(len(read) - len(fitting))),
        }

    def _align(self, student: tuple[list[int], list[bool]], teacher: tuple[list[int], list[bool]]) -> list[Span]:
        """The spans of all turns that the student sampled; none if the template merges turns or leaves some out. Turns
        of the assistant in the prompt come before these."""
        mine, theirs = (_find_turns(mask) for _, mask in (student, teacher))
        if len(mine) > len(theirs):
            return []
        spans = []
        for a, b in zip(mine, theirs[len(theirs) - len(mine) :], strict=True):
            tokenizers = self.policy_tokenizer, self.reader.tokenizer
            pairs = align(tokenizers[0], [student[0][i] for i in a], tokenizers[1], [teacher[0][i] for i in b])
            spans += [([a[i] for i in left], [b[i] for i in right]) for left, right in pairs]
        return spans


def align(student: Any, mine: Sequence[int], teacher: Any, theirs: Sequence[int]) -> list[Span]:
    """The spans of a turn, given as the tokens of both tokenizers; none if the texts differ. White space around the
    text, which a template trims or adds, belongs to the first and the last span. The special tokens that end the turn
    are a span of their own, if both have them."""
    student_tokens, student_end = _split_end(student, mine)
    teacher_tokens, teacher_end = _split_end(teacher, theirs)
    sides = (student, student_tokens), (teacher, teacher_tokens)
    texts = [tokenizer.decode(tokens) for tokenizer, tokens in sides]
    leads = [0 if texts[0] == texts[1] else len(text) - len(text.lstrip()) for text in texts]
    length = len(texts[0]) if texts[0] == texts[1] else len(texts[0].strip())
    if texts[0] != texts[1] and texts[0].strip() != texts[1].strip():
        return []
    spans: list[Span] = []
    if student_tokens and teacher_tokens:
        ends = [
            [min(max(end - lead, 0), length) for end in _find_token_ends(*side)]
            for side, lead in zip(sides, leads, strict=True)
        ]
        cuts = sorted(({*ends[0]} & {*ends[1]}) - {0}) or [0]
        spans = [([], []) for _ in cuts]
        for i, token_ends in enumerate(ends):
            for token, end in enumerate(token_ends):
                spans[bisect_left(cuts, end)][i].append(token)
    if student_end and teacher_end:
        spans.append(([*range(len(student_tokens), len(mine))], [*range(len(teacher_tokens), len(theirs))]))
    return [span for span in spans if all(span)]


def _find_token_ends(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """The number of characters of the text that are complete after each token. A token inside of a character gets the
    end of the token that completes it. Only a few tokens are decoded at a time, each with those before it, on which the
    space at its beginning may depend."""
    ends, begin, complete, written = [0] * len(tokens), 0, 0, 0
    for i in range(len(tokens)):
        now = tokenizer.decode(tokens[begin : i + 1])
        if now.endswith("\ufffd") and i + 1 < len(tokens):
            continue
        written += len(now) - len(tokenizer.decode(tokens[begin:complete]))
        ends[complete : i + 1] = [written] * (i + 1 - complete)
        begin, complete = complete, i + 1
    return ends


def _split_end(tokenizer: Any, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """The tokens before the special ones at the end, and these."""
    special, count = list_special_tokens(tokenizer), len(tokens)
    while count and tokens[count - 1] in special:
        count -= 1
    return [*tokens[:count]], [*tokens[count:]]


def _find_turns(mask: Sequence[bool]) -> list[list[int]]:
    """The indices of each run of True."""
    chosen = [i for i, is_chosen in enumerate(mask) if is_chosen]
    if not chosen:
        return []
    begins = [0, *(k + 1 for k, (a, b) in enumerate(pairwise(chosen)) if b != a + 1), len(chosen)]
    return [chosen[a:b] for a, b in pairwise(begins)]
