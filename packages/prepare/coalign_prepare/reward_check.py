"""Tries reward functions for `coalign check`: calls each on a first row's answer and on an empty response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from coalign.backends.scorers.reward_functions import build_reward_function
from coalign.config import ConfigError
from coalign.config.errors import ConfigProblem
from coalign.config.functions import is_code_refused
from coalign.config.schema import RewardConfig
from coalign.rewards.calls import BUGS, RewardCaller, RewardFailure, RewardOutcome
from coalign.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def try_rewards(
    rewards: Sequence[RewardConfig], rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield what each function of ``rewards`` returns for the first of ``rows`` that it scores.

    Services are not called, nor is anything if code is refused (`--no-code`). ConfigError for a function that is wrong:
    it returns no number, or raises a KeyError, say.
    """
    if is_code_refused():
        return
    with closing(RewardCaller()) as caller:
        for index, config in enumerate(rewards):
            if config.fn is None:
                continue
            function = replace(build_reward_function(config, f"reward.{index}"), retries=0, patience=0.0)
            answered = (_answer(row, tokenizer) for row in rows)
            samples = next((samples for samples in answered if function.is_for(samples[-1])), None)
            if function.is_service or samples is None:
                continue
            caller.start([function])
            (outcomes,) = caller.score([function], samples)
            responses = ("the first row's answer", "an empty response")[-len(samples) :]
            yield f"reward {function.name}: {_describe(index, function.name, responses, outcomes)}"


def _answer(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Build the samples of a row: its own answer, if it has one, and a response without a word."""
    answer = row.get("answer")
    said = answer[0] if isinstance(answer, list) and answer else answer
    texts = [*([] if said is None else [str(said)]), ""]
    return [_build_sample(row, i, text, tokenizer) for i, text in enumerate(texts)]


def _build_sample(row: dict[str, Any], index: int, text: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int32)
    return Sample(
        group=0,
        index=index,
        tokens=tokens,
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        logprobs=torch.zeros(len(tokens)),
        versions=[(0, len(tokens))],
        prompt=row["prompt"],
        response=text,
        raw_response=text,
        messages=[*row["messages"], {"role": "assistant", "content": text}],
        meta=row,
    )


def _describe(index: int, name: str, responses: Sequence[str], outcomes: Sequence[RewardOutcome]) -> str:
    said = []
    for tried, outcome in zip(responses, outcomes, strict=True):
        if not isinstance(outcome, RewardFailure):
            said.append(f"{outcome['reward']:g} for {tried}")
        elif outcome.reason not in BUGS:
            said.append(f"no value for {tried} ({outcome})")
        elif "returned None;" in str(outcome):
            message = f"`{name}` returned None for {tried}: is a `return 0.0` missing?"
            raise ConfigError([ConfigProblem(("reward", index), message)])
        else:
            message = f"`{name}` fails on {tried}: {str(outcome).partition(': ')[2]}"
            raise ConfigError([ConfigProblem(("reward", index), message)])
    return ", ".join(said)
