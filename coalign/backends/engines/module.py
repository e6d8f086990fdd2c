"""A generation engine as a model of a run: a Batch of prompts in, a Batch of responses out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from coalign.backends import lora, pretrained
from coalign.backends.base import Module
from coalign.backends.engines.contract import InferenceEngine, OnToken, Progress
from coalign.backends.engines.episodes import EpisodeRunner
from coalign.backends.engines.request import Request
from coalign.backends.engines.samples import begin, extend, missing_groups
from coalign.backends.engines.sampling import Sampling
from coalign.config.schema import RolloutConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.environments.conversation import find_environment as named_environment
from coalign.types import Stats, Status
from coalign.weights.sync.transport import installing


class RolloutModule(Module):
    """Generates with an engine, which it builds without weights. They come from ``load_weights``; if nobody has sent
    any when the first tokens are wanted, they come from where ``config.load`` and ``config.init`` say (as version 0).
    """

    needs = {"generate": ("weights", "kv"), "load_weights": ("weights",), "pause": (), "resume": ()}
    engine: InferenceEngine
    runner: EpisodeRunner | None = None

    def build(self, architecture: PreTrainedConfig) -> InferenceEngine:
        """The engine, of its backend. Raises ValueError if it cannot run the architecture."""
        raise NotImplementedError

    def setup(self) -> None:
        """Raises what the checks of Module raise, and ValueError if the engine cannot run the architecture."""
        self.check_before_setup()
        self.engine = self.build(pretrained.read_config(self.config))
        if environment := named_environment(RolloutConfig(**(self.context.rollout or {}))):
            self.runner = EpisodeRunner(environment, self.tokenizer, self.context)

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
        if hasattr(self, "engine"):
            self.engine.close()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return pretrained.read_tokenizer(self.config)

    def generate(
        self,
        prompts: Batch,
        *,
        samples: int | None = None,
        round_tokens: int | None = None,
        min_complete: float | None = None,
        progress: Progress | None = None,
        on_token: OnToken | None = None,
        **overrides: Any,
    ) -> Batch | tuple[Batch, Stats]:
        """All of ``generate_in_parts`` at once."""
        options = {"samples": samples, "round_tokens": round_tokens, "min_complete": min_complete}
        [out] = self.generate_in_parts(1, prompts, **options, progress=progress, on_token=on_token, **overrides)
        return out

    def generate_in_parts(
        self,
        parts: int,
        prompts: Batch,
        *,
        samples: int | None = None,
        round_tokens: int | None = None,
        min_complete: float | None = None,
        progress: Progress | None = None,
        on_token: OnToken | None = None,
        **overrides: Any,
    ) -> Iterator[Batch | tuple[Batch, Stats]]:
        """``samples`` responses (None: context.samples_per_prompt) to each prompt, ordered by prompt, then index.

        prompts: columns ``tokens`` and ``group``, and any of the sequence kind, which are repeated for every response.
        With the column ``index`` it holds samples instead, as an earlier call returned them: those whose status is
        PARTIAL go on as if they had never stopped, the others stay as they are. A column ``max_new_tokens`` limits
        the response of its own row.

        round_tokens: new tokens of a sample in this call. min_complete: the share of the groups here that have to be at
        their end; then the others are cut. What is cut, or has not ended in its round, is PARTIAL. overrides: fields of
        SamplingConfig. progress, on_token: see coalign.backends.engines.contract. Returns prompt + response with the columns
        of docs/design.md section 3. With an environment (context.rollout), samples are played from their beginning, and
        it returns statistics, too: `episode/…`, see docs/environments.md.

        The groups come in so many ``parts``, neighbours of nearly equal numbers, in order and each as soon as all of
        its samples are there; their samples are the same as those of a single part. Nothing is computed before
        somebody asks for the next one.
        Raises pydantic.ValidationError for a bad override, ValueError for a prompt that can never fit and for parts of
        episodes, RuntimeError while the weights are those of no version.
        """
        self.check_fit()
        if self.engine.version < 0:
            self._load_by_itself()
        samples = self.context.samples_per_prompt if samples is None else samples
        begun = prompts if "index" in prompts else begin(prompts, samples)
        fields = SamplingConfig(**{**self.config.sampling.model_dump(), **overrides}).model_dump()
        sampling = Sampling(**{**fields, "stop": tuple(fields["stop"])})
        if self.runner is not None:
            told = {"min_complete": min_complete, "progress": progress, "on_token": on_token}
            if parts > 1:
                where = f"models.{self.context.model}.parts_per_call"
                raise ValueError(f"{where}: episodes are handed over all at once; set it to 1")
            yield self.runner.run(self.engine, begun, sampling, **told)
            return
        some = begun.split(parts, keep="group", by="sequences")
        asked = [_requests(each, sampling.max_new_tokens, round_tokens, self.context.sample_tokens) for each in some]
        requests = [request for _, own in asked for request in own]
        sizes = [len(own) for _, own in asked]
        groups = None if min_complete is None else missing_groups(begun, min_complete)
        ready = self.engine.in_parts(requests, sizes, sampling, progress, on_token, groups)
        for each, (rows, _), answers in zip(some, asked, ready, strict=True):
            with torch.inference_mode(False):  # the run is open, in its own mode, and others learn from what it gives
                yield extend(each, rows, [response for responses in answers for response in responses])

    @property
    def weights_dtype(self) -> torch.dtype | None:
        return self.engine.weights_dtype

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool = False) -> None:
        """New weights by Hugging Face names: the first time all, later those that have changed; later tokens carry
        ``version``. If they do not arrive whole, nothing is generated until others do."""
        with installing(self, version):
            self.engine.load_weights(weights, version=version, adopt=adopt)

    def pause(self) -> None:
        """Stop a running ``generate`` of another thread at its next token; returns when it stands still."""
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def _load_by_itself(self) -> None:
        source = pretrained.load(self.config, seed=self.context.seed, name=self.context.model, packed=False)
        self.load_weights(lora.merged(source.to(self.context.device)), version=0, adopt=True)

    def end_tokens(self, architecture: PreTrainedConfig) -> set[int]:
        """The end-of-sequence ids of generation_config.json, config.json and the tokenizer."""
        named = [architecture.get_text_config().eos_token_id, self.tokenizer.eos_token_id]
        if (Path(self.config.load) / "generation_config.json").is_file():
            named.append(GenerationConfig.from_pretrained(self.config.load).eos_token_id)
        return {i for ids in named for i in (ids if isinstance(ids, list) else [ids]) if i is not None}

    @cached_property
    def _special(self) -> dict[int, str]:
        """The special tokens. Asked for with every sample, and the tokenizer makes its table anew each time."""
        return {i: token.content for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def decoder(self, stops: Sequence[str]) -> Callable[[list[int]], str]:
        """From tokens to the text in which ``stops`` are looked for: special tokens only if a stop has them."""
        hidden = {i for i, text in self._special.items() if not any(text in stop for stop in stops)}

        def decode(tokens: list[int]) -> str:
            return self.tokenizer.decode([t for t in tokens if t not in hidden], clean_up_tokenization_spaces=False)

        return decode


def _requests(
    samples: Batch, max_new_tokens: int, pause: int | None, longest: int | None
) -> tuple[list[int], list[Request]]:
    """The rows that are not at their end, and what to ask for; samples without a response share their prompt.
    ``longest``: tokens of a sample that others still take. ValueError for a prompt that has as many."""
    tokens, offsets = samples["tokens"].tolist(), samples.offsets.tolist()
    prompt_lengths, groups, indices = (samples[name].tolist() for name in ("prompt_length", "group", "index"))
    own = samples.get("max_new_tokens")
    limits = [max_new_tokens] * len(samples) if own is None else own.clamp(max=max_new_tokens).tolist()
    if longest is not None:
        limits = [min(limit, longest - length) for limit, length in zip(limits, prompt_lengths, strict=True)]
        if longest <= max(prompt_lengths, default=0):
            raise ValueError(
                f"a prompt has {max(prompt_lengths)} tokens, and a model that reads samples takes {longest} at once "
                "(max_tokens_per_micro): raise that, or bound prompts (data.max_prompt_tokens)"
            )
    rows = (samples["status"] == Status.PARTIAL).nonzero().flatten().tolist()
    asked: list[Request] = []
    for row in rows:
        prompt = tokens[offsets[row] : offsets[row + 1]]
        begun = len(prompt) - prompt_lengths[row]
        request = Request(prompt, groups[row], 1, indices[row], begun, limits[row] - begun, pause)
        same = asked and not begun and replace(asked[-1], samples=1) == replace(request, first=asked[-1].first)
        if same and asked[-1].first + asked[-1].samples == request.first:
            asked[-1] = replace(asked[-1], samples=asked[-1].samples + 1)
        else:
            asked.append(request)
    return rows, asked
