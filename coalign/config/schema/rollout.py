"""How samples come about, and which of them are trained on.

How a policy chooses tokens, and the engine that it does so with.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from coalign.config.errors import Conflict
from coalign.config.schema.base import Function, Probability, Section


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


class RolloutConfig(Function):
    """How a sample comes about: an environment (a function of coalign.environments, or a dotted path) and its limits."""

    fn: str = "single_turn"
    timeout: PositiveFloat = 300.0
    """Seconds an environment may take for anything but the policy's own turns; its sample then counts as failed."""
    oversample: Annotated[float, Field(ge=1.0)] = 1.0
    """Prompts begun for each one that is trained on; once enough groups are complete the others are cut short: dropped,
    or, with `round_tokens`, carried on."""
    round_tokens: PositiveInt | None = None
    """Partial roll-out: a response grows by at most this many tokens in one roll-out; what is unfinished goes on in the
    next, under newer weights."""
    max_age: NonNegativeInt | None = None
    """Weight versions that the oldest token of a group may lag behind the step that trains on it; older groups are
    dropped. None: `runtime.max_staleness`, and with `round_tokens` as many more as the longest response needs, 4 at
    least."""

    samples_key: str | None = None
    """Key of a data row that says how many samples its prompt gets, in place of `runtime.samples_per_prompt`."""
    max_new_tokens_key: str | None = None
    """Key of a data row that limits the responses to its prompt, below the policy's `sampling.max_new_tokens`."""
    group_tokens: PositiveInt | None = None
    """The most new tokens of all samples of a prompt together, over all rounds and turns: each gets an equal share, and
    ends as truncated where it is used up."""

    @model_validator(mode="after")
    def _only_single_turns_go_on(self) -> Self:
        if self.round_tokens is not None and self.fn != "single_turn":
            raise Conflict(
                ("round_tokens",),
                f"is set, and the environment `{self.fn}` cannot be cut in the middle of an episode: leave it out, or "
                "use `fn: single_turn` (`oversample` works with every environment)",
            )
        return self


class FilterConfig(Function):
    """Which groups of samples are trained on: a function of columns that returns one bool per sequence. What it takes
    out is drawn again."""

    max_rounds: PositiveInt = 10
    """Roll-outs for one step before it makes do with what there is."""


class ReplayConfig(Function):
    """Samples of earlier steps, trained on again: a function of the last batches (newest last) that returns one."""

    steps: PositiveInt = 1
    """Batches remembered besides the newest."""


class CurriculumConfig(Section):
    """Prompts whose share of right answers is known to be outside of these bounds are passed over. It is that of the
    samples of the run itself, and stays with the checkpoints."""

    low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    high: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    forget: PositiveInt | None = None
    """Steps after which a prompt is tried again; None: never."""
    solved: float = 1.0
    """Reward from which on an answer is right."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.low > self.high:
            raise Conflict(("low",), f"is {self.low}, above high ({self.high})")
        return self


class GuardsConfig(Section):
    """What a healthy step looks like. NaN and infinity in a loss or a gradient norm always count as unhealthy."""

    max_approx_kl: PositiveFloat | None = None
    """Of `loss/approx_kl`: how far the updates of a step move the policy (nats per token)."""
    max_kl_ref: PositiveFloat | None = None
    """Of `loss/kl_ref`: how far the policy is from the reference (nats per token)."""
    min_entropy: NonNegativeFloat | None = None
    """Of `loss/entropy` (nats per token); the losses of a policy report it with `loss.measure_entropy: true`."""
    max_mismatch: PositiveFloat | None = None
    """Of `loss/mismatch`: the mean |Δ log-prob| between trainer and sampler."""
    max_mismatch_max: PositiveFloat | None = None
    """Of `loss/mismatch_max`: the greatest |Δ log-prob| between them."""
    max_mismatch_kl: PositiveFloat | None = None
    """Of `loss/mismatch_kl`: the divergence between them (nats per token)."""
    min_ess: Probability | None = None
    """Of `loss/ess`: the effective sample size of the importance weights, from 0 to 1."""
    patience: PositiveInt = 1
    """Unhealthy steps in a row before something is done; NaN and infinity have none."""
    action: Literal["stop", "rollback"] = "stop"
    """`rollback` goes back to the last good checkpoint, and on with later data."""
    max_rollbacks: PositiveInt = 3
