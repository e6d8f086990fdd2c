"""The policy module: runs a generation engine on a Batch of prompts and returns a Batch of responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from coalign.backends import lora, pretrained
from coalign.backends.base import Module
from coalign.backends.engines.contract import GenerationSession, InferenceEngine, OnToken
from coalign.backends.engines.episodes import EpisodeBatch, EpisodeRunner
from coalign.backends.engines.request import begin_samples, count_missing_groups, extend_samples, plan_requests
from coalign.backends.engines.sampler_probe import begin_probe, check_difference, compute_logprobs, sample_probe
from coalign.backends.engines.session_driver import Progress, ResponseTask, SessionDriver, generate_in_order
from coalign.backends.pretrained import get_directory
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.data.examples import RowLimit
from coalign.memory import move_module
from coalign.roles import Context
from coalign.types import Stats
from coalign.weights.sync.transport import guard_installation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class _ResponseBatch(ResponseTask):
    """Samples of a batch that get one response each, or go on with it.

    round_tokens: new tokens after which a sample pauses. longest: the most tokens of a sample that later models can
    read. Raises ValueError for a prompt that can never fit.
    """

    def __init__(
        self, session: GenerationSession, samples: Batch, round_tokens: int | None, longest: int | None
    ) -> None:
        self.engine, self.samples = session.engine, samples
        self.rows, requests = plan_requests(samples, session.sampling.max_new_tokens, round_tokens, longest)
        super().__init__(session, requests)

    def result(self) -> tuple[Batch, Stats]:
        responses = [response for responses in self.responses for response in responses]
        return extend_samples(self.samples, self.rows, responses, self.engine.experts), {}


class RolloutModule(Module):
    """Generates with an engine, which it builds without weights. The weights come from ``load_weights``. If nobody has
    sent any when the first tokens are wanted, they come from ``config.load`` and ``config.init`` (as version 0)."""

    needs = {
        **dict.fromkeys(("generate", "roll"), ("weights", "kv")),
        "load_weights": ("weights",),
        **dict.fromkeys(("pause", "resume"), ()),
    }
    compares_itself: ClassVar[bool] = False  # with the model's own forward, whenever it gets its first weights
    engine: InferenceEngine
    runner: EpisodeRunner | None = None
    driver: SessionDriver | None = None  # from the first ``roll`` on

    def __init__(self, config: ModelConfig, context: Context) -> None:
        super().__init__(config, context)
        self.rolling: dict[int, _ResponseBatch | EpisodeBatch] = {}  # what ``roll`` has not returned, by number

    @classmethod
    def list_limits(cls, config: ModelConfig, section: str) -> list[RowLimit]:
        """The limit on a prompt: it needs room for a token of the response."""
        context = pretrained.find_context_length(config)
        return [] if context is None else [RowLimit(context - 1, f"max_position_embeddings of {section}, less one")]

    def build(self, architecture: PreTrainedConfig) -> InferenceEngine:
        """Build the backend's engine. Raises ValueError if it cannot run the architecture."""
        raise NotImplementedError

    def setup(self) -> None:
        """Raises what the checks of Module raise, and ValueError if the engine cannot run the architecture."""
        self.check_before_setup()
        self.engine = self.build(pretrained.read_config(self.config))
        self.engine.recomputes_kv = self.context.recompute_kv
        if self.context.environments:
            placeholders = pretrained.read_placeholders(self.config, self.context.images)
            self.runner = EpisodeRunner(self.context.environments, self.tokenizer, self.context, placeholders)

    def forget_calls(self) -> None:
        self.stop_rolling()

    def close(self) -> None:
        self.stop_rolling()
        if self.runner is not None:
            self.runner.close()
        if hasattr(self, "engine"):
            self.engine.close()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return pretrained.read_tokenizer(self.config)

    def generate(self, prompts: Batch, **options: Any) -> Batch | tuple[Batch, Stats]:
        """Generate the whole batch as one part; see ``generate_in_parts``."""
        [out] = self.generate_in_parts(1, prompts, **options)
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
        """Generate ``samples`` responses to each prompt (None: context.samples_per_prompt), by prompt, then index.

        The groups come in this many ``parts`` of nearly equal size, in order, each as soon as all of its samples are
        there. The samples are the same as those of a single part. Nothing is computed before the caller asks for the
        next part.

        prompts: columns ``tokens`` and ``group``, and any sequence columns, which are repeated for every response. With
        the column ``index`` it holds samples of an earlier call instead: those whose status is PARTIAL go on as if they
        had never stopped, the others stay as they are. A column ``max_new_tokens`` limits the response of its row.
        round_tokens: new tokens of a sample in this call. min_complete: the share of these groups that must be
        complete; then the others are cut. A sample that is cut, or that its round ends, is PARTIAL. overrides: fields
        of SamplingConfig. progress, on_token: see coalign.backends.engines.contract.

        Returns prompt + response with the columns of docs/design.md section 3. With
        context.environments episodes are played from their beginning, and statistics `episode/…` are returned, too

        Raises pydantic.ValidationError for a bad override, ValueError for a prompt that can never fit and for parts of
        episodes, RuntimeError while the loaded weights are incomplete.
        """
        self.ensure_weights()
        unfinished, sampling = self._read(prompts, samples, **overrides)
        min_groups = None if min_complete is None else count_missing_groups(unfinished, min_complete)
        if self.runner is not None and parts > 1:
            key = f"models.{self.context.model}.parts_per_call"
            raise ValueError(f"{key}: episodes are handed over all at once; set it to 1")
        begin = partial(self._begin, round_tokens=round_tokens, min_groups=min_groups)
        create = [partial(begin, samples=chunk) for chunk in unfinished.split(parts, keep="group", by="sequences")]
        ready = generate_in_order(self.engine, sampling, create, progress, on_token, min_groups)
        results = (batch.result() for batch in ready)
        return (out for out, _ in results) if self.runner is None else results

    def _read(self, prompts: Batch, samples: int | None = None, **overrides: Any) -> tuple[Batch, SamplingConfig]:
        """Return the samples to compute, and how they are sampled."""
        count = self.context.samples_per_prompt if samples is None else samples
        unfinished = prompts if "index" in prompts else begin_samples(prompts, count)
        sampling = self.config.sampling
        return unfinished, SamplingConfig(**{**sampling.model_dump(), **overrides}) if overrides else sampling

    def _begin(
        self,
        session: GenerationSession,
        samples: Batch,
        round_tokens: int | None = None,
        min_groups: int | None = None,
    ) -> _ResponseBatch | EpisodeBatch:
        if self.runner is None:
            return _ResponseBatch(session, samples, round_tokens, self.context.sample_tokens)
        return EpisodeBatch(self.runner, session, samples, min_groups)

    def roll(
        self, new: Sequence[tuple[int, Batch, Mapping[str, Any]]], seconds: float
    ) -> tuple[int | None, Batch | None, Stats, int]:
        """Add batches to those that are being computed, and compute until one is complete or ``seconds`` are over.

        new: for each batch its number, its prompts and options (``samples``, fields of SamplingConfig), as ``generate``
        takes them. What is not complete goes on in the next call, also with new weights.

        Returns the number of the complete batch, the batch and the statistics that ``generate`` would return for it,
        (None, None, {}) without one; then the number of samples that wait until the engine can begin them. Raises what
        ``generate`` raises, and ValueError for a number that is in use; then the other batches go on. If every episode
        of a batch failed (EpisodesFailed), that batch is gone; after any other error of a step all are.
        """
        self.ensure_weights()
        driver = self.driver = self.driver or SessionDriver(self.engine)
        for number, prompts, options in new:
            if number in self.rolling:
                raise ValueError(f"batch {number} is being computed already")
            samples, sampling = self._read(prompts, **options)
            self.rolling[number] = driver.begin(sampling, partial(self._begin, samples=samples))
        number = self._complete_one(driver, seconds)
        batch, stats = (None, {}) if number is None else self.rolling.pop(number).result()
        return number, batch, stats, sum(session.unstarted for session in driver.tasks)

    def _complete_one(self, driver: SessionDriver, seconds: float) -> int | None:
        """Compute until a batch is complete; return its number. With any ``seconds`` above 0 at least one step is
        computed."""
        end, left = time.monotonic() + seconds, seconds
        while (number := min((n for n, batch in self.rolling.items() if batch.done), default=None)) is None:
            if left <= 0 or not self.rolling:
                return None
            try:
                driver.step(seconds=left)
            except BaseException:
                self.stop_rolling()
                raise
            left = end - time.monotonic()
        return number

    def stop_rolling(self) -> None:
        """Drop the batches that ``roll`` has not returned."""
        self.rolling.clear()
        if self.driver is not None:
            self.driver.close()

    def ensure_weights(self) -> None:
        """Load the first weights if nobody has sent any. RuntimeError while those that were sent are incomplete."""
        self.check_fit()
        if self.engine.version < 0:
            source = pretrained.load(self.config, seed=self.context.seed, name=self.context.model, packed=False)
            move_module(source, self.context.device)
            self.load_weights(lora.export_merged(source), version=0, adopt=True)
            self.compare(source)

    def compare(self, source: PreTrainedModel) -> None:
        """Raise ValueError where the engine computes another model than ``source``, whose weights it has."""
        if self.compares_itself:
            return
        processor = pretrained.read_processor(self.config, self.context.images)
        samples = sample_probe(self, None, begin_probe(source.config, processor))
        if samples is not None:
            settings = self.config.sampling.temperature or 1.0, self.list_forbidden(source.config)
            expected = compute_logprobs(source, processor, samples, *settings)
            check_difference(self.context.model, [self.config], samples, expected)

    @property
    def weights_dtype(self) -> torch.dtype | None:
        return self.engine.weights_dtype

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int, adopt: bool = False) -> None:
        """Take weights by Hugging Face names: the first time all, later those that have changed. Later tokens carry
        ``version``. If the weights do not arrive whole, ``generate`` fails until others do."""
        with guard_installation(self, version):
            self.engine.load_weights(weights, version=version, adopt=adopt)

    def pause(self) -> None:
        """Stop a ``generate`` that runs in another thread at its next token; return when it has stopped."""
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def find_end_tokens(self, architecture: PreTrainedConfig) -> set[int]:
        """Collect the end-of-sequence ids of generation_config.json, config.json and the tokenizer."""
        named = [getattr(architecture.get_text_config(), "eos_token_id", None), self.tokenizer.eos_token_id]
        directory = get_directory(self.config)
        if (directory / "generation_config.json").is_file():
            from transformers import GenerationConfig  # slow

            named.append(GenerationConfig.from_pretrained(directory).eos_token_id)
        return {i for ids in named for i in (ids if isinstance(ids, list) else [ids]) if i is not None}

    def list_forbidden(self, architecture: PreTrainedConfig) -> list[int]:
        """List the ids that must not be said."""
        vocabulary = architecture.get_text_config().vocab_size
        return pretrained.list_forbidden_ids(self.config, self.context, vocabulary)

    @cached_property
    def _special(self) -> dict[int, str]:
        """The special tokens, cached because the tokenizer builds its table anew each time."""
        return {i: token.content for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def decoder(self, stops: Sequence[str]) -> Callable[[list[int]], str]:
        """Return the function from tokens to the searched text; it shows the special tokens that ``stops`` name."""
        hidden = {i for i, text in self._special.items() if not any(text in stop for stop in stops)}

        def decode(tokens: list[int]) -> str:
            shown = [token for token in tokens if token not in hidden]
            return cast(str, self.tokenizer.decode(shown, clean_up_tokenization_spaces=False))

        return decode
