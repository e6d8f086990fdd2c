"""Runs a reward model with its own tokenizer: samples become conversations, and these the model's own tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from coalign.backends.base import Module
from coalign.backends.pretrained import read_config, read_context_length, read_run_tokenizer, read_tokenizer
from coalign.config.functions import resolve_class
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.data.messages import Message
from coalign.data.sources import BadRow
from coalign.data.templates import Tools, is_finished, load_template, read_samples
from coalign.roles import Context
from coalign.types import Sample, Total

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
            where = f"models.{context.model}.chat_template"
            raise ValueError(f"{where}: the context names no tokenizer to read samples with")
        self.scorer = resolve_class(config.module, "coalign.backends")(config, context)

    def setup(self) -> None:
        self.policy_tokenizer = read_run_tokenizer(self.context)
        self.reader = ConversationReader(self.config)
        self.scorer.arena = self.arena
        self.scorer.setup()

    def close(self) -> None:
        self.scorer.close()

    def move(self, to: str, parts: Sequence[str]) -> None:
        self.scorer.move(to, parts)

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
        cut = sum(len(tokens) > self.reader.longest for tokens, _ in read.values())
        return {name: column, f"{name}/cut": Total(float(cut)), f"{name}/markers": Total(float(spelled))}

    def _read(self, samples: Sequence[Sample]) -> dict[int, tuple[list[int], int]]:
        """Read the samples, by number, without those whose messages the template refuses. BadRow if it refuses all."""
        read, refused = {}, []
        for i, sample in enumerate(samples):
            try:
                read[i] = self.reader.read(sample.messages)
            except BadRow as error:
                refused.append(error)
        if refused and not read:
            raise refused[0]
        if refused:
            counts = f"{len(refused)} of {len(samples)} samples"
            log.warning(f"models.{self.context.model} cannot read {counts}: {refused[0]}")
        return read


class ConversationReader:
    """Tokenizes conversations for a reward model; ``longest``: the most tokens that the model can take.

    Raises ValueError if the tokenizer has no template and ``config.chat_template`` gives none.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._template = load_template(read_tokenizer(config), config.chat_template or "auto")
        limits = (read_context_length(read_config(config)), config.max_tokens_per_micro)
        self.longest = min(limit for limit in (*limits, 2**31) if limit)

    def read(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[list[int], int]:
        """The tokens, and how many come before the assistant's first. BadRow if the template refuses the messages."""
        tokens, mask = self._template.conversation(messages, tools)
        return tokens, mask.index(True)

    def read_mask(self, messages: Sequence[Message], tools: Tools | None = None) -> list[bool]:
        """Which of the tokens of ``read`` are the assistant's words and the ends of its turns."""
        return self._template.conversation(messages, tools)[1]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._template.tokenizer

    def is_spelled(self, messages: Sequence[Message]) -> bool:
        """Whether the messages spell a special token of the model's tokenizer."""
        return self._template.guard.is_spelled(messages)

    def read_rendered(self, text: str) -> tuple[list[int], int]:
        """As ``read``, of a conversation that a template has rendered already. BadRow if it is empty."""
        tokens = self._template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise BadRow("there is nothing to read: the text is empty", "empty")
        return tokens, 0

    def pack(self, read: Sequence[tuple[list[int], int]], groups: Sequence[int]) -> Batch:
        """Conversations as a Batch, whose groups share prompts. The beginning of what is too long is left out."""
        bos = cast(int | None, self._template.tokenizer.bos_token_id)
        fitted = [_cut_left(tokens, prompt, self.longest, bos) for tokens, prompt in read]
        tokens = torch.tensor([token for tokens, _ in fitted for token in tokens], dtype=torch.int32)
        prompts = torch.tensor([prompt for _, prompt in fitted], dtype=torch.int32)
        lengths = torch.tensor([len(tokens) for tokens, _ in fitted])
        return Batch(lengths, {"tokens": tokens}, {"group": torch.tensor(groups), "prompt_length": prompts})


def _cut_left(tokens: list[int], prompt: int, longest: int, bos: int | None) -> tuple[list[int], int]:
    """Cut off the beginning: the score is read at the end. A BOS stays."""
    drop = max(0, len(tokens) - longest)
    first = int(tokens[0] == bos)
    return tokens[:first] + tokens[first + drop :], max(first, prompt - drop)
