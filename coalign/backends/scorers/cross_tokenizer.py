"""Runs a teacher with its own tokenizer: its log-probs of spans of text, shared among the student's tokens.

Both texts of a turn are cut where a token ends in the student's tokens and in the teacher's. Between two cuts lies a
span, the end of the turn is one more, and a span's log-prob is the sum over its tokens, in either tokenizer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from coalign.backends.scorers.retokenize import RetokenizeModule
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.data.templates import is_finished, list_special_tokens, read_samples
from coalign.roles import Context
from coalign.types import Stat, Total

Span = tuple[list[int], list[int]]  # places of the student's tokens, and of the teacher's


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
        own = cast(Tensor, batch["rollout_logprobs"]).double()
        result = own.clone()
        rows = is_finished(cast(Tensor, batch["status"])).nonzero().flatten()
        samples = read_samples(batch.select(rows), self.policy_tokenizer)
        read = self._read(samples)
        fitting = {i: tokens for i, (tokens, _) in read.items() if len(tokens) <= self.reader.longest}
        masks = {i: self.reader.read_mask(samples[i].messages) for i in fitting}
        spans: dict[int, list[Span]] = {}
        for i, tokens in fitting.items():
            student = samples[i].tokens.tolist(), samples[i].loss_mask.tolist()
            spans[i] = self._align(student, (tokens, masks[i]))
        if fitting:
            lengths = torch.tensor([len(tokens) for tokens in fitting.values()])
            columns = {
                "tokens": torch.tensor([t for tokens in fitting.values() for t in tokens], dtype=torch.int32),
                "loss_mask": torch.tensor([m for i in fitting for m in masks[i]]),
            }
            group = torch.tensor([samples[i].group for i in fitting])
            prompts = torch.tensor([read[i][1] for i in fitting], dtype=torch.int32)
            packed = Batch(lengths, columns, {"group": group, "prompt_length": prompts})
            scored = cast(Any, self.scorer).forward_step(packed)["ref_logprobs"].double()
            for i, begin in zip(fitting, (lengths.cumsum(0) - lengths).tolist(), strict=True):
                first = int(batch.offsets[rows[i]])
                for mine, theirs in spans[i]:
                    here = first + torch.tensor(mine)
                    difference = scored[begin + torch.tensor(theirs)].sum() - own[here].sum()
                    result[here] += difference / len(mine)
        found = [len(mine) for some in spans.values() for mine, _ in some]
        trained = float(cast(Tensor, batch["loss_mask"]).sum())
        name = self.context.model
        return {
            into or "ref_logprobs": result.float(),
            f"{name}/span": Stat(float(sum(found)), float(len(found))),
            f"{name}/unaligned": Stat(trained - sum(found), trained),
            f"{name}/cut": Total(float(len(read) - len(fitting))),
        }

    def _align(self, student: tuple[list[int], list[bool]], teacher: tuple[list[int], list[bool]]) -> list[Span]:
        """The spans of all turns that the student sampled; none if the template merges turns or leaves some out.

        Turns of the assistant in the prompt come before these.
        """
        mine, theirs = (_find_turns(mask) for _, mask in (student, teacher))
        if len(mine) > len(theirs):
            return []
        found = []
        for a, b in zip(mine, theirs[len(theirs) - len(mine) :], strict=True):
            tokenizers = self.policy_tokenizer, self.reader.tokenizer
            pairs = align(tokenizers[0], [student[0][i] for i in a], tokenizers[1], [teacher[0][i] for i in b])
            found += [([a[i] for i in one], [b[i] for i in other]) for one, other in pairs]
        return found


def align(student: Any, mine: Sequence[int], teacher: Any, theirs: Sequence[int]) -> list[Span]:
    """The spans of a turn, given as the tokens of both tokenizers; none if the texts differ.

    White space around the text, which a template trims or adds, belongs to the first and the last span. The special
    tokens that end the turn are a span of their own, if both have them.
    """
    (own, own_end), (other, other_end) = _split_end(student, mine), _split_end(teacher, theirs)
    sides = (student, own), (teacher, other)
    texts = [tokenizer.decode(tokens) for tokenizer, tokens in sides]
    leads = [0 if texts[0] == texts[1] else len(text) - len(text.lstrip()) for text in texts]
    length = len(texts[0]) if texts[0] == texts[1] else len(texts[0].strip())
    if texts[0] != texts[1] and texts[0].strip() != texts[1].strip():
        return []
    spans: list[Span] = []
    if own and other:
        ends = [
            [min(max(end - lead, 0), length) for end in find_token_ends(*side)]
            for side, lead in zip(sides, leads, strict=True)
        ]
        cuts = sorted(({*ends[0]} & {*ends[1]}) - {0}) or [0]
        spans = [([], []) for _ in cuts]
        for i, of_tokens in enumerate(ends):
            for token, end in enumerate(of_tokens):
                spans[bisect_left(cuts, end)][i].append(token)
    if own_end and other_end:
        places = range(len(own), len(mine)), range(len(other), len(theirs))
        spans.append((list(places[0]), list(places[1])))
    return [span for span in spans if all(span)]


def find_token_ends(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """How many characters of the text are complete after each token.

    A token inside of a character gets the end of the token that completes it. Only a few tokens are decoded at a time,
    each with those before it, on which the space at its beginning may depend.
    """
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
    """The places of each run of True."""
    places = [i for i, chosen in enumerate(mask) if chosen]
    if not places:
        return []
    begins = [0, *(k + 1 for k, (a, b) in enumerate(pairwise(places)) if b != a + 1), len(places)]
    return [places[a:b] for a, b in pairwise(begins)]
