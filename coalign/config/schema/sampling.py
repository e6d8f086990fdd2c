"""How a policy chooses tokens, and the engine that it does so with."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from coalign.config.schema.base import Probability, Section


class SamplingConfig(Section):
    """How a policy chooses tokens. Log-probs are those of the distribution that was sampled from (after temperature,
    before top-k / top-p / min-p truncation)."""

    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Probability = 0.0
    repetition_penalty: PositiveFloat = 1.0
    stop: list[str] = []
    """Strings that end a response; the string stays part of it."""


class NativeConfig(Section):
    """The embedded generation engine."""

    max_sequences: PositiveInt = 256
    """Sequences decoded at once."""
    kv_tokens: PositiveInt | None = None
    """Tokens the KV cache holds over all sequences; None: as many as max_sequences of the longest need."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens computed in one forward."""
