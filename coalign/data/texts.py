"""Sequences read as text: what reward functions, reward models and people see of a sample."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from coalign.data.batch import Batch
from coalign.types import Sample, Status

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def read_samples(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The batch (with ``prompt_length``) as Samples with their texts.

    ``prompt`` is as the model saw it, special tokens included; ``raw_response`` is all that follows, likewise.
    ``response`` is what the policy said last (of several turns, the last one), without special tokens. ``messages`` is
    the episode's conversation; of a single turn the row's (else the prompt as the user's words), with the response.
    """
    samples = batch.samples()
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    for sample, start in zip(samples, batch["prompt_length"].tolist(), strict=True):
        sample.prompt = decode(sample.tokens[:start])
        sample.raw_response = decode(sample.tokens[start:])
        sample.response = decode(sample.tokens[_last_turn(sample, start) :], skip_special_tokens=True)
        asked = sample.meta.get("messages") or [{"role": "user", "content": sample.prompt}]
        sample.messages = sample.messages or [*asked, {"role": "assistant", "content": sample.response}]
    return samples


def _last_turn(sample: Sample, start: int) -> int:
    """Where what the policy said last begins: after the last token that it did not choose."""
    given = (~sample.loss_mask[start:]).nonzero()
    return start + int(given[-1]) + 1 if len(given) and bool(sample.loss_mask[-1]) else start


def at_their_end(status: Tensor) -> Tensor:
    """bool[N]: the sequences that can be judged; those that failed, or still go on, cannot."""
    return (status == Status.OK) | (status == Status.TRUNCATED)
