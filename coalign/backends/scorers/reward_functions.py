"""Runs reward functions as a model of the run: its ``forward_step`` calls them with decoded samples."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from coalign.backends.base import Module
from coalign.config.functions import bind, resolve
from coalign.config.schema import ModelConfig, RewardConfig
from coalign.data.batch import Batch
from coalign.data.templates import is_finished, read_samples
from coalign.processes.function_process import build_pool
from coalign.rewards.calls import RewardCaller, RewardFailure, RewardFunction, RewardOutcome, find_argument
from coalign.roles import Context
from coalign.types import Sample, Stat, Stats, Total, merge_stats

log = logging.getLogger(__name__)


class RewardModule(Module):
    """Scores batches with the run's reward functions (``context.rewards``; see coalign.rewards)."""

    exclusive = False  # models may compute while it waits for functions

    @classmethod
    def columns(cls, config: ModelConfig, context: Context) -> tuple[str, ...]:
        names = [f"reward/{reward.called}" for reward in context.rewards]
        return (*names, *(f"{name}/failure" for name in names))

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        if not context.rewards:
            raise ValueError("the run names no reward function: add `reward: {fn: …}` to the configuration")
        if context.tokenizer is None:
            raise ValueError("module 'reward' needs the policy's tokenizer to read responses; the context names none")
        self.caller: RewardCaller | None = None
        self._failed: Counter[str] = Counter()  # samples that each function has failed on

    def setup(self) -> None:
        from coalign.backends.pretrained import read_run_tokenizer  # slow, and `coalign check` asks for columns alone

        self.tokenizer = read_run_tokenizer(self.context)
        self.functions = build_reward_functions(self.context.rewards)
        self.caller = RewardCaller()
        self.caller.start(self.functions)

    def close(self) -> None:
        if self.caller is not None:
            self.caller.close()
        for name, count in self._failed.items():
            log.warning(f"reward function '{name}' failed on {count} samples in all")

    def forward_step(self, batch: Batch) -> dict[str, Any]:
        """Score the finished samples of ``batch`` with every function; an episode by its first row.

        Returns columns ``reward/<function>`` f32[N], NaN where the function failed for good, is not for the sample's
        source, or the sample is unfinished, and ``reward/<function>/failure``, a string for each row that says what
        went wrong. Stats: the counts ``reward/failed/<reason>`` and ``reward/<function>/service_failures`` (samples
        whose call was repeated, for each time), and the means of what a function returns besides; values that are no
        finite numbers are counted in ``reward/<function>/<key>/not_logged``. The caller decides whether too many have
        failed.
        """
        assert self.caller is not None
        everything, batch = batch, batch.first_branches()
        rows = is_finished(cast(Tensor, batch["status"]))
        samples = read_samples(batch.select(rows), self.tokenizer)
        if everything.episode is not None and "turn_rewards" in batch:  # those of all its rows
            for sample, episode in zip(samples, everything.as_episodes().select(rows).rows(), strict=True):
                sample.turn_rewards = episode["turn_rewards"]
        outcomes = self.caller.score(self.functions, samples)
        columns: dict[str, Any] = {}
        for function, scored in zip(self.functions, outcomes, strict=True):
            column = columns[f"reward/{function.name}"] = torch.full((len(batch),), float("nan"))
            mine = rows.clone()
            mine[rows] = torch.tensor([function.is_for(sample) for sample in samples], dtype=torch.bool)
            values = [float("nan") if isinstance(o, RewardFailure) else o["reward"] for o in scored]
            column[mine] = torch.tensor(values)
            texts = iter(str(outcome) if isinstance(outcome, RewardFailure) else "" for outcome in scored)
            columns[f"reward/{function.name}/failure"] = [next(texts) if row else "" for row in mine.tolist()]
            self._report(function, [*filter(function.is_for, samples)], scored)
        failures, self.caller.service_failures = self.caller.service_failures, Counter()
        waits = {f"reward/{name}/service_failures": Total(float(count)) for name, count in failures.items() if count}
        return {**everything.spread(columns), **_stats(self.functions, outcomes), **waits}

    def _report(self, function: RewardFunction, samples: Sequence[Sample], scored: Sequence[RewardOutcome]) -> None:
        """Log a function's first failure, with its traceback. Later ones are counted."""
        failures = [(s, o) for s, o in zip(samples, scored, strict=True) if isinstance(o, RewardFailure)]
        is_new = function.name not in self._failed
        if failures:
            self._failed[function.name] += len(failures)
        if failures and is_new:
            sample, first = failures[0]
            message = (
                f"reward function '{function.name}' failed on {len(failures)} of {len(samples)} samples "
                f"(at most {function.retries + 1} attempts each); first on group {sample.group}, index {sample.index}: "
                f"{first}; later failures are counted in reward/failed/…"
            )
            log.warning(message, exc_info=first.error if first.reason in ("raised", "bug") else None)


def build_reward_functions(configs: Sequence[RewardConfig]) -> list[RewardFunction]:
    """The functions that `reward:` lists. Raises what `resolve_reward` raises."""
    return [build_reward_function(config, f"reward.{i}") for i, config in enumerate(configs)]


def build_reward_function(config: RewardConfig, section: str) -> RewardFunction:
    """The function that a configuration names, with its arguments. Raises what `resolve_reward` raises. What is not of
    this package runs in processes of its own: see `build_pool`."""
    fn, arguments = resolve_reward(config, section)
    return RewardFunction(
        config.called,
        fn,
        arguments,
        weight=config.weight,
        timeout=config.timeout,
        retries=config.retries,
        patience=config.patience,
        pool=build_pool(cast(str, config.fn), fn, arguments, config.process_memory_mb),
        sources=config.sources,
    )


def resolve_reward(config: RewardConfig, section: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function (or class) and its checked arguments. A short name is one of coalign.rewards. Raises ConfigError for
    wrong arguments (``section``: its path), and ValueError if there is no such function, if it is not called
    as a reward is, or if it refuses them: its attribute ``check``, if it has one, is called with the arguments."""
    fn = resolve(cast(str, config.fn), config.home)
    find_argument(config.called, fn)
    arguments = bind(fn, config.arguments, section)
    if hasattr(fn, "check"):
        fn.check(**arguments)
    return fn, arguments


def check_reward_lengths(rewards: Sequence[RewardConfig], longest: int, limit_key: str) -> None:
    """Refuse rewards for a length that responses of up to ``longest`` tokens (the key ``limit_key``) never reach.

    Calls a function's attribute ``check_longest``, if it has one, as ``check_longest(longest, **arguments)``.
    """
    for index, reward in enumerate(rewards):
        if reward.fn is None:
            continue
        from coalign.backends.scorers.reward_functions import resolve_reward

        fn, arguments = resolve_reward(reward, f"reward.{index}")
        if hasattr(fn, "check_longest") and (problem := fn.check_longest(longest, **arguments)):
            raise ValueError(f"reward[{index}]: {problem}, and a response has at most {longest} tokens ({limit_key})")


def _stats(functions: Sequence[RewardFunction], outcomes: Sequence[Sequence[RewardOutcome]]) -> Stats:
    many: list[Stats] = []
    for function, scored in zip(functions, outcomes, strict=True):
        for outcome in scored:
            if isinstance(outcome, RewardFailure):
                many.append({f"reward/failed/{outcome.reason}": Total(1.0)})
            else:
                logged = {f"reward/{function.name}/{key}": v for key, v in outcome.items() if key != "reward"}
                many.append({key: Stat(value) for key, value in logged.items() if math.isfinite(value)})
                many.append({f"{key}/not_logged": Total(1.0) for key, v in logged.items() if not math.isfinite(v)})
    return merge_stats(many)
