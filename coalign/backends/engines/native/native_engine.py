"""The native engine and its policy module: continuous batching on the trainer's own tensors where that is possible.

Requests wait, get slots of the KV cache, are decoded together, and leave as they finish. A token depends only on the
weights and on (seed, group, index, position), as far as this machine's arithmetic allows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from coalign.backends import pretrained
from coalign.backends.engines.contract import GenerationSession, OnToken
from coalign.backends.engines.meta_model import MetaModelEngine, MetaModelModule
from coalign.backends.engines.native import kernels
from coalign.backends.engines.native import native_model as probe
from coalign.backends.engines.native.cached_attention import (
    EXPERTS,
    ROWS,
    STRIDE,
    DecodeAttention,
    KVCache,
    PrefillAttention,
    PrefillSequence,
)
from coalign.backends.engines.native.graphs import DecodeGraphs
from coalign.backends.engines.native.native_model import NativeModel
from coalign.backends.engines.request import OnDone, PartialResponse, Request, SubmittedRequest
from coalign.backends.engines.sampling import may_wait, read_choices, sample, uniforms
from coalign.backends.known_models import find_known_model
from coalign.backends.packing import join_neighbours
from coalign.config.schema import ImagesConfig, ModelConfig, SamplingConfig
from coalign.data.examples import RowLimit
from coalign.devices import has_graphs
from coalign.processes.host import find_compiler
from coalign.types import UNKNOWN_EXPERT, ImageSpan, Status

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Rows of the state, one column for each slot: the next token to feed, its position, the key of the random stream, and
# its position minus its rotary position (M-RoPE gives an image fewer positions than tokens).
TOKEN, POSITION, KEY, SHIFT = range(4)


@dataclass(slots=True, eq=False)
class _QueuedRequest(SubmittedRequest):
    """A request whose started samples have slots. ``logits`` and ``prefix`` are kept while others wait for one."""

    logits: Tensor | None = None  # f32[1, V] after the prompt
    prefix: list[Tensor] | None = None  # keys and values
    axes: Tensor | None = None  # i64[3, P], rotary positions of the prompt with M-RoPE
    shift: int = 0  # index minus rotary position of a token behind the prompt
    prefills: int = 0  # how often the prompt was computed


@dataclass(slots=True, eq=False)
class _ActiveSequence(PartialResponse):
    """One sample in ``slot`` of the KV cache, being decoded or kept for its next turn."""

    submitted: _QueuedRequest
    slot: int = -1
    prefill: int = 0  # which of the request's prefills computed the keys and values of its prompt

    def is_continued_by(self, queued: _QueuedRequest) -> bool:
        """Whether ``queued`` is the next turn of this conversation."""
        previous, following = self.submitted.request, queued.request
        if self.submitted.sample != queued.sample or previous.first_turn != following.first_turn:
            return False
        return [*previous.prompt, *self.tokens] == following.prompt[: self.length]


class _SequenceSlots:
    """Assigns ``count`` slots of the KV cache to sequences of up to ``longest`` tokens each. Active sequences have the
    slots 0..n-1, so that decoding reads them as one block. Sequences kept between two turns come right after them. A
    slot that becomes free is filled from the end. A kept sequence is dropped as soon as its slot is needed."""

    def __init__(self, model: NativeModel, *, note_seen: bool, reserve: Callable[[int], None]) -> None:
        self.count = self.longest = 0
        self.changes = 0  # how often the memory of cache or state was replaced
        self.cache = KVCache(0, 0, reserve)
        self.state = torch.zeros(4, 0, dtype=torch.int64, device=model.device)
        self.seen: Tensor | None = None  # bool[slots, V]: the tokens that each sequence holds
        if note_seen:
            self.seen = torch.zeros(0, model.vocabulary, dtype=torch.bool, device=model.device)
        self._taken: list[_ActiveSequence] = []  # _taken[i] is in slot i
        self._active = 0
        self._prefixes: Tensor | None = None  # what find_prefixes returned, while the slots have not changed

    @property
    def active(self) -> list[_ActiveSequence]:
        return self._taken[: self._active]

    @property
    def kept(self) -> list[_ActiveSequence]:
        return self._taken[self._active :]

    @property
    def free(self) -> int:
        """Slots that a new sequence can have, including those of kept sequences."""
        return self.count - self._active

    def find_prefixes(self, rows: int) -> Tensor:
        """For each of the slots 0..rows-1: the first slot with the same prompt's keys and values, and the length of
        that prompt. i64[2, rows]"""
        if self._prefixes is None or self._prefixes.shape[1] != rows:
            homes: dict[tuple[int, int], int] = {}
            prefixes = [(slot, 0) for slot in range(rows)]
            for sequence in self.active:
                home = homes.setdefault((id(sequence.submitted), sequence.prefill), sequence.slot)
                prefixes[sequence.slot] = home, len(sequence.submitted.request.prompt)
            self._prefixes = torch.tensor(prefixes).t().contiguous()
        return self._prefixes

    def resize(self, count: int, longest: int) -> None:
        """Reallocate; sequences stay in their slots, except for kept ones beyond ``count``, which are dropped."""
        while len(self._taken) > count:
            self.remove(self._taken[-1])
        self.count, self.longest = count, longest
        self.changes += 1
        rows = -(-count // ROWS) * ROWS  # the surplus holds padding rows; the first position of each is touched
        length = -(-longest // STRIDE) * STRIDE
        taken = len(self._taken)
        self.cache.resize(rows, length, used=(taken, max((s.length for s in self._taken), default=0)))
        state, seen = self.state, self.seen
        self.state = state.new_zeros(len(state), rows)
        self.state[:, :taken] = state[:, :taken]
        if seen is not None:
            self.seen = seen.new_zeros(rows, seen.shape[1])
            self.seen[:taken] = seen[:taken]

    def add(self, sequence: _ActiveSequence, key: int, kept: _ActiveSequence | None = None) -> None:
        """Make a sequence active; its next token follows its prompt and is drawn with the random stream of ``key``. It
        takes over the slot of ``kept``, keys and values included, if that is given."""
        slot = self._active
        if kept is not None:
            self._exchange(kept.slot, slot)
        else:
            if len(self._taken) == self.count:
                self.remove(self._taken[-1])
            self._taken.append(sequence)
            self._move(slot, len(self._taken) - 1)
        self._taken[slot], sequence.slot = sequence, slot
        self._active += 1
        self._prefixes = None
        prompt = sequence.submitted.request.prompt
        self.state[:, slot] = torch.tensor([0, len(prompt) - 1, key, sequence.submitted.shift])
        if self.seen is not None:
            self.seen[slot] = False
            self.seen[slot, prompt] = True

    def note_experts(self, sequence: _ActiveSequence) -> None:
        """Copy a sequence's experts out of its slot, if they are recorded. Its last token has none yet."""
        if stored := self.cache.layers.get(EXPERTS):
            experts = stored[0][sequence.slot, : sequence.length - 1].cpu()
            sequence.experts = F.pad(experts, (0, 0, 0, 0, 0, 1), value=UNKNOWN_EXPERT)

    def keep(self, sequence: _ActiveSequence) -> None:
        """Stop decoding a sequence, but keep its keys and values. Decoding may still write to the position of its last
        token, which has no keys and values yet."""
        self._active -= 1
        self._prefixes = None
        self._exchange(sequence.slot, self._active)

    def release(self) -> None:
        """Free the memory; there are no slots after that."""
        self.cache.layers.clear()
        self.state = self.state.new_zeros(len(self.state), 0)
        self.seen = None

    def clear(self) -> None:
        """Free all slots."""
        self._taken.clear()
        self._active = 0
        self._prefixes = None
        with torch.inference_mode():  # like the step that created the state
            self.state.zero_()

    def remove(self, sequence: _ActiveSequence) -> None:
        hole, last = sequence.slot, len(self._taken) - 1
        self._prefixes = None
        if hole < self._active:
            self._active -= 1
            self._move(self._active, hole)
            hole = self._active
        self._move(last, hole)
        self._taken.pop()
        self.state[:, last] = 0

    def _move(self, slot: int, to: int) -> None:
        if slot == to:
            return
        moved = self._taken[slot]
        self.cache.write(slice(to, to + 1), self.cache.read(slot, moved.length))
        self.state[:, to] = self.state[:, slot]
        if self.seen is not None:
            self.seen[to] = self.seen[slot]
        self._taken[to], moved.slot = moved, to

    def _exchange(self, slot: int, target: int) -> None:
        if slot == target:
            return
        moved, state = self._taken[slot], self.state[:, slot].clone()
        tokens = self.cache.read(slot, moved.length)
        seen = None if self.seen is None else self.seen[slot].clone()
        self._move(target, slot)
        self.cache.write(slice(target, target + 1), tokens)
        self.state[:, target] = state
        if self.seen is not None and seen is not None:
            self.seen[target] = seen
        self._taken[target], moved.slot = moved, target


log = logging.getLogger(__name__)

_GROWTH = 5 / 4  # least factor by which the KV cache grows, so that it does not grow at every step


class _NativeSession(GenerationSession):
    """Schedules requests on the slots of the KV cache.

    The cache is allocated for the longest sequence so far, with as many slots of that length as the engine's kv_tokens
    allow. A request that needs longer slots waits until few enough sequences are active. Between two turns a
    conversation keeps its slot as long as nobody needs it and the weights stay. The next turn then prefills only what
    is new; otherwise it prefills everything, with the same bits.
    """

    engine: NativeEngine
    arrived: deque[_QueuedRequest]
    waiting: deque[_QueuedRequest]

    def __init__(self, engine: NativeEngine, sampling: SamplingConfig, on_token: OnToken | None) -> None:
        super().__init__(engine, sampling, on_token)
        self.model = engine.model
        note_seen = sampling.repetition_penalty != 1
        self.slots = _SequenceSlots(self.model, note_seen=note_seen, reserve=partial(engine.reserve, self))
        self._graphs: DecodeGraphs | None = None
        if engine.graphs and has_graphs(self.model.device):
            self._graphs = DecodeGraphs(self._compute_step, self.model.device, type(self.model.module).__name__)
        self._memory: list[Tensor] = []  # all tensors that a step reads and writes
        self._memory_state = (-1, -1)  # loads of the model and changes of the slots when `_memory` was listed
        self._packing = ExitStack()
        self._packing.enter_context(self.model.packed())

    @property
    def active(self) -> Sequence[_ActiveSequence]:
        return self.slots.active

    def submit(self, request: Request, on_done: OnDone) -> _QueuedRequest:
        model, kv_tokens = self.model, self.engine.kv_tokens
        limits = {"vocabulary": self.engine.vocabulary, "context": self.engine.context}
        queued = _QueuedRequest.plan(request, self.sampling, on_done, **limits)
        if kv_tokens is not None and queued.longest > kv_tokens:
            raise ValueError(
                f"the prompt of group {request.group} may need {len(request.prompt)} + {queued.limit} tokens; "
                f"native.kv_tokens is {kv_tokens}: raise it or shorten max_new_tokens"
            )
        if request.images and model.images is not None:
            queued.axes = model.images.find_positions(len(request.prompt), request.images)
            if queued.axes is not None:
                queued.shift = model.images.find_shift(len(request.prompt), request.images)
        self.arrived.append(queued)
        return queued

    def take_active(self) -> Sequence[_ActiveSequence]:
        active = self.slots.active
        self.slots.clear()
        return active

    def drop_kept(self) -> None:
        self.ended.extend(sequence.submitted.sample for sequence in self.slots.kept)
        for queued in self.waiting:
            queued.logits = queued.prefix = None

    def close(self) -> None:
        """Free the memory of the cache and the graphs now: the session is in reference cycles."""
        super().close()
        with self._packing:
            self._graphs = None
            self._memory.clear()
            self.slots.release()
            self.engine.reserve(self, 0)

    def step(self) -> None:
        self._drop_ended()
        while self.arrived:
            queued = self.arrived.popleft()
            if self._find_kept(queued) is None:
                self.waiting.append(queued)
            else:
                self.waiting.appendleft(queued)  # before another sequence gets its slot
        self._finish_cut()
        self._admit()
        self._decode()

    def _finish_cut(self) -> None:
        self.finish_unstarted()
        for sequence in [sequence for sequence in self.slots.active if sequence.submitted.cut]:
            self.slots.note_experts(sequence)
            self.slots.remove(sequence)
            self.finish(sequence, Status.PARTIAL)

    def _drop_ended(self) -> None:
        """Drop kept sequences of conversations that have ended."""
        ended = {self.ended.popleft() for _ in range(len(self.ended))}
        for sequence in self.slots.kept:
            if sequence.submitted.sample in ended:
                self.slots.remove(sequence)

    def _grow_slots(self) -> bool:
        """Enlarge the cache for the waiting requests, within its limits; False if active sequences must end first."""
        engine, slots = self.engine, self.slots
        continued = {queued.sample for queued in self.waiting}
        kept = sum(sequence.submitted.sample not in continued for sequence in slots.kept)
        wanted = len(slots.active) + kept + sum(queued.waiting for queued in self.waiting)
        longest = max(slots.longest, *(queued.longest for queued in self.waiting))
        max_slots = engine.max_sequences if engine.kv_tokens is None else max(1, engine.kv_tokens // longest)
        count = min(engine.max_sequences, max_slots, max(wanted, slots.count))
        if (count, longest) == (slots.count, slots.longest):
            return True
        if len(slots.active) > count:
            return False
        if slots.count and engine.kv_tokens is None:
            count = min(engine.max_sequences, int(count * _GROWTH)) if count > slots.count else count
            longest = int(longest * _GROWTH) if longest > slots.longest else longest
        slots.resize(count, longest)
        return True

    def _admit(self) -> None:
        """Give free slots to waiting samples, in order; prompts are packed into forwards of prefill_tokens."""
        if not self.waiting or not self._grow_slots():
            return
        while self.waiting and self.slots.free:
            first, filled, fresh = len(self.slots.active), 0, []
            while self.waiting and self.slots.free:
                queued = self.waiting[0]
                is_prefilled = queued.logits is not None
                kept = self._find_kept(queued)
                past = 0 if kept is None else kept.length - 1  # its last token was chosen, but never fed
                filled += 0 if is_prefilled else len(queued.request.prompt) - past
                if fresh and filled > self.engine.prefill_tokens:
                    break
                queued.prefills += not is_prefilled
                slots = self._start(queued, kept)
                if is_prefilled:
                    assert queued.prefix is not None
                    self.slots.cache.write(slots, queued.prefix)
                else:
                    fresh.append((queued, slots, past))
                if not queued.waiting:
                    self.waiting.popleft()
            if fresh:
                self._prefill(fresh)
            started = [sequence.submitted for sequence in self.slots.active[first:]]
            logits = torch.cat([cast(Tensor, queued.logits) for queued in started])
            for queued in started:
                if not queued.waiting:
                    queued.logits = queued.prefix = None
            self._record(first, *self._draw(logits, slice(first, first + len(logits))))

    def _find_kept(self, queued: _QueuedRequest) -> _ActiveSequence | None:
        """Find the conversation's last turn, if its keys and values have been kept."""
        if queued.request.first_turn is None:
            return None
        return next((kept for kept in self.slots.kept if kept.is_continued_by(queued)), None)

    def _start(self, queued: _QueuedRequest, kept: _ActiveSequence | None) -> slice:
        first = len(self.slots.active)
        count = min(queued.waiting, self.slots.free)
        for offset in range(queued.started, queued.started + count):
            key = queued.find_key(self.engine.seed, offset)
            stops = queued.find_stops(self.sampling, self.engine.decoder)
            self.slots.add(_ActiveSequence(queued, offset, stops, prefill=queued.prefills), key, kept)
        queued.started += count
        return slice(first, first + count)

    def _prefill(self, fresh: list[tuple[_QueuedRequest, slice, int]]) -> None:
        """Compute the prompts of (request, its slots, tokens already in the cache); store keys and values there."""
        tokens, positions, sequences, last = [], [], [], []
        axes: list[Tensor] = []
        spans: list[ImageSpan] = []
        for queued, slots, past in fresh:
            start, request = len(tokens), queued.request
            tokens += request.prompt[past:]
            positions += range(past, len(request.prompt))
            decoded = min(request.decoded, len(tokens) - start)
            images = [span for span in request.images if span.start >= past]
            two_way = join_neighbours(images) if self.model.images and self.model.images.has_two_way_images else ()
            sequences.append(PrefillSequence(start, len(tokens), slots, decoded, past, two_way))
            spans += [replace(span, start=span.start + start - past) for span in images]
            if self.model.images is not None:
                indices = torch.arange(past, len(request.prompt)).expand(3, -1)
                axes.append(indices - queued.shift if queued.axes is None else queued.axes[:, past:])
            last.append(len(tokens) - 1)
            self.count_prompt(queued, prefilled=len(tokens) - start, kept=past)
        padding = [0] * (-len(tokens) % ROWS)
        as_tensor = lambda values: torch.tensor(values, device=self.model.device)  # noqa: E731
        rotary = as_tensor(positions + padding)
        if spans and self.model.images is not None and self.model.images.has_axes:
            rotary = F.pad(torch.cat(axes, 1), (0, len(padding))).to(self.model.device)
        attention = PrefillAttention(self.slots.cache, sequences)
        logits = self.model.forward(as_tensor(tokens + padding), rotary, attention, as_tensor(last), spans)
        for (queued, slots, _), row in zip(fresh, logits.split(1), strict=True):
            queued.logits = row
            if queued.waiting:
                queued.prefix = self.slots.cache.read(slots.start, len(queued.request.prompt))

    def _decode(self) -> None:
        active = self.slots.active
        if not active:
            return
        columns = max(s.length for s in active)
        if (outputs := self._replay(len(active), columns)) is None:
            outputs = (self._compute_logits(-(-len(active) // ROWS) * ROWS, columns),)
        if len(outputs) == 1:
            outputs = self._draw(outputs[0][: len(active)], slice(0, len(active)))
        self._record(0, *outputs)

    def _compute_logits(self, rows: int, columns: int) -> Tensor:
        """Compute the logits [rows, V] behind the last tokens of the slots 0..rows-1."""
        tokens, positions = self.slots.state[TOKEN, :rows], self.slots.state[POSITION, :rows]
        rotary = positions if self.model.images is None else positions - self.slots.state[SHIFT, :rows]
        prefixes = self.slots.find_prefixes(rows) if self.model.device.type == "cpu" else None
        return self.model.forward(tokens, rotary, DecodeAttention(self.slots.cache, positions, columns, prefixes), None)

    def _compute_step(self, rows: int, columns: int, live: Tensor) -> tuple[Tensor, ...]:
        """The step that graphs capture: tokens and log-probs; the logits alone where drawing waits for the device."""
        logits = self._compute_logits(rows, columns)
        return (logits,) if may_wait(self.sampling) else self._draw(logits, slice(0, rows), live)

    def _replay(self, count: int, columns: int) -> tuple[Tensor, ...] | None:
        """Replay a graph of the step of the first ``count`` slots; None without one."""
        if self._graphs is None:
            return None
        slots, cache, module = self.slots, self.slots.cache, self.model.module
        if self._memory_state != (now := (self.model.loads, slots.changes)):
            keys_and_values = (storage for layer in cache.layers.values() for storage in layer)
            seen = [] if slots.seen is None else [slots.seen]
            self._memory = [slots.state, *seen, *keys_and_values, *module.parameters(), *module.buffers()]
            self._memory_state = now
        return self._graphs.run(count, columns, (cache.slots, cache.length), self._memory)

    def _draw(self, logits: Tensor, here: slice, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw the next token of the slots ``here``. logits [their number, V]. Returns tokens i64 and log-probs f32.

        Slots that are not ``live`` (bool; None: all are) stay at their position, or it would leave the cache at last.
        """
        state = self.slots.state[:, here]
        seen = None if self.slots.seen is None else self.slots.seen[here]
        logits = self.model.forbid(logits)
        tokens, logprobs = sample(logits, uniforms(state[KEY], state[POSITION] + 1), self.sampling, seen)
        state[TOKEN] = tokens
        state[POSITION] += 1 if live is None else live
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return tokens, logprobs

    def _record(self, first: int, tokens: Tensor, logprobs: Tensor) -> None:
        """Read the tokens and log-probs of the slots from ``first`` on, perhaps with others behind, and record them."""
        sequences = self.slots.active[first:]
        tokens, logprobs = tokens[: len(sequences)], logprobs[: len(sequences)]
        groups = [sequence.submitted.request.group for sequence in sequences]
        choices = zip(sequences, *read_choices(tokens, logprobs, groups, self.engine.version), strict=True)
        statuses = [(sequence, self.record(sequence, token, logprob)) for sequence, token, logprob in choices]
        ended = [(sequence, status) for sequence, status in statuses if status is not None]
        for sequence, _ in reversed(ended):  # the last slot first: then a sequence that moves down has not ended itself
            self.slots.note_experts(sequence)
            # There may be another turn; it can use keys and values only if all are of the same weights.
            if sequence.submitted.request.first_turn is not None and set(sequence.versions) == {self.engine.version}:
                self.slots.keep(sequence)
            else:
                self.slots.remove(sequence)
        for sequence, status in ended:
            self.finish(sequence, status)


class NativeEngine(MetaModelEngine):
    """Generates with ``model``, with keys and values in slots.

    max_sequences: decoded at once. kv_tokens: tokens the KV cache may hold (None: enough for max_sequences of the
    longest). prefill_tokens: prompt tokens in one forward (a longer prompt goes alone). graphs: replay the decode
    step where the device can. ``settings`` are those of MetaModelEngine.

    ``is_invariant``, known once weights are loaded: a token has the same bits in any batch.
    """

    session_class = _NativeSession
    model: NativeModel
    is_invariant = False

    def __init__(
        self,
        model: NativeModel,
        *,
        max_sequences: int,
        kv_tokens: int | None,
        prefill_tokens: int,
        graphs: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(model, **settings)
        self.max_sequences, self.kv_tokens = max_sequences, kv_tokens
        self.prefill_tokens, self.graphs = prefill_tokens, graphs

    @property
    def experts(self) -> tuple[int, int] | None:
        return self.model.experts

    @property
    def max_tokens(self) -> int | None:
        return min((limit for limit in (self.context, self.kv_tokens) if limit is not None), default=None)

    def _load(self, weights: Iterable[tuple[str, Tensor]], *, adopt: bool) -> None:
        """Also raises ValueError for an architecture that fails check_against_transformers."""
        self.model.load(weights, adopt=adopt)
        if self.version < 0:
            probe.check_against_transformers(self.model)
            probe.check_images(self.model)
            with self.model.packed():
                self.is_invariant = probe.is_invariant(self.model)
            if not self.is_invariant:
                name, layers = type(self.model.module).__name__, ", ".join(self.model.variant_layers) or "its attention"
                log.warning(f"log-probs of {name} may depend on their batch in their last bits ({layers})")


class NativeModule(MetaModelModule):
    """Generates with the native engine, in this process."""

    @classmethod
    def build_model(
        cls,
        architecture: PreTrainedConfig,
        config: ModelConfig,
        device: str,
        images: ImagesConfig | None = None,
        **settings: Any,
    ) -> NativeModel:
        return NativeModel(architecture, **cls.find_model_settings(config, device, images), **settings)

    @classmethod
    def check_architecture(cls, config: ModelConfig, name: str) -> None:
        if find_known_model(config) is None:
            super().check_architecture(config, name)

    @classmethod
    def find_arithmetic(cls, config: ModelConfig) -> tuple[torch.dtype, kernels.KernelChoice | None, list[str]]:
        """The model's dtype and kernel on this CPU, and the layers that may round a row differently in batches."""
        if (plain := find_known_model(config)) is None:
            model = cls.build_model(pretrained.read_config(config), config, "cpu")
            return model.dtype, model.kernel, model.variant_layers
        dtype = cls.choose_dtype(config, "cpu")
        kernel = kernels.choose_kernel(plain.linears, dtype)
        return dtype, kernel, kernels.list_variant_linears(kernel, dtype, torch.device("cpu"))

    @classmethod
    def list_limits(cls, config: ModelConfig, section: str) -> list[RowLimit]:
        limits, kv_tokens = super().list_limits(config, section), config.native.kv_tokens
        if kv_tokens is not None and all(limit.amount >= kv_tokens for limit in limits):
            keys = f"{section}: native.kv_tokens less sampling.max_new_tokens"
            limits.append(RowLimit(kv_tokens - config.sampling.max_new_tokens, keys))
        return limits

    @classmethod
    def check_routing_replay(cls, config: ModelConfig, name: str) -> None:
        try:
            cls.build_model(pretrained.read_config(config), config, "cpu", record_experts=True)
        except ValueError as problem:
            raise ValueError(f"rollout.routing_replay is true, and models.{name} cannot record: {problem}") from problem

    @classmethod
    def tune(cls, config: ModelConfig) -> None:
        if config.load is not None:
            cls.find_arithmetic(config)

    @classmethod
    def notes(cls, config: ModelConfig) -> Sequence[str]:
        notes = [*super().notes(config)]
        if config.devices:
            return notes
        plain, dtype = find_known_model(config), cls.choose_dtype(config, "cpu")
        if plain is None or kernels.is_measured(plain.linears, dtype):
            _, kernel, variant = cls.find_arithmetic(config)
            notes += [str(kernel)] if kernel else []
        else:  # seconds, which a check does not take
            variant = []
            notes.append("which kernels are fastest on this processor is measured once, before the run's first step")
        if find_compiler() is None:
            notes.append("no C++ compiler: attention and the choice of tokens take longer")
        if config.compute_dtype == "bfloat16" and dtype == torch.float32:
            notes.append(kernels.FLOAT32_INSTEAD)
        if variant:
            notes.append(f"log-probs may differ in their last bits from batch to batch: {', '.join(variant)}")
        return notes

    def build(self, architecture: PreTrainedConfig) -> NativeEngine:
        config, context = self.config, self.context
        recorded = {"record_experts": context.routing_replay}
        model = self.build_model(architecture, config, context.device, context.images, **recorded)
        return NativeEngine(model, **config.native.model_dump(), **self.find_engine_settings(architecture))
