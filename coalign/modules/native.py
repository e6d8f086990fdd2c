"""The embedded rollout engine as a model of a run: a Batch of prompts in, a Batch of responses out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from coalign.config.schema import SamplingConfig
from coalign.data.batch import Batch
from coalign.modules import lora, pretrained
from coalign.modules.base import Module
from coalign.native.engine import Engine, Progress
from coalign.native.model import Model
from coalign.native.request import Request, Response
from coalign.native.run import OnToken
from coalign.native.sampling import Sampling


class NativeModule(Module):
    """Generates with coalign.native, in this process.

    Builds the model without weights. They come from ``load_weights``; if nobody has sent any when the first tokens are
    wanted, they come from where ``config.load`` and ``config.init`` say (as version 0).
    """

    engine: Engine

    def setup(self) -> None:
        """Raises ValueError if the model directory is missing or the engine cannot run the architecture."""
        architecture = pretrained.read_config(self.config)
        self.engine = Engine(
            Model(
                architecture,
                dtype=getattr(torch, self.config.compute_dtype or self.config.dtype),
                device=self.context.device,
                trust_remote_code=self.config.trust_remote_code,
            ),
            seed=self.context.seed,
            max_sequences=self.config.native.max_sequences,
            kv_tokens=self.config.native.kv_tokens,
            prefill_tokens=self.config.native.prefill_tokens,
            end_tokens=self._end_tokens(architecture),
            decode=lambda ids: self.tokenizer.decode(ids, clean_up_tokenization_spaces=False),
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        path = self.config.tokenizer or self.context.tokenizer or self.config.load
        return AutoTokenizer.from_pretrained(path, trust_remote_code=self.config.trust_remote_code)

    def generate(
        self,
        prompts: Batch,
        *,
        samples: int | None = None,
        progress: Progress | None = None,
        on_token: OnToken | None = None,
        **overrides: Any,
    ) -> Batch:
        """``samples`` responses (None: context.samples_per_prompt) to each prompt, ordered by prompt, then index.

        prompts: columns ``tokens`` and ``group``, and any of the sequence kind, which are repeated for every response.
        overrides: fields of SamplingConfig. progress, on_token: see coalign.native.engine.Engine.generate. Returns
        prompt + response with the columns of docs/design.md section 3.
        Raises pydantic.ValidationError for a bad override, ValueError for a prompt that can never fit.
        """
        if self.engine.version < 0:
            self._load_by_itself()
        samples = self.context.samples_per_prompt if samples is None else samples
        sampling = SamplingConfig(**{**self.config.sampling.model_dump(), **overrides})
        fields = sampling.model_dump()
        groups, offsets, tokens = prompts["group"].tolist(), prompts.offsets.tolist(), prompts["tokens"].tolist()
        requests = [Request(tokens[offsets[i] : offsets[i + 1]], groups[i], samples) for i in range(len(prompts))]
        chosen = Sampling(**{**fields, "stop": tuple(fields["stop"])})
        responses = self.engine.generate(requests, chosen, progress, on_token)
        return _join(prompts, samples, [r for some in responses for r in some])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool = False) -> None:
        """New weights by Hugging Face names; later tokens carry ``version``. See coalign.native.model.Model.load."""
        self.engine.load_weights(weights, version=version, adopt=adopt)

    def pause(self) -> None:
        """Stop a running ``generate`` of another thread at its next token; returns when it stands still."""
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def _load_by_itself(self) -> None:
        source = pretrained.load(self.config, seed=self.context.seed, name=self.context.model)
        weights = lora.merged(source.to(self.context.device))
        self.engine.load_weights(weights, version=0, adopt=True)

    def _end_tokens(self, architecture: PreTrainedConfig) -> set[int]:
        """The end-of-sequence ids of generation_config.json, config.json and the tokenizer."""
        named = [architecture.get_text_config().eos_token_id, self.tokenizer.eos_token_id]
        if (Path(self.config.load) / "generation_config.json").is_file():
            named.append(GenerationConfig.from_pretrained(self.config.load).eos_token_id)
        return {i for ids in named for i in (ids if isinstance(ids, list) else [ids]) if i is not None}


def _join(prompts: Batch, samples: int, responses: list[Response]) -> Batch:
    """Prompt and response end to end, for every response."""
    counts = torch.tensor([len(r.tokens) for r in responses], dtype=torch.int64)
    prompt_rows = torch.arange(len(prompts)).repeat_interleave(samples)
    repeated = prompts.select(prompt_rows)
    lengths = repeated.lengths + counts
    chosen = _is_response(repeated.lengths, counts)

    def column(prompt_part: Tensor | float, field: str, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(chosen), dtype=dtype)
        out[~chosen] = prompt_part
        out[chosen] = torch.cat([getattr(r, field) for r in responses]) if responses else out[chosen]
        return out

    token = {
        "tokens": column(repeated["tokens"].to(torch.int32), "tokens", torch.int32),
        "loss_mask": chosen,
        "rollout_logprobs": column(0.0, "logprobs", torch.float32),
        "versions": column(-1, "versions", torch.int32),
    }
    sequence = {
        **repeated.sequence,
        "index": torch.arange(samples, dtype=torch.int32).repeat(len(prompts)),
        "prompt_length": repeated.lengths.to(torch.int32),
        "status": torch.tensor([int(r.status) for r in responses], dtype=torch.uint8),
    }
    return Batch(lengths, token, sequence)


def _is_response(prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """bool[T]: False for the prompt's tokens, True for the response's, sequence by sequence."""
    pairs = torch.stack([prompt_lengths, response_lengths], 1).flatten()
    return torch.tensor([False, True]).repeat(len(prompt_lengths)).repeat_interleave(pairs)
