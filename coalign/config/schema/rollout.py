"""Sampling, generators, environments, and the selection of samples to train on."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from coalign.config.errors import Conflict
from coalign.config.schema.section import Function, Probability, Section


class EnvironmentConfig(Function):
    """One of several environments: a function of coalign.environments, or a dotted path, and its arguments."""

    home = "coalign.environments"

    timeout: PositiveFloat | None = None
    """In place of `rollout.timeout`."""


class RolloutConfig(EnvironmentConfig):
    """The environment that produces samples: a function of coalign.environments, or a dotted path; and its limits."""

    fn: str = "single_turn"
    environments: dict[str, EnvironmentConfig] = {}
    """In place of `fn`: several environments by name. Each row of data names its own (`environment` of its source, or
    of the row itself)."""
    timeout: PositiveFloat = 300.0
    """Seconds that an environment may take besides the policy's turns, before its sample counts as failed."""
    oversample: Annotated[float, Field(ge=1.0)] = 1.0
    """Prompts started per prompt that is trained on. Once enough groups are complete, the rest are stopped: dropped
    or, with `round_tokens`, continued later."""
    round_tokens: PositiveInt | None = None
    """Partial rollout: at most this many new tokens per response and rollout. The next one continues it, with newer
    weights."""
    max_age: NonNegativeInt | None = None
    """Maximum staleness of the oldest token of a group, in weight versions; older groups are dropped. None:
    `runtime.max_staleness`, and with `round_tokens` as many more as the longest response needs, at least 4."""
    kv: Literal["recompute", "keep"] = "recompute"
    """KV cache of responses that are under way when new weights come (`runtime.max_staleness`). `recompute`: it is
    computed again, so that later tokens depend on the new weights alone. `keep`: it stays, which is faster."""
    routing_replay: bool = False
    """For models with experts: the policy records the experts that it chooses for each token, and its trainer chooses
    them again (2510.11370), in training and for the log-probs before it."""
    samples_key: str | None = None
    """Key of a row that holds the number of samples of its prompt, in place of `runtime.samples_per_prompt`."""
    max_new_tokens_key: str | None = None
    """Key of a row that holds a token limit of its responses, below the policy's `sampling.max_new_tokens`."""
    group_tokens: PositiveInt | None = None
    """Limit of new tokens of all samples of a prompt together, over all rounds and turns. Each sample gets an equal
    share, and is truncated at its end."""

    @property
    def has_episodes(self) -> bool:
        """Whether samples are played by environments; policies do `single_turn` alone without."""
        return bool(self.environments) or self.fn != "single_turn"

    def check(self) -> None:
        if self.environments and (self.fn != "single_turn" or self.arguments):
            keys = ", ".join(["fn", *self.arguments])
            raise Conflict(("environments",), f"is set beside {keys} of one environment: keep one of the two forms")
        for name in self.environments:
            if not re.fullmatch(r"[\w-]+", name):
                raise Conflict(("environments", name), "is no name; metrics need one of letters, digits, _ and -")
        if self.round_tokens is not None and self.has_episodes:
            names = ", ".join(self.environments) or self.fn
            raise Conflict(
                ("round_tokens",),
                f"is set, and the environment `{names}` cannot be cut in the middle of an episode: leave it out, or "
                "use `fn: single_turn` (`oversample` works with every environment)",
            )


class FilterConfig(Function):
    """Selects the groups to train on: a function of columns that returns one bool per sequence. Rejected groups are
    replaced by new ones."""

    home = "coalign.algorithms.group_filters"

    max_rounds: PositiveInt = 10
    """Maximum rollouts of one step, which then trains on what it has."""


class ReplayConfig(Function):
    """Trains again on samples of earlier steps: a function of the last batches (newest last) that returns one."""

    home = "coalign.engine.transforms"

    steps: PositiveInt = 1
    """Batches kept besides the newest."""


class CurriculumConfig(Section):
    """Skips prompts whose known success rate is outside these bounds. The rate is measured on the run's own samples and
    saved in checkpoints."""

    low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    high: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    forget: PositiveInt | None = None
    """Steps after which a prompt is tried again; None: never."""
    solved: float = 1.0
    """Minimum reward of a correct answer."""

    def check(self) -> None:
        if self.low > self.high:
            raise Conflict(("low",), f"is {self.low}, above high ({self.high})")


class GuardsConfig(Section):
    """Limits of a healthy step. NaN and infinity in a loss or a gradient norm always count as unhealthy."""

    max_approx_kl: PositiveFloat | None = None
    """Limit of `loss/approx_kl`: how far the updates of a step move the policy (nats per token)."""
    max_kl_ref: PositiveFloat | None = None
    """Limit of `loss/kl_ref`: divergence of the policy from the reference (nats per token)."""
    min_entropy: NonNegativeFloat | None = None
    """Limit of `loss/entropy` (nats per token), which policy losses report with `loss.measure_entropy: true`."""
    max_mismatch: PositiveFloat | None = None
    """Limit of `loss/mismatch`: the mean |Δ log-prob| between trainer and sampler."""
    max_mismatch_max: PositiveFloat | None = None
    """Limit of `loss/mismatch_max`: the greatest |Δ log-prob| between them."""
    max_mismatch_kl: PositiveFloat | None = None
    """Limit of `loss/mismatch_kl`: the divergence between them (nats per token)."""
    min_ess: Probability | None = None
    """Limit of `loss/ess`: the effective sample size of the importance weights, from 0 to 1."""
    patience: PositiveInt = 1
    """Consecutive unhealthy steps before `action`; for NaN and infinity it is immediate."""
    action: Literal["stop", "rollback"] = "stop"
    """`rollback` returns to the last good checkpoint and continues with later data."""
    max_rollbacks: PositiveInt = 3
