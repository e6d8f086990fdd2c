"""The settings of models that sample, and of the engines that compute for them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from coalign.config.schema.section import Probability, Section


class SamplingConfig(Section):
    """How a policy samples tokens. Log-probs are taken after temperature, before top-k / top-p / min-p truncation."""

    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Probability = 0.0
    repetition_penalty: PositiveFloat = 1.0
    """Penalty of repeated tokens; a policy that is trained must have 1, as no trainer computes penalised log-probs."""
    stop: list[str] = []
    """Strings that end a response; they stay part of it."""


class NativeConfig(Section):
    """The generator of the module `native`."""

    max_sequences: PositiveInt = 256
    """Sequences decoded at the same time."""
    kv_tokens: PositiveInt | None = None
    """Capacity of the KV cache in tokens, over all sequences; None: enough for max_sequences of the longest."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens computed in one forward pass."""
    graphs: bool = True
    """On a device with graphs (CUDA's): launch the decode step as one, in place of kernel by kernel."""


class TransformersConfig(Section):
    """The generator of the module `transformers`, on that library's own cache."""

    max_sequences: PositiveInt = 64
    """Sequences decoded at the same time."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens computed in one forward pass, padding included."""
    batching: Literal["padded", "equal", "whole"] | None = None
    """Which sequences are computed together: all, padded on the left; those of equal length; those of equal length,
    from the first token at every step. None: chosen from the architecture, and tested when weights are loaded."""


class GeneratorSettings(Section):
    """What only a policy reads."""

    parts_per_call: PositiveInt = 1
    """Policies only: each replica returns its groups in this many chunks, each as soon as it is complete. Rewards and
    models on other devices then score them while the rest is generated, but in smaller batches."""
    spread_samples: bool = False
    """Policies with several replicas: distribute single samples in place of prompts with all their samples. The load is
    more even, but each replica with samples of a prompt computes the prompt."""
