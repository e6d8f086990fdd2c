"""The engine on transformers' own cache and its policy module: any causal LM, exact rather than fast.

Requests wait, are computed in batches of rows, and leave as they finish. A token depends on the weights and on (seed,
group, index, position). The batch matters only as far as torch's kernels round differently in another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from coalign.backends import pretrained
from coalign.backends.engines.contract import GenerationSession, OnToken
from coalign.backends.engines.meta_model import MetaModelEngine, MetaModelModule
from coalign.backends.engines.native.kernels import choose_compute_dtype
from coalign.backends.engines.request import OnDone, PartialResponse, Request, SubmittedRequest
from coalign.backends.engines.sampling import read_choices, sample, uniforms
from coalign.backends.engines.transformers.model import CachedRows, TransformersModel
from coalign.config.schema import ModelConfig, SamplingConfig, TransformersConfig
from coalign.types import Status


@dataclass(slots=True, eq=False)
class SampleRow(PartialResponse):
    """One sample in a row of a batch; ``key`` is of its random stream."""

    key: int = 0

    @property
    def length(self) -> int:
        return len(self.submitted.request.prompt) + len(self.tokens)

    @property
    def text(self) -> list[int]:
        return [*self.submitted.request.prompt, *self.tokens]


@dataclass(slots=True, eq=False)
class RowBatch:
    """Samples and the rows of the cache that they have, in one order. The last token of each is yet to be fed."""

    samples: list[SampleRow]
    rows: CachedRows


class TransformersSession(GenerationSession):
    """Schedules requests on batches of rows: one batch if rows can be padded, otherwise one for each length.

    Samples of a prompt share its computation. Where rows can be padded, a conversation keeps its row between two turns,
    as long as no other needs the place and the weights stay; otherwise every turn is computed from its beginning.
    """

    def __init__(self, engine: TransformersEngine, sampling: SamplingConfig, on_token: OnToken | None = None) -> None:
        super().__init__(engine.model.context)
        self.engine = engine
        self.model = engine.model
        self.sampling = sampling
        self.on_token = on_token
        self.arrived: deque[SubmittedRequest] = deque()
        self.waiting: deque[SubmittedRequest] = deque()
        self.ended: deque[tuple[int, int]] = deque()  # conversations that have had their last turn
        self.batches: list[RowBatch] = []
        self.kept: dict[tuple[int, int], tuple[list[int], CachedRows]] = {}  # sample -> its tokens and its row

    @property
    def unfinished(self) -> bool:
        return bool(self.arrived or self.waiting or self.batches)

    @property
    def active(self) -> list[SampleRow]:
        return [each for batch in self.batches for each in batch.samples]

    def submit(self, request: Request, on_done: OnDone) -> SubmittedRequest:
        vocabulary, context = self.model.vocabulary, self.model.context
        pending = SubmittedRequest.plan(request, self.sampling, on_done, vocabulary=vocabulary, context=context)
        self.arrived.append(pending)
        return pending

    def cut_all(self) -> None:
        self.cut(*self.arrived, *self.waiting, *(each.submitted for each in self.active))

    def forget(self, group: int, index: int) -> None:
        self.ended.append((group, index))

    def step(self) -> None:
        while self.ended:
            self.kept.pop(self.ended.popleft(), None)
        while self.arrived:
            self.waiting.append(self.arrived.popleft())
            self.total += self.waiting[-1].request.samples
        self._finish_cut()
        self._admit()
        batches, self.batches = self.batches, []
        for batch in batches:
            tokens = torch.tensor([each.tokens[-1:] for each in batch.samples], device=self.model.device)
            self._choose(batch, self.model.extend(batch.rows, tokens))
        self.engine.reserve(sum(rows.count_bytes() for rows in self._list_rows()))

    def _list_rows(self) -> list[CachedRows]:
        return [batch.rows for batch in self.batches] + [rows for _, rows in self.kept.values()]

    def _finish_cut(self) -> None:
        for pending in [pending for pending in self.waiting if pending.cut]:
            self.waiting.remove(pending)
            for place in range(pending.started, pending.request.samples):
                self._finish(SampleRow(pending, place, None), Status.PARTIAL)
        batches, self.batches = self.batches, []
        for batch in batches:
            self._put(batch, [row for row, each in enumerate(batch.samples) if not each.submitted.cut])
            for each in batch.samples:
                if each.submitted.cut:
                    self._finish(each, Status.PARTIAL)

    def _admit(self) -> None:
        """Start waiting samples, in order, as many as there is place for."""
        free = self.engine.settings.max_sequences - len(self.active)
        while self.waiting and free:
            fresh: list[tuple[SubmittedRequest, int]] = []  # with the number of samples that start
            while self.waiting and free:
                pending = self.waiting[0]
                longest = max(len(each.request.prompt) for each in (pending, *(other for other, _ in fresh)))
                if fresh and longest * (len(fresh) + 1) > self.engine.settings.prefill_tokens:
                    break
                count = min(pending.waiting, free)
                free -= count
                if count == pending.waiting:
                    self.waiting.popleft()
                if (row := self._take_kept(pending)) is not None:
                    self._continue(pending, row)
                else:
                    fresh.append((pending, count))
            while len(self.kept) > free:
                self.kept.pop(next(iter(self.kept)))
            self._prefill(fresh)

    def _take_kept(self, pending: SubmittedRequest) -> CachedRows | None:
        """Take the row of the conversation's last turn, if it has been kept and the prompt goes on from there."""
        tokens, row = self.kept.pop(pending.sample, ([], None))
        follows = pending.request.first_turn is not None and pending.request.prompt[: len(tokens)] == tokens
        return row if follows else None

    def _continue(self, pending: SubmittedRequest, row: CachedRows) -> None:
        new = pending.request.prompt[row.length :]
        self.tokens_kept += row.length
        self.tokens_prefilled += len(new)
        logits = self.model.extend(row, torch.tensor([new], device=self.model.device))
        self._choose(RowBatch(self._start(pending, 1), row), logits)

    def _prefill(self, fresh: Sequence[tuple[SubmittedRequest, int]]) -> None:
        parts: dict[int, list[tuple[SubmittedRequest, int]]] = {}
        for pending, count in fresh:
            length = 0 if self.model.batching == "padded" else len(pending.request.prompt)
            parts.setdefault(length, []).append((pending, count))
        for part in parts.values():
            prompts = [pending.request.prompt for pending, _ in part]
            self.tokens_prefilled += sum(map(len, prompts))
            logits, rows = self.model.prefill(prompts)
            repeated = [row for row, (_, count) in enumerate(part) for _ in range(count)]
            samples = [each for pending, count in part for each in self._start(pending, count)]
            self._choose(RowBatch(samples, rows.select(repeated)), logits[repeated])

    def _start(self, pending: SubmittedRequest, count: int) -> list[SampleRow]:
        first = pending.started
        pending.started += count
        return [
            SampleRow(
                pending,
                place,
                pending.find_stops(self.sampling, self.engine.decoder),
                key=pending.find_key(self.engine.seed, place),
            )
            for place in range(first, first + count)
        ]

    def _choose(self, batch: RowBatch, logits: Tensor) -> None:
        """Draw and record the next token of every sample; put those that go on into the session's batches."""
        samples, engine = batch.samples, self.engine
        keys, positions = torch.tensor([[each.key, each.length] for each in samples], device=logits.device).unbind(1)
        tokens, logprobs = sample(logits, uniforms(keys, positions), self.sampling, self._note_seen(samples, logits))
        groups = [each.submitted.request.group for each in samples]
        choices = read_choices(tokens, logprobs, groups, engine.version)
        self.tokens_chosen += len(samples)
        ended: list[tuple[int, Status]] = []
        for row, (token, logprob) in enumerate(zip(*choices, strict=True)):
            each = samples[row]
            status = each.add(token, logprob, engine.version, engine.end_tokens)
            if self.on_token is not None:
                request = each.submitted.request
                self.on_token(request.group, request.first + each.place, token)
            if status is not None:
                ended.append((row, status))
        for row, _ in ended:
            self._keep(batch, row)
        gone = {row for row, _ in ended}
        self._put(batch, [row for row in range(len(samples)) if row not in gone])
        for row, status in ended:
            self._finish(samples[row], status)

    def _note_seen(self, samples: Sequence[SampleRow], logits: Tensor) -> Tensor | None:
        """Mark the tokens that the repetition penalty applies to; None without one. bool[B, V]"""
        if self.sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        for row, each in enumerate(samples):
            seen[row, each.text] = True
        return seen

    def _keep(self, batch: RowBatch, row: int) -> None:
        """Keep the row of a conversation for its next turn, if all of it is of the weights of now."""
        each = batch.samples[row]
        if each.submitted.request.first_turn is None or self.model.batching != "padded":
            return
        if set(each.versions) == {self.engine.version}:
            self.kept[each.submitted.sample] = (each.text, batch.rows.select([row]))

    def _put(self, batch: RowBatch, rows: list[int]) -> None:
        """Put these rows of a batch among the session's batches."""
        if not rows:
            return
        if len(rows) < len(batch.samples):
            batch = RowBatch([batch.samples[row] for row in rows], batch.rows.select(rows))
        for other in self.batches:
            if self.model.batching == "padded" or other.rows.length == batch.rows.length:
                other.samples, other.rows = other.samples + batch.samples, other.rows.join(batch.rows)
                return
        self.batches.append(batch)

    def _finish(self, each: SampleRow, status: Status) -> None:
        self.finished += 1
        each.submitted.on_done(each.place, each.response(status))


class TransformersEngine(MetaModelEngine):
    """Generates with ``model``, with transformers' own cache. ``others`` are the arguments of MetaModelEngine."""

    model: TransformersModel
    _session: TransformersSession | None

    def __init__(self, model: TransformersModel, *, settings: TransformersConfig, **others: Any) -> None:
        super().__init__(model, **others)
        self.settings = settings

    @contextmanager
    def _start_session(self, sampling: SamplingConfig, on_token: OnToken | None) -> Iterator[TransformersSession]:
        with torch.inference_mode():
            try:
                yield TransformersSession(self, sampling, on_token)
            finally:
                self.reserve(0)

    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Also raises ValueError for an architecture that fails TransformersModel.probe."""
        self.model.load(weights, adopt=adopt)
        if self._session is not None:
            self._session.kept.clear()  # computed with the weights before
        if self.version < 0:
            self.model.probe()


class TransformersModule(MetaModelModule):
    """Generates with transformers' own cache, in this process."""

    @classmethod
    def build_model(cls, architecture: PreTrainedConfig, config: ModelConfig, device: str) -> TransformersModel:
        return TransformersModel(
            architecture,
            dtype=choose_compute_dtype(getattr(torch, config.compute_dtype or config.dtype), torch.device(device)),
            device=device,
            batching=config.transformers.batching,
            trust_remote_code=config.trust_remote_code,
        )

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        model = cls.build_model(pretrained.read_config(config), config, "cpu")
        return [*super().notes(config), f"sampled with transformers' cache, batching: {model.batching}"]

    def build(self, architecture: PreTrainedConfig) -> TransformersEngine:
        model = self.build_model(architecture, self.config, self.context.device)
        settings = self.find_engine_settings(architecture)
        return TransformersEngine(model, settings=self.config.transformers, **settings)
