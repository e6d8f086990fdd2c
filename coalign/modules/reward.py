"""Reward functions as a model of the run: a Scorer whose "forward" calls the person's functions on decoded text."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer

from coalign.config.functions import bind, resolve
from coalign.config.schema import ModelConfig, RewardConfig
from coalign.data.batch import Batch
from coalign.modules.base import Module
from coalign.rewards.calls import Caller, Failure, Outcome, RewardError, RewardFunction
from coalign.types import Context, Sample, Stat, Stats, Status, Total, merge_stats

log = logging.getLogger(__name__)


class RewardModule(Module):
    """Scores batches with the run's reward functions (``context.rewards``), summed by weight. See coalign.rewards."""

    exclusive = False  # it waits for functions, and models may compute meanwhile

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        if not context.rewards:
            raise ValueError("the run names no reward function: add `reward: {fn: …}` to the configuration")
        if context.tokenizer is None:
            raise ValueError("module 'reward' needs the policy's tokenizer to read responses; the context names none")
        self.caller: Caller | None = None
        self._traced: set[str] = set()  # functions whose traceback has been shown

    def setup(self) -> None:
        trust = self.config.trust_remote_code
        self.tokenizer = AutoTokenizer.from_pretrained(self.context.tokenizer, trust_remote_code=trust)
        self.functions = reward_functions([RewardConfig(**entry) for entry in self.context.rewards])
        self.caller = Caller()

    def close(self) -> None:
        if self.caller is not None:
            self.caller.close()

    def forward_step(self, batch: Batch, *, into: str | None = None) -> dict[str, Any]:
        """Columns ``reward`` f32[N], ``reward/<function>`` f32[N] and ``status`` u8[N]; and Stats: the mean
        ``reward/<function>/mean``, the counts ``reward/failed/<reason>``.

        NaN and Status.ERROR stand where a function failed for good; rows that come in as ERROR are left alone. ``into``
        renames ``reward``. Raises RewardError, with the function's own exception as cause, if no row could be scored.
        """
        status = batch["status"].clone()
        rows = (status != Status.ERROR).nonzero().flatten()
        samples = read_samples(batch.select(rows), self.tokenizer)
        outcomes = self.caller.score(self.functions, samples)
        name, total = into or "reward", torch.zeros(len(batch))
        columns: dict[str, Any] = {}
        for function, scored in zip(self.functions, outcomes, strict=True):
            column = torch.full((len(batch),), float("nan"))
            column[rows] = torch.tensor([_value(outcome) for outcome in scored])
            columns[f"{name}/{function.name}"] = column
            if function.weight:
                total += function.weight * column
        status[total.isnan()] = Status.ERROR
        self._report(samples, outcomes, all_failed=bool(total.isnan().all()))
        return {name: total, **columns, "status": status, **_stats(self.functions, outcomes, name)}

    def _report(self, samples: Sequence[Sample], outcomes: Sequence[Sequence[Outcome]], *, all_failed: bool) -> None:
        """Show the first failure of each function; raise it if it left nothing to train on."""
        for function, scored in zip(self.functions, outcomes, strict=True):
            failures = [(s, o) for s, o in zip(samples, scored, strict=True) if isinstance(o, Failure)]
            if not failures:
                continue
            sample, first = failures[0]
            message = (
                f"reward function '{function.name}' failed on {len(failures)} of {len(samples)} samples "
                f"({function.retries + 1} attempts each); first on group {sample.group}, index {sample.index}: "
                f"{first.reason}: {type(first.error).__name__}: {first.error}"
            )
            if all_failed and function.weight:
                raise RewardError(message) from first.error
            trace = first.reason == "raised" and function.name not in self._traced
            self._traced.add(function.name)
            log.warning(message, exc_info=first.error if trace else None)


def reward_functions(configs: Sequence[RewardConfig]) -> list[RewardFunction]:
    """The functions that `reward:` lists. Raises what `reward_function` raises, and ValueError for two of one name."""
    functions = [reward_function(config, f"reward.{i}") for i, config in enumerate(configs)]
    names = Counter(function.name for function in functions)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two reward functions are called '{twice[0]}': give one of them another `name`")
    return functions


def reward_function(config: RewardConfig, where: str) -> RewardFunction:
    """The function that a configuration names, with its arguments checked. A short name is one of coalign.rewards.

    Raises ConfigError for wrong arguments (``where`` is the section's path), ValueError if there is no such function.
    """
    fn = resolve(config.fn, "coalign.rewards")
    name = config.name or getattr(fn, "__name__", type(fn).__name__)
    arguments = bind(fn, config.arguments, where)
    limits = {"weight": config.weight, "timeout": config.timeout, "retries": config.retries}
    return RewardFunction(name, fn, arguments, **limits)


def read_samples(batch: Batch, tokenizer: Any) -> list[Sample]:
    """The batch as Samples with their texts: prompt as the model saw it, response without and with special tokens."""
    samples = batch.samples()
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    for sample, start in zip(samples, batch["prompt_length"].tolist(), strict=True):
        sample.prompt = decode(sample.tokens[:start])
        sample.raw_response = decode(sample.tokens[start:])
        sample.response = decode(sample.tokens[start:], skip_special_tokens=True)
        asked = sample.meta.get("messages") or [{"role": "user", "content": sample.prompt}]
        sample.messages = [*asked, {"role": "assistant", "content": sample.response}]
    return samples


def _value(outcome: Outcome) -> float:
    return float("nan") if isinstance(outcome, Failure) else outcome["reward"]


def _stats(functions: Sequence[RewardFunction], outcomes: Sequence[Sequence[Outcome]], name: str) -> Stats:
    """Failures by reason, and the means of everything that each function returned."""
    many: list[Stats] = []
    for function, scored in zip(functions, outcomes, strict=True):
        for outcome in scored:
            if isinstance(outcome, Failure):
                many.append({f"{name}/failed/{outcome.reason}": Total(1.0)})
            else:
                logged = {"mean" if key == "reward" else key: value for key, value in outcome.items()}
                many.append({f"{name}/{function.name}/{key}": Stat(value) for key, value in logged.items()})
    return merge_stats(many)
