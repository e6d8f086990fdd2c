"""Decides which groups of samples a step trains on: the filter, token budgets, response lengths, and their settings.

``Curriculum`` passes over prompts that are too easy or too hard, by the share of right answers among the run's own
samples. ``build_group_selection`` makes a ``GroupSelection`` of a plan; environment.py acts on it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.choice import find_footprint
from coalign.cluster.future import Future
from coalign.cluster.worker import bind_columns, name_of
from coalign.config.schema import RunConfig
from coalign.config.schema.rollout import CurriculumConfig, RolloutConfig
from coalign.data.batch import Batch
from coalign.data.examples import MARKS
from coalign.data.loader import Loader
from coalign.types import SEQUENCE_COLUMNS, SOURCE_KEY, Stat, Stats, Total

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster
    from coalign.launch.plan import Plan


class Curriculum:
    """Draws prompts whose share of right answers is within the bounds, not measured yet, or forgotten.

    ``shares`` maps the hash of a row's content to its last share and the step that measured it.
    """

    def __init__(self, config: CurriculumConfig, loader: Loader) -> None:
        self.config = config
        self.loader = loader
        self.shares: dict[str, tuple[float, int]] = {}

    def draw(self, rows: int, step: int) -> tuple[Batch, Stats]:
        """Draw ``rows`` prompts for ``step`` (metric: curriculum/passed_over). RuntimeError if too few are left."""
        chosen: list[Batch] = []
        drawn, missing = 0, rows
        while missing or not chosen:
            prompts = self.loader.next(missing)
            drawn += missing
            wanted = [self._is_wanted(row, step) for row in prompts["rows"]]
            chosen.append(prompts.select(torch.tensor(wanted, dtype=torch.bool)))
            self.loader.give_back(row for row, wants in zip(prompts["rows"], wanted, strict=True) if not wants)
            missing -= len(chosen[-1])
            if missing and drawn > rows + 2 * len(self.shares):
                raise RuntimeError(
                    f"curriculum: of {drawn} prompts drawn for step {step + 1} only {rows - missing} of {rows} are "
                    f"within low={self.config.low} and high={self.config.high} or untried ({len(self.shares)} are "
                    "known). Widen the bounds, or set curriculum.forget, so that prompts are tried again"
                )
        return Batch.concat(chosen), {"curriculum/passed_over": Total(float(drawn - rows))}

    def note(self, shares: Batch, step: int) -> Stats:
        """Record the result of ``pass_rates``. Metrics: curriculum/pass_rate, curriculum/known (prompts)."""
        for key, share in zip(list(shares.sequence["key"]), shares["share"].tolist(), strict=True):
            self.shares[str(key)] = (share, step)
        return {"curriculum/pass_rate": Stat.of(shares["share"]), "curriculum/known": Stat(float(len(self.shares)))}

    def _is_wanted(self, row: Mapping[str, Any], step: int) -> bool:
        share, measured = self.shares.get(_hash_row(row), (None, 0))
        if share is None or (self.config.forget is not None and step - measured >= self.config.forget):
            return True
        return self.config.low <= share <= self.config.high

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shares)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shares = {key: (share, step) for key, (share, step) in state.items()}


def pass_rates(batch: Batch, *, solved: float) -> Batch:
    """Return a row per group: ``key`` of its prompt, ``share`` f64 of its samples with reward >= ``solved``."""
    batch = batch.as_episodes()
    groups, member = torch.unique(batch["group"], return_inverse=True)
    count = torch.bincount(member, minlength=len(groups))
    right: Tensor = torch.bincount(member, weights=(batch["reward"] >= solved).double(), minlength=len(groups))
    keys = [_hash_row(row) for row in _list_first_rows(batch, member)]
    return Batch(torch.zeros(len(groups)), {}, {"share": right / count, "key": keys})


def _list_first_rows(batch: Batch, member: Tensor) -> list[Mapping[str, Any]]:
    """Return the row of data of each group; ``member`` i64[N] numbers the groups."""
    first: dict[int, Mapping[str, Any]] = {}
    for group, row in zip(member.tolist(), batch["rows"], strict=True):
        first.setdefault(group, row)
    return [first[group] for group in sorted(first)]


def _hash_row(row: Mapping[str, Any]) -> str:
    """Hash the content of a row of data, without its position in the file."""
    content = {key: value for key, value in row.items() if key not in (*MARKS, SOURCE_KEY)}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def filter_groups(
    batch: Batch, *, keep: Callable[..., Tensor], arguments: Mapping[str, Any], by_source: bool = False
) -> tuple[Batch, Stats]:
    """Keep the groups for all of whose samples ``keep(columns, **arguments) -> bool[N]`` returns True.

    Metrics: filter/kept and filter/dropped, in groups, ``by_source`` those of each source, too; filter/dropped_tokens,
    in generated tokens. ValueError for a column that nobody produced, or a result of another type or shape.
    """
    if not len(batch):
        return batch, {}
    samples = batch.as_episodes()
    kept = keep(*bind_columns(keep, samples), **arguments)
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != (len(samples),):
        returned = f"{kept.dtype} {list(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
        raise ValueError(f"filter `{name_of(keep)}` returned {returned}; expected torch.bool [{len(samples)}]")
    kept = kept if batch.episode is None else kept[batch.episode]
    groups, member = torch.unique(batch["group"], return_inverse=True)
    passed = torch.ones(len(groups), dtype=torch.bool)
    passed[member[~kept]] = False
    stats: Stats = {"filter/kept": Total(float(passed.sum())), "filter/dropped": Total(float((~passed).sum()))}
    stats["filter/dropped_tokens"] = Total(float(batch.select(~passed[member])["loss_mask"].sum()))
    for source, is_of_source in find_sources(batch["rows"]).items() if by_source else ():
        group_is_of_source = torch.zeros_like(passed).index_fill_(0, member[is_of_source], True)
        stats[f"source/{source}/kept"] = Total(float((passed & group_is_of_source).sum()))
        stats[f"source/{source}/dropped"] = Total(float((~passed & group_is_of_source).sum()))
    return batch.select(passed[member]), stats


def find_sources(rows: Sequence[Mapping[str, Any]], key: str = SOURCE_KEY) -> dict[str, Tensor]:
    """Return a mask of the rows, bool[N], for each source, or for each value of another ``key``."""
    names = [row.get(key, "") for row in rows]
    return {name: torch.tensor([other == name for other in names]) for name in sorted(set(names))}


class _ResponseLengths:
    """Remembers the mean response length (tokens) of each prompt, so that replicas of a policy get equal work.

    Prompts are identified by the content of their rows; a new one counts as average.
    """

    def __init__(self) -> None:
        self.lengths: dict[str, float] = {}

    def expect(self, prompts: Batch) -> Batch:
        """Add the column ``expected_tokens`` (at least 1) to the prompts."""
        average = sum(self.lengths.values()) / len(self.lengths) if self.lengths else 1.0
        expected = [self.lengths.get(_hash_row(row), average) for row in prompts["rows"]]
        return prompts.with_(expected_tokens=torch.tensor(expected).round().clamp(min=1).int())

    def note(self, lengths: Batch) -> None:
        """Record the result of ``response_lengths``."""
        self.lengths |= {
            str(key): length for key, length in zip(lengths.sequence["key"], lengths["length"].tolist(), strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.lengths)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lengths = dict(state)


def response_lengths(batch: Batch) -> Batch:
    """Return a row without tokens for each group: ``key`` of its prompt, ``length`` f64, the mean of its responses."""
    batch = batch.as_episodes()
    groups, member = torch.unique(batch["group"], return_inverse=True)
    chosen = torch.bincount(member[batch.segment[batch["loss_mask"]]], minlength=len(groups))
    length = chosen.double() / torch.bincount(member, minlength=len(groups))
    keys = [_hash_row(row) for row in _list_first_rows(batch, member)]
    return Batch(torch.zeros(len(groups)), {}, {"length": length, "key": keys})


def add_budgets(prompts: Batch, config: RolloutConfig, samples: int, max_new_tokens: int) -> Batch:
    """Add the columns ``samples`` and ``max_new_tokens`` where ``config`` names keys of the rows for them.

    Rows without the key get the numbers passed to this function. Each sample of a prompt may use an equal share of
    ``config.group_tokens``, so that no limit depends on which sample is generated first. ValueError for a value that is
    no positive whole number, and for a share of less than one token.
    """
    keys = {"samples": (config.samples_key, samples), "max_new_tokens": (config.max_new_tokens_key, max_new_tokens)}
    columns = {}
    for name, (key, otherwise) in keys.items():
        if key is not None:
            values = [row.get(key) for row in prompts["rows"]]
            numbers = [otherwise if value is None else value for value in values]
            for row, number in zip(prompts["rows"], numbers, strict=True):
                if not isinstance(number, int) or number < 1:
                    source, index = (row.get(mark, "?") for mark in MARKS[:2])
                    raise ValueError(
                        f"rollout.{name}_key: row {index} of {source} has {number!r} under '{key}'; expected a whole "
                        "number > 0"
                    )
            columns[name] = torch.tensor(numbers, dtype=SEQUENCE_COLUMNS[name])
    if config.group_tokens is not None:
        counts = columns.get("samples", torch.full((len(prompts),), samples))
        limits = columns.get("max_new_tokens", torch.full((len(prompts),), max_new_tokens))
        shares = config.group_tokens // counts
        if bool((shares < 1).any()):
            raise ValueError(
                f"rollout.group_tokens is {config.group_tokens}, and a prompt has {int(counts.max())} samples: there "
                "is not one token for each; raise it"
            )
        columns["max_new_tokens"] = torch.minimum(limits, shares).to(SEQUENCE_COLUMNS["max_new_tokens"])
    return prompts.with_(**columns) if columns else prompts


DEFAULT_MAX_ROUNDS = 10  # rollouts for one step without a filter, for each round that the longest response takes
MIN_CONTINUED_VERSIONS = 4  # an unfinished group may be continued for at least so many weight versions


@dataclass(frozen=True)
class GroupSelection:
    """Which groups a step trains on.

    ``groups``: how many (None: all of one rollout). A step takes at most ``max_rounds * rounds_per_response`` rollouts;
    the second factor is how many the longest response takes. ``max_age``: weight versions that the oldest token of a
    group may lag behind. ``add_budgets`` adds the columns that limit the cost of each prompt.
    """

    groups: int | None = None
    max_rounds: int = 1
    rounds_per_response: int = 1
    max_age: int = 0
    filter: partial[Any] | None = None
    replay: Replay | None = None
    curriculum: Curriculum | None = None
    lengths: _ResponseLengths | None = None
    add_budgets: Callable[[Batch], Batch] | None = None


def check_limits(config: RunConfig) -> None:
    """Refuse (ValueError) a token budget or a bound on age that cannot work."""
    budget, samples = config.rollout.group_tokens, config.runtime.samples_per_prompt
    if budget is not None and budget < samples:
        raise ValueError(
            f"rollout.group_tokens is {budget} and runtime.samples_per_prompt {samples}: each sample gets an "
            f"equal share of these tokens, and there is not one for each; make it {samples} or more"
        )
    staleness, age = config.runtime.max_staleness, config.rollout.max_age
    if age is not None and age < staleness:
        raise ValueError(
            f"rollout.max_age is {age} and runtime.max_staleness {staleness}: a batch may be begun {staleness} "
            f"versions ahead, so its tokens would be dropped for their age; make max_age {staleness} or more"
        )


def _count_rounds_per_response(config: RunConfig) -> int:
    """Return how many rollouts the longest response takes."""
    if config.rollout.round_tokens is None:
        return 1
    return math.ceil(config.models["policy"].sampling.max_new_tokens / config.rollout.round_tokens)


def _compute_max_age(config: RunConfig) -> int:
    """Return how many weight versions the oldest token of a group may lag behind the step that trains on it."""
    if config.rollout.max_age is not None:
        return config.rollout.max_age
    if config.rollout.round_tokens is None:
        return config.runtime.max_staleness
    return config.runtime.max_staleness + max(_count_rounds_per_response(config) - 1, MIN_CONTINUED_VERSIONS)


def build_group_selection(plan: Plan, cluster: Cluster, loader: Loader) -> GroupSelection:
    """Build the GroupSelection of a plan.

    The number of groups is fixed only where a filter, oversampling or partial responses decide which are complete.
    """
    config, rollout, policy = plan.config, plan.config.rollout, plan.config.models.get("policy")
    has_fixed_number = plan.filter or rollout.oversample > 1 or rollout.round_tokens
    budgets = None
    if policy and (rollout.samples_key or rollout.max_new_tokens_key or rollout.group_tokens):
        samples, tokens = config.runtime.samples_per_prompt, policy.sampling.max_new_tokens
        budgets = partial(add_budgets, config=rollout, samples=samples, max_new_tokens=tokens)
    return GroupSelection(
        groups=config.runtime.prompts_per_step if has_fixed_number else None,
        max_rounds=config.filter.max_rounds if config.filter else DEFAULT_MAX_ROUNDS,
        rounds_per_response=_count_rounds_per_response(config),
        max_age=_compute_max_age(config),
        filter=plan.filter,
        replay=Replay(cluster, plan.replay, config.replay.steps) if plan.replay and config.replay else None,
        curriculum=Curriculum(config.curriculum, loader) if config.curriculum else None,
        lengths=_ResponseLengths() if policy and find_footprint("policy", policy).data_parallel_size > 1 else None,
        add_budgets=budgets,
    )


class Replay:
    """Keeps the newest batch and the ``steps`` before it; ``function`` mixes them into one batch.

    Replayed samples may be older than the bound on staleness. The trainer computes their log-probs anew, so the
    importance weights of the loss account for their age.
    """

    def __init__(self, cluster: Cluster, function: partial[Any], steps: int) -> None:
        self.cluster = cluster
        self.function = function
        self.remembered: deque[BatchRef] = deque(maxlen=steps + 1)

    def mix(self, batch: BatchRef) -> Future:
        """Add the newest batch, and return the batch to train on."""
        self.remembered.append(batch)
        return self.cluster.transform(self.function.func, *self.remembered, **self.function.keywords)

    def restore(self, batches: list[Batch]) -> None:
        """Replace the remembered batches, oldest first."""
        self.remembered.clear()
        self.remembered.extend(self.cluster.put(batch) for batch in batches)
