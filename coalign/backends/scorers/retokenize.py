"""A reward model that reads with its own tokenizer: samples become a conversation, and that its own tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer

from coalign.backends.base import Module
from coalign.backends.pretrained import context_length, read_config, read_tokenizer
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
    """A scorer of class ``config.module`` with head `reward`, behind its own tokenizer and ``config.chat_template``."""

    @classmethod
    def check_settings(cls, config: ModelConfig, name: str, device: torch.device) -> None:
        """Raises ValueError for a model that is no reward model."""
        if config.head != "reward" or not config.frozen:
            raise ValueError(f"models.{name}.chat_template: only a frozen model with head `reward` reads text")

    def __init__(self, config: ModelConfig, context: Context) -> None:
        """Raises what `check_settings` raises, and ValueError if nobody says whose tokens the model is given."""
        super().__init__(config, context)
        self.check_before_setup()
        if context.tokenizer is None:
            raise ValueError(
                f"models.{context.model}.chat_template: the context names no tokenizer to read samples with"
            )
        self.scorer = resolve_class(config.module, "coalign.backends")(config, context)

    def setup(self) -> None:
        trust = self.config.trust_remote_code
        self.policy_tokenizer = AutoTokenizer.from_pretrained(self.context.tokenizer, trust_remote_code=trust)
        self.reader = ConversationReader(self.config)
        self.scorer.arena = self.arena
        self.scorer.setup()

    def close(self) -> None:
        self.scorer.close()

    def move(self, to: str, parts: Sequence[str]) -> None:
        self.scorer.move(to, parts)

    def held(self) -> Mapping[str, int]:
        return self.scorer.held()

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Tensor | Total]:
        """The column ``reward`` f32[N] (``into`` renames it): NaN for rows that are not at their end, or that the
        template refuses. And `reward/cut`: the conversations that are too long, whose beginning is left out.
        """
        name, column = into or "reward", torch.full((len(batch),), float("nan"))
        rows = is_finished(batch["status"]).nonzero().flatten()
        samples = read_samples(batch.select(rows), self.policy_tokenizer)
        read = self._read(samples)
        if read:
            packed = self.reader.packed(list(read.values()), [samples[i].group for i in read])
            (column[rows[list(read)]],) = self.scorer.forward_step(packed).values()
        cut = sum(len(tokens) > self.reader.longest for tokens, _ in read.values())
        return {name: column, f"{name}/cut": Total(float(cut))}

    def _read(self, samples: Sequence[Sample]) -> dict[int, tuple[list[int], int]]:
        """What the reader makes of each sample, by its number; without those whose messages the template refuses.

        Raises BadRow if it refuses all.
        """
        read, refused = {}, []
        for i, sample in enumerate(samples):
            try:
                read[i] = self.reader.read(sample.messages)
            except BadRow as error:
                refused.append(error)
        if refused and not read:
            raise refused[0]
        if refused:
            log.warning(
                "models.%s cannot read %d of %d samples: %s",
                self.context.model,
                len(refused),
                len(samples),
                refused[0],
            )
        return read


class ConversationReader:
    """How a reward model reads a conversation: its tokenizer, template and ``longest``, the most tokens it can take."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises ValueError if the tokenizer has no template and ``config.chat_template`` gives none."""
        self._template = load_template(read_tokenizer(config), config.chat_template or "auto")
        limits = (context_length(read_config(config)), config.max_tokens_per_micro)
        self.longest = min(limit for limit in (*limits, 2**31) if limit)

    def read(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[list[int], int]:
        """The tokens, and how many of them come before the assistant's first. BadRow if the template refuses them."""
        tokens, said = self._template.conversation(messages, tools)
        return tokens, said.index(True)

    def rendered(self, text: str) -> tuple[list[int], int]:
        """The tokens of a conversation that went through a template already, as ``read`` returns them."""
        tokens = self._template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not tokens:
            raise BadRow("there is nothing to read: the text is empty", "empty")
        return tokens, 0

    def packed(self, read: Sequence[tuple[list[int], int]], groups: Sequence[int]) -> Batch:
        """Conversations as a Batch, each without what is too much of its beginning; neighbours of a group share their
        prompt."""
        bos = self._template.tokenizer.bos_token_id
        fitted = [_cut_left(tokens, prompt, self.longest, bos) for tokens, prompt in read]
        return Batch(
            torch.tensor([len(tokens) for tokens, _ in fitted]),
            {"tokens": torch.tensor([t for tokens, _ in fitted for t in tokens], dtype=torch.int32)},
            {
                "group": torch.tensor(groups),
                "prompt_length": torch.tensor([prompt for _, prompt in fitted], dtype=torch.int32),
            },
        )


def _cut_left(tokens: list[int], prompt: int, longest: int, bos: int | None) -> tuple[list[int], int]:
    """The score stands at the end, so the end stays; and a BOS."""
    drop = max(0, len(tokens) - longest)
    first = int(tokens[0] == bos)
    return tokens[:first] + tokens[first + drop :], max(first, prompt - drop)
