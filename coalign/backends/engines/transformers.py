"""The engine on transformers' own cache and its policy module: any causal LM, exact rather than fast.

A token depends on the weights and on (seed, group, index, position). The batch matters only as far as torch's kernels
round differently in another one. Whatever a model's cache holds of earlier tokens (keys and values, states of
convolutions, recurrent states), here it is a tree of tensors whose first dimension is the row. So rows are selected,
repeated and joined in the same way for every architecture.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from coalign.backends import pretrained
from coalign.backends.attention import refuse_failure
from coalign.backends.engines.contract import GenerationSession, OnToken
from coalign.backends.engines.meta_model import TOLERANCE, MetaModel, MetaModelEngine, MetaModelModule, compare_logits
from coalign.backends.engines.request import PartialResponse, SubmittedRequest
from coalign.backends.engines.sampling import read_choices, sample, uniforms
from coalign.backends.pretrained import MIXERS, describe_encoder
from coalign.backends.vision import ImageEmbedder, install_embeddings
from coalign.backends.vision_language import find_body
from coalign.config.schema import ImagesConfig, ModelConfig, SamplingConfig, TransformersConfig
from coalign.data.images.processor import ImageProcessor
from coalign.types import ImageSpan, Status

log = logging.getLogger(__name__)

CACHES = ("past_key_values", "cache_params", "state")  # what transformers' models call their cache
REFUSAL = "`module: transformers` cannot sample from {}: {}"
_PROMPTS, _STEPS = (9, 5, 10), 4  # tokens of the probe's prompts, and of what follows each
BATCHINGS = ("padded", "equal", "whole")  # from the fastest to the one that asks least of a model


@dataclass(slots=True, eq=False)
class _CachedRows:
    """Rows of tokens that a model has computed, padded on the left to one ``length``. padding: i64[B], leading entries
    of each row that hold no token. state: the model's cache. shift: i64[B], the row's number of tokens minus its next
    position: M-RoPE gives an image fewer positions than tokens."""

    padding: Tensor
    shift: Tensor
    length: int = 0
    state: Any = None

    def select(self, rows: Sequence[int]) -> _CachedRows:
        """Copy these rows; one may come several times. Padding that all of them share is dropped."""
        index = torch.tensor(rows, device=self.padding.device)
        padding = self.padding[index]
        excess = int(padding.min())
        length = self.length - excess

        def change(tensors: Sequence[Tensor]) -> Tensor:
            chosen = tensors[0].index_select(0, index)
            # Only keys and values are ever padded. A sliding window holds fewer of them than the row is long.
            return chosen[..., -min(length, chosen.shape[-2]) :, :] if excess else chosen

        return _CachedRows(padding - excess, self.shift[index], length, _combine([self.state], change, length))

    def join(self, below: _CachedRows) -> _CachedRows:
        """Put other rows below these; the shorter ones get more padding."""
        length = max(self.length, below.length)
        padding = torch.cat([rows.padding + (length - rows.length) for rows in (self, below)])

        def change(tensors: Sequence[Tensor]) -> Tensor:
            if self.length != below.length:
                widest = max(tensor.shape[-2] for tensor in tensors)
                tensors = [F.pad(tensor, (0, 0, widest - tensor.shape[-2], 0)) for tensor in tensors]
            return torch.cat(list(tensors))

        shift = torch.cat([self.shift, below.shift])
        return _CachedRows(padding, shift, length, _combine([self.state, below.state], change, length))

    def count_bytes(self) -> int:
        sizes: list[int] = []

        def count(tensors: Sequence[Tensor]) -> Tensor:
            sizes.append(tensors[0].nbytes)
            return tensors[0]

        _combine([self.state], count, self.length)
        return sum(sizes)


def _combine(states: Sequence[Any], change: Callable[[Sequence[Tensor]], Tensor], length: int) -> Any:
    """Build a cache of the structure of ``states``, each tensor made by ``change`` from the corresponding tensors."""
    first = states[0]
    if isinstance(first, Tensor):
        return change(states) if first.dim() > 1 else first
    if isinstance(first, dict):
        return {key: _combine([state[key] for state in states], change, length) for key in first}
    if isinstance(first, list | tuple):
        return type(first)([_combine(entries, change, length) for entries in zip(*states, strict=True)])
    if isinstance(first, type | PreTrainedConfig) or not hasattr(first, "__dict__"):
        return first
    made = copy.copy(first)
    vars(made).update(_combine([vars(state) for state in states], change, length))
    if hasattr(first, "cumulative_length"):  # sliding windows: the tokens seen, of which they hold the last ones
        made.cumulative_length = length
    return made


class _TransformersModel(MetaModel):
    """Any causal LM of transformers, with the attention that transformers chooses for it.

    ``batching``, which rows are computed together (BATCHINGS):
    padded: all of them; shorter ones are padded on the left, and the padding is masked.
    equal: rows of one length, for models that keep more than keys and values.
    whole: rows of one length, each from its first token at every step, for models without a usable cache.

    Raises ValueError for an encoder, and for a model type of which transformers has no causal LM.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        device: str,
        batching: str | None = None,
        trust_remote_code: bool = False,
        images: ImageProcessor | None = None,
    ) -> None:
        refusal = ValueError(REFUSAL.format(f"the model type `{config.model_type}`", "transformers cannot build it"))
        more = {"trust_remote_code": trust_remote_code, "images": images}
        super().__init__(config, refusal, dtype=dtype, device=device, **more)
        parameters = inspect.signature(self.module.forward).parameters
        takes = lambda name: name in parameters  # noqa: E731
        self.takes_positions, self.takes_mask = takes("position_ids"), takes("attention_mask")
        self.selects_logits = takes("logits_to_keep")
        self.cache = next(filter(takes, CACHES), None)
        takes_switch = takes("use_cache") or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.switch = {"use_cache": self.cache is not None} if takes_switch else {}
        self.forced = batching
        self.batching = batching or self.choose_batching()

    def check(self) -> None:
        if reason := describe_encoder(self.module):
            raise ValueError(REFUSAL.format(type(self.module).__name__, reason))

    def choose_batching(self) -> str:
        """Choose by what the architecture declares; the probe may choose a stricter one."""
        if self.cache is None:
            return "whole"
        layers = set(getattr(self.module.config.get_text_config(), "layer_types", None) or ())
        stateful = self.module._is_stateful or layers - MIXERS - {"chunked_attention"}
        return "padded" if self.cache == CACHES[0] and self.takes_mask and not stateful else "equal"

    def prefill(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[ImageSpan]] | None = None
    ) -> tuple[Tensor, _CachedRows]:
        """Compute prompts, of one length unless rows are padded; ``images`` stand in them. Returns the logits f[B, V]
        after them."""
        longest = max(map(len, prompts))
        tokens = self._as_tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        absent = torch.tensor([longest - len(prompt) for prompt in prompts], device=self.device)
        rows = _CachedRows(absent, torch.zeros_like(absent))
        if self.images is None or images is None or not any(images):
            return self.extend(rows, tokens), rows
        return self._extend_by_images(self.images, rows, tokens, images), rows

    def _extend_by_images(
        self, images: ImageEmbedder, rows: _CachedRows, tokens: Tensor, spans: Sequence[Sequence[ImageSpan]]
    ) -> Tensor:
        """`extend` for prompts i64[B, n] with images."""
        if self.batching == "whole":
            raise NotImplementedError("images need a cache (batching: padded or equal)")
        absent, (count, length) = rows.padding.tolist(), tokens.shape
        placed = [
            replace(span, start=span.start + row * length + absent[row])
            for row, row_spans in enumerate(spans)
            for span in row_spans
        ]
        embedded = {  # tensors [1, B * n, …] of one row -> [B, n, …]
            name: value if isinstance(value, list) else value[0].unflatten(0, (count, -1))
            for name, value in images.embed(tokens.flatten(), placed).items()
        }
        inputs: dict[str, Any] = {}
        if images.has_two_way_images:
            token_types = torch.zeros_like(tokens).flatten()
            for span in placed:
                token_types[span.start : span.stop] = 1
            inputs["token_type_ids"] = token_types.view(count, length)
        if images.has_axes:
            axes = torch.zeros(3, count, length, dtype=torch.int64)
            for row, row_spans in enumerate(spans):
                positions = cast(Tensor, images.find_positions(length - absent[row], row_spans))
                axes[:, row, absent[row] :] = positions
                rows.shift[row] = images.find_shift(length - absent[row], row_spans)
            inputs["position_ids"] = axes.to(self.device)
        with install_embeddings(find_body(self.module), embedded):
            return self.extend(rows, tokens, **inputs)

    def extend(self, rows: _CachedRows, tokens: Tensor, **more: Any) -> Tensor:
        """Compute tokens i64[B, n] that follow ``rows``, and add them there. Returns the logits f[B, V] after them.
        ``more``: arguments of the model's forward."""
        start, rows.length = rows.length, rows.length + tokens.shape[1]
        inputs: dict[str, Any] = {"logits_to_keep": 1} if self.selects_logits else {}
        off = {key: False for key in self.switch}
        if self.batching == "whole":
            tokens = tokens if rows.state is None else torch.cat([rows.state[..., 0], tokens], 1)
            rows.state = tokens[..., None]
            return self.module(input_ids=tokens, **inputs, **off).logits[:, -1]
        assert self.cache is not None
        positions = torch.arange(rows.length, device=self.device) - rows.padding[:, None]
        shifted = positions[:, start:].clamp(min=0) - rows.shift[:, None]
        if bool(rows.padding.any()):
            inputs["attention_mask"] = (positions >= 0).long()
        if self.takes_positions:
            inputs["position_ids"] = shifted
        inputs |= more
        if rows.state is not None:
            inputs[self.cache] = rows.state
        out = self.module(input_ids=tokens, **inputs, **self.switch)
        rows.state = getattr(out, self.cache, None)
        return out.logits[:, -1]

    @torch.inference_mode()
    def probe(self) -> None:
        """Compare logits computed with the cache, among other rows, with those of plain forwards. Where they differ,
        take the next stricter batching. Raises ValueError if none is left, or if one was asked for."""
        name, tolerance = type(self.module).__name__, TOLERANCE[self.dtype]
        declared, reason = self.batching, ""
        for batching in [declared] if self.forced else BATCHINGS[BATCHINGS.index(declared) :]:
            self.batching = batching
            try:
                error = self._measure_error()
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:  # some models fail on rows that others compute
                reason = f"{type(problem).__name__}: {shorten(str(problem), 200)}"
                continue
            if not error > tolerance:  # generation reports weights that are NaN
                if batching != declared:
                    log.warning("module transformers: %s is exact only with `batching: %s`", name, batching)
                return self._probe_images()
            reason = f"its logits differ from those of a plain forward by {error:.1e} of their spread"
        raise ValueError(REFUSAL.format(name, f"{reason} (batching: {self.batching})"))

    def _probe_images(self) -> None:
        """ValueError unless a prompt with pictures, and two tokens after it, have the logits of a plain forward."""
        if self.images is None:
            return
        name = type(self.module).__name__
        prompt, spans = self.images.make_probe()
        with refuse_failure(lambda why: ValueError(REFUSAL.format(name, f"with images: {why}"))):
            after, rows = self.prefill([prompt, prompt[:2]], [spans, []])
            rows = rows.select([0])
            later = self.images.plain[5:7]
            logits = [after[:1], *(self.extend(rows, self._as_tensor([[token]])) for token in later)]
            inputs = self.images.list_plain_inputs(torch.tensor([*prompt, *later], device=self.device), spans)
            expected = self.module(**inputs).logits[0, len(prompt) - 1 :]
        if (error := compare_logits(torch.cat(logits), expected)) > TOLERANCE[self.dtype]:
            raise ValueError(REFUSAL.format(name, f"with images its logits differ by {error:.1e} of their spread"))

    def _measure_error(self) -> float:
        """Run short texts through every operation that generation does with rows; see compare_logits."""
        texts = [
            [(7919 * position + 31 * number + 5) % self.vocabulary for position in range(length + _STEPS)]
            for number, length in enumerate(_PROMPTS)
        ]
        off = {key: False for key in self.switch}
        plain = [self.module(input_ids=self._as_tensor([text]), **off).logits[0] for text in texts]
        stepwise: list[list[Tensor]] = [[] for _ in texts]
        expected: list[list[Tensor]] = [[] for _ in texts]

        def note(names: list[int], logits: Tensor, rows: _CachedRows) -> _CachedRows:
            ends = (rows.length - rows.padding - 1).tolist()
            for name, row, end in zip(names, logits, ends, strict=True):
                stepwise[name].append(row)
                expected[name].append(plain[name][end])
            return rows

        def begin(*names: int) -> _CachedRows:
            return note([*names], *self.prefill([texts[name][: _PROMPTS[name]] for name in names]))

        def feed(names: list[int], rows: _CachedRows, count: int = 1) -> _CachedRows:
            starts = (rows.length - rows.padding).tolist()
            tokens = [texts[name][start : start + count] for name, start in zip(names, starts, strict=True)]
            return note(names, self.extend(rows, self._as_tensor(tokens)), rows)

        first = feed([0, 0], begin(0).select([0, 0]))
        if self.batching == "padded":
            rows = feed([0, 0, 1, 2], first.join(begin(1, 2)))
            feed([1], feed([1], rows.select([2])), count=2)
        else:
            equal, second = first.join(begin(2)), begin(1)
            for _ in range(2):
                feed([0, 0, 2], equal)
                feed([1], second)
            feed([2], equal.select([2]))
        # For each text: where positions count padding, only the shortest shows it.
        pairs = zip(stepwise, expected, strict=True)
        return float(torch.tensor([compare_logits(torch.stack(a), torch.stack(b)) for a, b in pairs]).max())

    def _as_tensor(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(tokens, device=self.device)


@dataclass(slots=True, eq=False)
class _SampleRow(PartialResponse):
    """One sample in a row of a batch; ``key``: that of its random stream."""

    key: int = 0

    @property
    def text(self) -> list[int]:
        return [*self.submitted.request.prompt, *self.tokens]


@dataclass(slots=True, eq=False)
class _RowBatch:
    """Samples and the rows of the cache that they have, in one order. The last token of each is yet to be fed."""

    samples: list[_SampleRow]
    rows: _CachedRows


class _TransformersSession(GenerationSession):
    """Schedules requests on batches of rows: one batch if rows can be padded, otherwise one for each length. Samples of
    a prompt share its prefill. Where rows can be padded, a conversation keeps its row between two turns, as long as no
    other sample needs the slot and the weights stay; otherwise every turn is computed from its beginning."""

    engine: _TransformersEngine

    def __init__(self, engine: _TransformersEngine, sampling: SamplingConfig, on_token: OnToken | None) -> None:
        super().__init__(engine, sampling, on_token)
        self.model = engine.model
        self.batches: list[_RowBatch] = []
        self.kept: dict[tuple[int, int], tuple[list[int], _CachedRows]] = {}  # sample -> its tokens and its row

    @property
    def active(self) -> Sequence[_SampleRow]:
        return [answer for batch in self.batches for answer in batch.samples]

    def take_active(self) -> Sequence[_SampleRow]:
        active, self.batches = self.active, []
        return active

    def drop_kept(self) -> None:
        self.kept.clear()

    def close(self) -> None:
        super().close()
        self.engine.reserve(self, 0)

    def step(self) -> None:
        while self.ended:
            self.kept.pop(self.ended.popleft(), None)
        while self.arrived:
            self.waiting.append(self.arrived.popleft())
        self._finish_cut()
        self._admit()
        batches, self.batches = self.batches, []
        for batch in batches:
            tokens = torch.tensor([answer.tokens[-1:] for answer in batch.samples], device=self.model.device)
            self._choose(batch, self.model.extend(batch.rows, tokens))
        cached = [batch.rows for batch in self.batches] + [rows for _, rows in self.kept.values()]
        self.engine.reserve(self, sum(rows.count_bytes() for rows in cached))

    def _finish_cut(self) -> None:
        self.finish_unstarted()
        batches, self.batches = self.batches, []
        for batch in batches:
            self._put(batch, [row for row, answer in enumerate(batch.samples) if not answer.submitted.cut])
            for answer in batch.samples:
                if answer.submitted.cut:
                    self.finish(answer, Status.PARTIAL)

    def _admit(self) -> None:
        """Start waiting samples, in order, as many as there are free rows."""
        free = self.engine.settings.max_sequences - len(self.active)
        while self.waiting and free:
            fresh: list[tuple[SubmittedRequest, int]] = []  # with the number of samples that start
            while self.waiting and free:
                pending = self.waiting[0]
                longest = max(len(p.request.prompt) for p in (pending, *(admitted for admitted, _ in fresh)))
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

    def _take_kept(self, pending: SubmittedRequest) -> _CachedRows | None:
        """Take the row of the conversation's last turn, if it has been kept and the prompt goes on from there."""
        tokens, row = self.kept.pop(pending.sample, ([], None))
        follows = pending.request.first_turn is not None and pending.request.prompt[: len(tokens)] == tokens
        return row if follows else None

    def _continue(self, pending: SubmittedRequest, row: _CachedRows) -> None:
        new = pending.request.prompt[row.length :]
        self.count_prompt(pending, prefilled=len(new), kept=row.length)
        logits = self.model.extend(row, torch.tensor([new], device=self.model.device))
        self._choose(_RowBatch(self._start(pending, 1), row), logits)

    def _prefill(self, fresh: Sequence[tuple[SubmittedRequest, int]]) -> None:
        by_length: dict[int, list[tuple[SubmittedRequest, int]]] = {}
        for pending, count in fresh:
            length = 0 if self.model.batching == "padded" else len(pending.request.prompt)
            by_length.setdefault(length, []).append((pending, count))
            self.count_prompt(pending, prefilled=len(pending.request.prompt), kept=0)
        for group in by_length.values():
            prompts = [pending.request.prompt for pending, _ in group]
            logits, rows = self.model.prefill(prompts, [pending.request.images for pending, _ in group])
            repeated = [row for row, (_, count) in enumerate(group) for _ in range(count)]
            samples = [answer for pending, count in group for answer in self._start(pending, count)]
            self._choose(_RowBatch(samples, rows.select(repeated)), logits[repeated])

    def _start(self, pending: SubmittedRequest, count: int) -> list[_SampleRow]:
        first, engine = pending.started, self.engine
        pending.started += count
        stops = [pending.find_stops(self.sampling, engine.decoder) for _ in range(count)]
        numbered = enumerate(stops, first)
        return [_SampleRow(pending, i, stop, key=pending.find_key(engine.seed, i)) for i, stop in numbered]

    def _choose(self, batch: _RowBatch, logits: Tensor) -> None:
        """Draw and record the next token of every sample; put those that go on into the session's batches."""
        samples, logits = batch.samples, self.model.forbid(logits)
        pairs = [[answer.key, answer.length] for answer in samples]
        keys, positions = torch.tensor(pairs, device=logits.device).unbind(1)
        seen = None
        if self.sampling.repetition_penalty != 1:  # bool[B, V]
            seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            for row, answer in enumerate(samples):
                seen[row, answer.text] = True
        tokens, logprobs = sample(logits, uniforms(keys, positions), self.sampling, seen)
        groups = [answer.submitted.request.group for answer in samples]
        choices = read_choices(tokens, logprobs, groups, self.engine.version)
        ended: dict[int, Status] = {}
        for row, (token, logprob) in enumerate(zip(*choices, strict=True)):
            if (status := self.record(samples[row], token, logprob)) is not None:
                ended[row] = status
        for row in ended:
            self._keep(batch, row)
        self._put(batch, [row for row in range(len(samples)) if row not in ended])
        for row, status in ended.items():
            self.finish(samples[row], status)

    def _keep(self, batch: _RowBatch, row: int) -> None:
        """Keep the row of a conversation for its next turn, if all of it was computed by the current weights."""
        answer = batch.samples[row]
        if answer.submitted.request.first_turn is None or self.model.batching != "padded":
            return
        if set(answer.versions) == {self.engine.version}:
            self.kept[answer.submitted.sample] = (answer.text, batch.rows.select([row]))

    def _put(self, batch: _RowBatch, rows: list[int]) -> None:
        """Put these rows of a batch among the session's batches."""
        if not rows:
            return
        if len(rows) < len(batch.samples):
            batch = _RowBatch([batch.samples[row] for row in rows], batch.rows.select(rows))
        for target in self.batches:
            if self.model.batching == "padded" or target.rows.length == batch.rows.length:
                target.samples, target.rows = target.samples + batch.samples, target.rows.join(batch.rows)
                return
        self.batches.append(batch)


class _TransformersEngine(MetaModelEngine):
    """Generates with ``model``, with transformers' own cache. ``common``: the arguments of MetaModelEngine."""

    session_class = _TransformersSession
    model: _TransformersModel

    def __init__(self, model: _TransformersModel, *, settings: TransformersConfig, **common: Any) -> None:
        super().__init__(model, **common)
        self.settings = settings

    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Also raises ValueError for an architecture that fails _TransformersModel.probe."""
        self.model.load(weights, adopt=adopt)
        if self.version < 0:
            self.model.probe()


class TransformersModule(MetaModelModule):
    """Generates with transformers' own cache, in this process."""

    @classmethod
    def build_model(
        cls, architecture: PreTrainedConfig, config: ModelConfig, device: str, images: ImagesConfig | None = None
    ) -> _TransformersModel:
        settings = cls.find_model_settings(config, device, images)
        return _TransformersModel(architecture, batching=config.transformers.batching, **settings)

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        model = cls.build_model(pretrained.read_config(config), config, "cpu")
        return [*super().notes(config), f"sampled with transformers' cache, batching: {model.batching}"]

    def build(self, architecture: PreTrainedConfig) -> _TransformersEngine:
        model = self.build_model(architecture, self.config, self.context.device, self.context.images)
        settings = self.find_engine_settings(architecture)
        return _TransformersEngine(model, settings=self.config.transformers, **settings)
