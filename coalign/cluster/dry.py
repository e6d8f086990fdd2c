"""A cluster of stand-ins that records a flow as a graph, in milliseconds and without any model.

Calls answer at once with the columns of the real model, all zero, on tiny batches; functions really run. Every call is
recorded in ``cluster.graph``, with the columns that it reads and makes. A flow that reads a missing column fails here,
at the line that reads it. ``STANDINS`` has the batches, one for each type of data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.future import Call, Future, Outcome
from coalign.cluster.local import LocalReference, LocalStore
from coalign.cluster.worker import apply_columns, find_module_class, name_of, transform_batches
from coalign.config.functions import list_columns
from coalign.config.schema import ModelConfig, RunConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.types import SEQUENCE_COLUMNS, TOKEN_COLUMNS, Stats


@dataclass(frozen=True)
class TracedCall:
    """One call: the columns that it reads, by the call that made them, and those that it makes. ``label`` is unique.

    ``batch`` is its input with all columns merged (None for a call without one).
    """

    label: str
    made_by: Call
    reads: dict[str, tuple[str, ...]]
    makes: tuple[str, ...]
    batch: Batch | None = field(default=None, repr=False, compare=False)


@dataclass
class FlowGraph:
    """The calls in the order in which the flow made them; labels are unique (`gae`, `gae#2`)."""

    calls: list[TracedCall] = field(default_factory=list)

    def add(self, call: Call, reads: dict[str, list[str]], makes: list[str], batch: Batch | None = None) -> str:
        """Record a call; returns its label."""
        count = sum(traced.made_by == call for traced in self.calls)
        label = f"{call}#{count + 1}" if count else str(call)
        named = {source: tuple(names) for source, names in reads.items()}
        self.calls.append(TracedCall(label, call, named, tuple(makes), batch))
        return label

    @property
    def edges(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """(from, to, columns)"""
        return [(source, call.label, names) for call in self.calls for source, names in call.reads.items()]


def describe_graph(graph: FlowGraph) -> list[dict[str, Any]]:
    """Return the calls as JSON has them: `label`, `model` (null: a function), `method`, `reads` by label, `makes`."""
    return [
        {
            "label": call.label,
            "model": call.made_by.model,
            "method": call.made_by.method,
            "reads": {source: list(names) for source, names in call.reads.items()},
            "makes": list(call.makes),
        }
        for call in graph.calls
    ]


def draw_graph(graph: FlowGraph) -> str:
    """Draw the graph as text: a paragraph for each call, with what it reads from which call and what it makes."""
    width = max((len(source) for source, _, _ in graph.edges), default=0)
    lines = []
    for call in graph.calls:
        lines.append(call.label)
        lines += [f"  ├─◀ {source:<{width}}  {', '.join(names)}" for source, names in call.reads.items()]
        lines.append(f"  └─▶ {', '.join(call.makes) or 'metrics'}")
    return "\n".join(lines)


PROMPT = 3  # tokens of a stand-in's prompt
RESPONSE = 3  # tokens that it generates
HEAD_COLUMNS = {"lm": "ref_logprobs", "value": "values", "reward": "reward"}


class _TracedBatch(LocalReference):
    """A reference to a batch that knows which call made each column."""

    __slots__ = ("sources",)

    def __init__(self, batch: Batch, sources: Mapping[str, str]) -> None:
        super().__init__(batch)
        self.sources = dict(sources)


class DryCluster:
    """Has the interface of coalign.cluster.cluster.Cluster, on stand-ins."""

    store = LocalStore()

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.models: dict[str, _DryModel] = {}
        self.graph = FlowGraph()
        self.on_call: Callable[[Future], None] | None = None

    def spawn(self, name: str, config: ModelConfig, context: Context) -> _DryModel:
        """Add a stand-in. Only a module of the user's own (a dotted path) is imported, for the names of its columns."""
        model = self.models[name] = _DryModel(name, config, context, self)
        return model

    def put(self, batch: Batch, label: str = "data") -> BatchRef:
        """Store a batch of the driver, as a node with this ``label``."""
        names = _columns(batch)
        label = self.graph.add(Call(None, label), {}, names)
        return self._keep(batch, dict.fromkeys(names, label))

    def apply(self, function: Callable[..., Any], *inputs: BatchRef | Batch | Future, **keywords: Any) -> Future:
        """Run the function. Raises ValueError for a missing column."""
        refs = [self.resolve(value) for value in inputs]
        data, sources = Batch.merge([ref.fetch() for ref in refs]), self.sources(refs)
        needed, optional = list_columns(function)
        reads = _by_source(sources, [name for name in (*needed, *optional) if name in sources])
        columns, stats = apply_columns(function, data, keywords)
        return self.answer(
            Call(None, name_of(function)), data.with_(**columns), stats, reads, list(columns), sources, data
        )

    def join(self, *inputs: BatchRef | Batch | Future) -> Future:
        """Merge the columns of all inputs; each keeps the call that made it."""
        refs = [self.resolve(value) for value in inputs]
        data = Batch.merge([ref.fetch() for ref in refs])
        return self.answer(Call(None, "join"), data, {}, {}, [], self.sources(refs), data)

    def transform(self, function: Callable[..., Any], *inputs: BatchRef | Batch | Future, **keywords: Any) -> Future:
        """Run the function; every column of its result counts as made by it."""
        refs = [self.resolve(value) for value in inputs]
        data = [ref.fetch() for ref in refs]
        batch, stats = transform_batches(function, data, keywords)
        sources = self.sources(refs)
        reads = _by_source(sources, list(sources))
        return self.answer(Call(None, name_of(function)), batch, stats, reads, _columns(batch), {}, data[0])

    def shutdown(self) -> None:
        """Do nothing: nothing was started."""

    def __enter__(self) -> DryCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def resolve(self, value: Any) -> Any:
        """See Cluster.resolve."""
        value = value.result() if isinstance(value, Future) else value
        return self.put(value) if isinstance(value, Batch) else value

    def sources(self, refs: list[BatchRef]) -> dict[str, str]:
        """Which call made each column of the merged batches."""
        return {name: source for ref in refs for payload in ref.payloads for name, source in payload.sources.items()}

    def answer(
        self,
        call: Call,
        batch: Batch | None,
        stats: Stats,
        reads: dict[str, list[str]],
        made: list[str],
        sources: Mapping[str, str],
        read: Batch | None,
    ) -> Future:
        """Record a call that made the columns ``made`` of ``batch`` (others: see ``sources``); its finished Future."""
        node = self.graph.add(call, reads, made, read)
        result: Any = stats
        if batch is not None:
            result = self._keep(batch, {name: node if name in made else sources[name] for name in _columns(batch)})
        future = Future(call)
        future.succeed(Outcome(result, stats))
        if self.on_call:
            self.on_call(future)
        return future

    def _keep(self, batch: Batch, sources: Mapping[str, str]) -> BatchRef:
        return BatchRef.of(Meta.of(batch), _TracedBatch(batch, sources), self.store)


class _DryModel:
    """Has the interface of coalign.cluster.dist.DistModel; computes zeros."""

    def __init__(self, name: str, config: ModelConfig, context: Context, cluster: DryCluster) -> None:
        self.name, self.config, self.context, self.cluster = name, config, context, cluster
        self.store = cluster.store
        # Backends of Coalign import large libraries. The columns that they add follow from the head, except for judges.
        is_custom = ":" in config.module or config.judge
        self._scores = find_module_class(config).columns(config, context) if is_custom else (HEAD_COLUMNS[config.head],)

    def generate(self, prompts: BatchRef | Future, *, samples: int | None = None, **_: Any) -> Future:
        """Make ``samples`` responses of three tokens to each prompt."""
        ref = self._batch("generate", prompts)
        data, sources = ref.fetch(), self.cluster.sources([ref])
        batch = _responses(data, samples or self.context.samples_per_prompt)
        if self.context.environments:
            nothing, messages = torch.zeros(batch.tokens_total), [[] for _ in range(len(batch))]
            branch = torch.zeros(len(batch), dtype=torch.int32)
            states = batch["loss_mask"].long()
            batch = batch.with_(turn_rewards=nothing, turn_states=states, messages=messages, branch=branch)
        reads = _by_source(sources, [name for name in _columns(data) if name in batch])
        return self.cluster.answer(Call(self.name, "generate"), batch, {}, reads, _columns(batch), {}, data)

    def top_logprobs(self, batch: BatchRef | Future) -> Future:
        """Make a teacher's columns, with two candidates for each token."""
        ref = self._batch("top_logprobs", batch)
        data = ref.fetch()
        columns = {
            name: torch.zeros(data.tokens_total, 2, dtype=TOKEN_COLUMNS[name])
            for name in ("candidates", "teacher_logprobs")
        }
        reads = _by_source(self.cluster.sources([ref]), ["tokens"])
        made = Batch(data.lengths, columns)
        return self.cluster.answer(Call(self.name, "top_logprobs"), made, {}, reads, list(columns), {}, data)

    def forward_step(self, batch: BatchRef | Future, *, into: str | None = None, **_: Any) -> Future:
        """Make the module's columns; ``into`` renames the first."""
        ref = self._batch("forward_step", batch)
        data = ref.fetch()
        names = [into or self._scores[0], *self._scores[1:]]
        per_token = self.config.head != "reward" and self.config.judge is None
        made = Batch(data.lengths, *_zeros(data, names, per_token=per_token))
        reads = _by_source(self.cluster.sources([ref]), ["tokens"])
        return self.cluster.answer(Call(self.name, "forward_step"), made, {}, reads, names, {}, data)

    def train_step(self, batch: BatchRef | Future, **_: Any) -> Future:
        """Record a training step."""
        return self._consume("train_step", batch)

    def eval_step(self, batch: BatchRef | Future, **_: Any) -> Future:
        """Record an evaluation step."""
        return self._consume("eval_step", batch)

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Future:
        """Call a method of the user's own; its columns are those of ``method.produces`` (without it: no result)."""
        refs = [self.cluster.resolve(value) for value in (*arguments, *keywords.values())]
        refs = [ref for ref in refs if isinstance(ref, BatchRef)]
        if not refs:
            return self.cluster.answer(Call(self.name, method), None, {}, {}, [], {}, None)
        names: list[str] = list(getattr(getattr(find_module_class(self.config), method), "produces", ()))
        data, sources = Batch.merge([ref.fetch() for ref in refs]), self.cluster.sources(refs)
        made = Batch(data.lengths, *_zeros(data, names, per_token=True)) if names else None
        reads = _by_source(sources, list(sources))
        return self.cluster.answer(Call(self.name, method), made, {}, reads, names, {}, data)

    def __getattr__(self, method: str) -> Callable[..., Future]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.call, method)

    def _batch(self, method: str, value: Any) -> BatchRef:
        ref = self.cluster.resolve(value)
        if not isinstance(ref, BatchRef):
            raise TypeError(f"{self.name}.{method}: expected a batch, got a {type(ref).__name__}")
        return ref

    def _consume(self, method: str, batch: BatchRef | Future) -> Future:
        ref = self._batch(method, batch)
        sources = self.cluster.sources([ref])
        return self.cluster.answer(
            Call(self.name, method), None, {}, _by_source(sources, list(sources)), [], {}, ref.fetch()
        )


def _responses(data: Batch, samples: int) -> Batch:
    """Prompts with responses, in the columns of docs/design.md §3; sequence columns are repeated."""
    rows = torch.arange(len(data)).repeat_interleave(samples)
    lengths = data.lengths[rows] + RESPONSE
    base = Batch(lengths)
    position = torch.arange(base.tokens_total) - base.offsets[base.segment]
    mask = position >= (lengths - RESPONSE)[base.segment]
    repeated = data.only(*data.sequence).select(rows).sequence if data.sequence else {}
    sequence = dict(repeated) | {
        "index": torch.arange(samples, dtype=torch.int32).repeat(len(data)),
        "prompt_length": (lengths - RESPONSE).to(torch.int32),
        "status": torch.zeros(len(rows), dtype=torch.uint8),
    }
    token = {
        "tokens": torch.zeros(base.tokens_total, dtype=torch.int32),
        "loss_mask": mask,
        "rollout_logprobs": torch.zeros(base.tokens_total),
        "versions": torch.where(mask, 0, -1).to(torch.int32),
    }
    return Batch(lengths, token, sequence)


def _zeros(data: Batch, names: list[str], per_token: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(token columns, sequence columns) of zeros; names in coalign.types have their own type and dtype."""
    token, sequence = {}, {}
    for name in names:
        of_sequence = name in SEQUENCE_COLUMNS or name.startswith("reward/")
        if name in TOKEN_COLUMNS or (per_token and not of_sequence):
            token[name] = torch.zeros(data.tokens_total, dtype=TOKEN_COLUMNS.get(name, torch.float32))
        else:
            sequence[name] = torch.zeros(len(data), dtype=SEQUENCE_COLUMNS.get(name, torch.float32))
    return token, sequence


def _columns(batch: Batch) -> list[str]:
    return [*batch.token, *batch.sequence]


def _by_source(sources: Mapping[str, str], names: list[str]) -> dict[str, list[str]]:
    """Group columns by the call that made them."""
    reads: dict[str, list[str]] = {}
    for name in names:
        reads.setdefault(sources[name], []).append(name)
    return reads


def prompts() -> Batch:
    """Two prompts of two and three tokens."""
    return Batch(torch.tensor([2, 3])).with_(
        tokens=torch.zeros(5, dtype=torch.int32), group=torch.arange(2), rows=[{}, {}]
    )


def conversations() -> Batch:
    """Two conversations of six tokens, half of them learned."""
    return _make_responses([0, 1])


def documents() -> Batch:
    """Two documents; the first is in two pieces."""
    batch = _make_responses([0, 0, 1], index=[0, 1, 0], prompt_length=[1, 1, 1])
    return batch.with_(loss_mask=torch.tensor([False, *[True] * (PROMPT + RESPONSE - 1)] * 3))


def preferences() -> Batch:
    """Two prompts, each with a chosen and a rejected response."""
    return _make_responses([0, 0, 1, 1], index=[0, 1] * 2, preference=[1, 0] * 2, margin=[0] * 4)


def labelled() -> Batch:
    """Two prompts, one with a desirable response and one with an undesirable one."""
    return _make_responses([0, 1], index=[0, 0], preference=[1, 0])


def steps() -> Batch:
    """Two solutions of three steps."""
    batch = _make_responses([0, 1], index=[0, 0])
    total = batch.tokens_total
    return batch.with_(label=torch.zeros(total), candidates=torch.zeros(total, 2, dtype=torch.int32))


def _make_responses(group: list[int], **columns: list[int]) -> Batch:
    """Prompts with responses, whose tokens are learned."""
    n = len(group)
    columns = {"group": group, "prompt_length": [PROMPT] * n} | columns
    return Batch(torch.full((n,), PROMPT + RESPONSE)).with_(
        tokens=torch.zeros(n * (PROMPT + RESPONSE), dtype=torch.int32),
        loss_mask=torch.tensor(([False] * PROMPT + [True] * RESPONSE) * n),
        rows=[{} for _ in range(n)],
        **{name: torch.tensor(column, dtype=SEQUENCE_COLUMNS[name]) for name, column in columns.items()},
    )


STANDINS: Mapping[str, Callable[[], Batch]] = {
    "prompts": prompts,
    "conversations": conversations,
    "documents": documents,
    "preferences": preferences,
    "labelled": labelled,
    "steps": steps,
}
