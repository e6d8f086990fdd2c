"""How vLLM draws Coalign's tokens: by coalign.generation.sampling, inside of its own sampler.

vLLM's own random streams count draws, so a response that is continued elsewhere would not get the numbers that it would
have had, and its log-probs are either those before the temperature or those after truncation. A logits processor may do
all of that itself: it draws the token, and leaves no other one to choose. The value that it leaves in the token's place
is the token's log-prob, which vLLM then reports (``logprobs_mode: processed_logits``). Penalties are vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from coalign.generation.sampling import Sampling, sample, uniforms

KEY, SAMPLING = "coalign_key", "coalign_sampling"  # in SamplingParams.extra_args


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of vLLM's batch. ``chosen`` is vLLM's own list, which grows."""

    key: int
    sampling: Sampling
    prompt_length: int
    chosen: list[int]


class CounterSampler(LogitsProcessor):
    """Chooses each token by (stream key, position), from the logits of its own row alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.device = device
        self.rows: dict[int, Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Processors that say so come last, after penalties."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """f32[B, V]: -inf, but for the log-prob of each row's token."""
        rows = [self.rows[i] for i in range(len(logits))]
        keys = torch.tensor([row.key for row in rows], device=self.device)
        positions = torch.tensor([row.prompt_length + len(row.chosen) for row in rows], device=self.device)
        [sampling] = {row.sampling for row in rows}  # of the one open run
        tokens, logprobs = sample(logits, uniforms(keys, positions), sampling)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], logprobs[:, None])


def _row(params: SamplingParams, prompt: list[int] | None, chosen: list[int]) -> Row:
    return Row(params.extra_args[KEY], params.extra_args[SAMPLING], len(prompt), chosen)
