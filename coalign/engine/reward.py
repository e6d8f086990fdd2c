"""Combines all reward functions and reward models of a run into one reward, which a flow calls as `self.reward`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from coalign.algorithms.segments import RewardGroups
from coalign.cluster.batch_ref import BatchRef
from coalign.cluster.future import Future
from coalign.config.errors import suggest
from coalign.config.schema import FUNCTIONS, ModelConfig, RewardConfig, RunConfig
from coalign.data.batch import Batch
from coalign.data.templates import is_finished
from coalign.rewards.calls import BUGS, RewardBug, RewardError
from coalign.types import SOURCE_KEY, Moments, Stat, Stats, Status, Total

if TYPE_CHECKING:
    from coalign.cluster.cluster import Cluster
    from coalign.cluster.dist import DistModel
    from coalign.data.loader import Loader
    from coalign.engine.reference import BaseWeights
    from coalign.roles import Scorer


EPS = 1e-6  # added to a standard deviation that is divided by


@dataclass(frozen=True, slots=True)
class _RewardTerm:
    """One term of a reward; see coalign.config.schema.RewardConfig."""

    name: str
    weight: float = 1.0
    normalise: Literal["none", "batch", "group", "running"] = "none"
    clip: float | None = None
    sources: tuple[str, ...] = ()  # only rows from these data sources have the term; empty: all rows
    max_bugs: float = 0.5


class Reward:
    """A Scorer that calls all terms of the reward in parallel and sums them by weight.

    The moments of terms normalised by `running` pass from call to call in program order, so they do not depend on which
    call ends first.
    """

    def __init__(
        self, cluster: Cluster, configs: Sequence[RewardConfig], models: Mapping[str, DistModel[Scorer] | BaseWeights]
    ) -> None:
        """``models`` holds the models of ``configs``, and the worker FUNCTIONS if there are functions."""
        self._cluster = cluster
        self._models = models
        self._configs = configs
        self._terms = build_terms(configs)
        self._running = _list_running(self._terms)
        self._seen: BatchRef | Future | None = self._remember({}) if self._running else None

    def forward_step(self, batch: BatchRef | Future, *, into: str | None = None) -> Future:
        """Add the columns ``reward`` f32[N], for each term ``reward/<name>`` f32[N] (unscaled), and ``status``.

        Metrics: `reward/<name>/mean` and `reward/<name>/std`. ``into`` replaces ``reward`` in all names. It is for
        values that samples are compared with (a baseline): the running moments scale them and do not include them.

        A row that lacks the value of a term with weight becomes ERROR, counted in `reward/<name>/failed`. So does a row
        from a source that no such term is for, counted in `reward/unrewarded`. Its reward is NaN, as is that of
        unfinished rows. Evaluation prompts (negative groups) get the weighted sum of the unscaled values. The call
        fails with RewardError if no row that is trained on has a reward, or if a function with weight raises on more
        rows than its `max_bugs`.
        """
        if into and (separate := [t.name for t in self._terms if t.normalise in ("batch", "group")]):
            raise ValueError(
                f"reward '{separate[0]}': this flow compares the rewards of two calls (one gives '{into}'), which "
                "cannot be normalised separately; set normalise to `running` or `none`"
            )
        scored = [
            self._models[config.model].forward_step(batch, into=f"reward/{config.called}")
            for config in self._configs
            if config.model
        ]
        if FUNCTIONS in self._models:
            scored.append(self._models[FUNCTIONS].forward_step(batch))
        settings = {"terms": self._terms, "into": into or "reward"}
        if self._seen is None:
            return self._cluster.transform(combine_rewards, batch, *scored, **settings)
        if into is None:
            self._seen = self._cluster.transform(observe_rewards, self._seen, batch, *scored, terms=self._terms)
        return self._cluster.transform(_combine_with_moments, self._seen, batch, *scored, **settings)

    def snapshot(self) -> BatchRef | Future | None:
        """Return a reference to the moments of the `running` terms, whose calls may not have ended."""
        return self._seen

    def fetch_state(self, seen: BatchRef | Future | None) -> dict[str, dict[str, float]]:
        """Return the moments of each `running` term in a ``snapshot``, as JSON. Waits for its calls."""
        if seen is None:
            return {}
        moments = _from_batch(self._cluster.resolve(seen).fetch(), self._running)
        return {name: asdict(values) for name, values in moments.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore the result of ``fetch_state``; a term that was not `running` when it was saved begins anew."""
        if self._running:
            self._seen = self._remember({name: Moments(**moments) for name, moments in state.items()})

    def _remember(self, seen: Mapping[str, Moments]) -> BatchRef:
        return self._cluster.put(_to_batch([seen.get(name, Moments()) for name in self._running]))


def combine_rewards(
    out: Batch,
    *scored: Batch,
    terms: Sequence[_RewardTerm],
    into: str,
    seen: Mapping[str, Moments] = MappingProxyType({}),
) -> tuple[Batch, Stats]:
    """Compute the columns and metrics of Reward.forward_step from the samples ``out`` and the results of the terms.

    An episode has the values of its first row.
    """
    rows, out, scored = out, out.first_branches(), _select_first(out, scored)
    combined = _CombinedRewards.of(out, scored, terms)
    _refuse_bugs(scored, combined, terms)
    if (combined.finished & combined.training).any() and not combined.complete.any():
        lacking = ", ".join(f"{name} {count}" for name, count in combined.count_failed(terms).items() if count)
        lacking = lacking or "no part with weight is for the sources of these rows (reward[].sources)"
        raise RewardError(
            f"none of {int(combined.finished.sum())} samples has a reward; values that are missing: {lacking}"
            f"{_first_failures(Batch.merge([out, *scored]), terms)}"
        )
    columns = {into: torch.full((len(out),), float("nan"))}
    columns |= {f"{into}/{term.name}": values for term, values in zip(terms, combined.values, strict=True)}
    unscaled = [_RewardTerm(term.name, term.weight) for term in terms]
    for scaled, scale in (
        (combined.complete & combined.training, terms),
        (combined.complete & ~combined.training, unscaled),
    ):
        columns[into][scaled] = combine(combined.values[:, scaled], out["group"][scaled], scale, seen).float()
    status = out["status"].masked_fill(combined.finished & ~combined.complete, int(Status.ERROR))
    return Batch(rows.lengths, {}, rows.spread({**columns, "status": status})), combined.stats(terms, into)


def _select_first(out: Batch, scored: Sequence[Batch]) -> tuple[Batch, ...]:
    """Return of batches with the sequences of ``out`` the first row of each episode."""
    if out.episode is None:
        return tuple(scored)
    return tuple(batch.select(cast(Tensor, out["branch"]) == 0) for batch in scored)


def combine(values: Tensor, group: Tensor, terms: Sequence[_RewardTerm], running: Mapping[str, Moments]) -> Tensor:
    """The sum over terms of weight * clip(normalise(value)): f64[N].

    values [terms, N]: NaN for rows that a term is not for, else finite if it has weight; group i64[N], in any order.
    A value is normalised to (value - mean) / (std + 1e-6) with the moments of this batch, of its group (2601.05242:
    before the sum, so that no term outweighs the others), or for a `running` term with those in ``running`` (ValueError
    if they are empty). Moments leave out rows that the term is not for. The standard deviation is the population's.
    Values that are all equal become 0.
    """
    total = torch.zeros(values.shape[1], dtype=torch.float64)
    for term, row_values in zip(terms, values.double(), strict=True):
        if not term.weight:
            continue
        has_value = row_values.isfinite()
        term_values = row_values[has_value]
        if term.normalise == "group":
            groups = RewardGroups(term_values, group[has_value])
            term_values = groups.deviation / (groups.std(unbiased=False)[groups.member] + EPS)
        elif term.normalise != "none":
            moments = running[term.name] if term.normalise == "running" else Moments.of(term_values)
            if len(term_values) and not moments.count:
                raise ValueError(
                    f"reward '{term.name}': there are no running moments to normalise it by; score samples before what "
                    "they are compared with"
                )
            term_values = (term_values - moments.mean) / (moments.std + EPS)
        total[has_value] += term.weight * (
            term_values if term.clip is None else term_values.clamp(-term.clip, term.clip)
        )
    return total


def _refuse_bugs(scored: Sequence[Batch], combined: _CombinedRewards, terms: Sequence[_RewardTerm]) -> None:
    """Raise RewardBug for a function with weight that has a bug on more than the share `max_bugs` of its rows."""
    lacking = combined.count_failed(terms)
    for term, applies in zip(terms, combined.applies, strict=True):
        asked = int((combined.finished & applies).sum())
        if not term.weight or lacking[term.name] <= term.max_bugs * asked:
            continue
        key = f"reward/{term.name}/failure"
        failures: Sequence[str] = next((cast(Any, batch[key]) for batch in scored if key in batch), ())
        bugs = Counter(failure.partition(": ")[2] for failure in failures if failure.partition(": ")[0] in BUGS)
        if bugs.total() <= term.max_bugs * asked:
            continue
        ((message, _),) = bugs.most_common(1)
        count = f"{bugs.total()} of {asked} samples"
        if message.startswith("TypeError: returned None;"):
            raise RewardBug(f"reward '{term.name}' returned None for {count}: is a `return 0.0` missing?")
        count = "every sample" if bugs.total() == asked else count
        raise RewardBug(f"reward '{term.name}' fails on {count}: {message}")


def _first_failures(scored: Batch, terms: Sequence[_RewardTerm]) -> str:
    """Return the first failure of each term with weight: group, row and message."""
    text = ""
    for term in terms:
        failures = scored.get(f"reward/{term.name}/failure") or []
        row = next((row for row, failure in enumerate(failures) if failure and term.weight), None)
        if row is not None:
            text += f"; '{term.name}' first on group {int(scored['group'][row])}, row {row}: {failures[row]}"
    return text


def observe_rewards(seen: Batch, out: Batch, *scored: Batch, terms: Sequence[_RewardTerm]) -> Batch:
    """Add the samples that are trained on to the moments ``seen`` of `running` terms."""
    out, scored = out.first_branches(), _select_first(out, scored)
    combined = _CombinedRewards.of(out, scored, terms)
    names = _list_running(terms)
    earlier = _from_batch(seen, names)
    rows = combined.complete & combined.training
    values_by_term = {term.name: values for term, values in zip(terms, combined.values, strict=True)}
    return _to_batch(
        [earlier[name] + Moments.of(values_by_term[name][rows & values_by_term[name].isfinite()]) for name in names]
    )


def _combine_with_moments(
    seen: Batch, out: Batch, *scored: Batch, terms: Sequence[_RewardTerm], into: str
) -> tuple[Batch, Stats]:
    """Call `combine_rewards` with the moments ``seen`` of `running` terms."""
    return combine_rewards(out, *scored, terms=terms, into=into, seen=_from_batch(seen, _list_running(terms)))


@dataclass(frozen=True)
class _CombinedRewards:
    """The values of all terms: f32[terms, N], NaN where one is missing. The masks are bool[N]."""

    values: Tensor
    applies: Tensor  # bool[terms, N]: whether the term is for the row's source
    finished: Tensor  # samples that have ended
    complete: Tensor  # finished samples that have the value of every term with weight
    training: Tensor  # samples that are trained on, not evaluated

    @staticmethod
    def of(out: Batch, scored: Sequence[Batch], terms: Sequence[_RewardTerm]) -> _CombinedRewards:
        columns = Batch.merge([out, *scored])
        finished = is_finished(out["status"])
        values = torch.stack([columns[f"reward/{term.name}"].float() for term in terms])
        applies = torch.ones(values.shape, dtype=torch.bool)  # also for a row without a source
        for index, term in enumerate(terms):
            if term.sources:
                applies[index] = torch.tensor([row.get(SOURCE_KEY) in (None, *term.sources) for row in columns["rows"]])
        values = values.masked_fill(~(values.isfinite() & finished & applies), float("nan"))
        weighted = torch.tensor([term.weight != 0 for term in terms])
        complete = finished & (values.isfinite() | ~applies)[weighted].all(0) & _is_rewarded(applies, terms)
        return _CombinedRewards(values, applies, finished, complete, out["group"] >= 0)

    def count_failed(self, terms: Sequence[_RewardTerm]) -> dict[str, int]:
        """Count the finished rows without a value, for each term."""
        lacking = self.finished & self.applies & self.values.isnan()
        return {term.name: int(mask.sum()) for term, mask in zip(terms, lacking, strict=True)}

    def stats(self, terms: Sequence[_RewardTerm], into: str) -> Stats:
        stats: Stats = {f"{into}/{name}/failed": Total(float(n)) for name, n in self.count_failed(terms).items() if n}
        if unrewarded := int((self.finished & ~_is_rewarded(self.applies, terms)).sum()):
            stats[f"{into}/unrewarded"] = Total(float(unrewarded))
        for term, values in zip(terms, self.values, strict=True):
            scored = values[values.isfinite()]
            if len(scored):
                stats[f"{into}/{term.name}/mean"] = Stat.of(scored)
                stats[f"{into}/{term.name}/std"] = Moments.of(scored)
        return stats


def _is_rewarded(applies: Tensor, terms: Sequence[_RewardTerm]) -> Tensor:
    """Whether some term with weight applies to the row: bool[N]."""
    weighted = torch.tensor([term.weight != 0 for term in terms])
    return applies[weighted].any(0) if any(term.sources for term in terms) else applies.new_ones(applies.shape[1])


def build_terms(configs: Sequence[RewardConfig]) -> list[_RewardTerm]:
    """Build the terms that say how the parts of a reward are combined."""
    return [
        _RewardTerm(config.called, config.weight, config.normalise, config.clip, tuple(config.sources), config.max_bugs)
        for config in configs
    ]


def list_reward_parts(config: RunConfig) -> list[RewardConfig]:
    """List the terms of `reward`; without that section, the model named `reward`, if there is one."""
    if config.reward:
        return config.reward
    return [RewardConfig(model="reward")] if "reward" in config.models else []


def list_reward_models(configs: Sequence[RewardConfig]) -> list[str]:
    """List the models that compute terms of a reward, and the worker of its functions."""
    functions = [FUNCTIONS] if any(config.fn for config in configs) else []
    return [*dict.fromkeys(config.model for config in configs if config.model), *functions]


def describe_reward(configs: Sequence[RewardConfig], models: Mapping[str, ModelConfig]) -> str:
    """Describe the reward of a run, a line for each term. Empty without a reward."""
    lines = []
    for config in configs:
        source = f"function {config.fn}" if config.fn else f"model {config.model}"
        if config.model and models[config.model].chat_template:
            source += " (reads text with its own tokenizer)"
        scale = f", normalised by {config.normalise}" if config.normalise != "none" else ""
        bound = f", within ±{config.clip:g}" if config.clip else ""
        logged = "" if config.weight else ", logged"
        rows = f", for rows of {', '.join(config.sources)}" if config.sources else ""
        lines.append(f"  {config.weight:+g} × {config.called}: {source}{scale}{bound}{rows}{logged}")
    return "\n".join(["reward", *lines]) if lines else ""


def list_reward_facts(configs: Sequence[RewardConfig]) -> list[dict[str, Any]]:
    """Return the terms of a reward, as JSON."""
    keys = ("fn", "model", "weight", "normalise", "clip", "sources")
    return [{"name": config.called, **{key: getattr(config, key) for key in keys}} for config in configs]


def _list_running(terms: Sequence[_RewardTerm]) -> list[str]:
    return [term.name for term in terms if term.weight and term.normalise == "running"]


def _to_batch(moments: Sequence[Moments]) -> Batch:
    """Put moments into a batch, a row for each term, so that they stay in the store of batches."""
    columns = {f.name: [getattr(m, f.name) for m in moments] for f in fields(Moments)}
    tensors = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return Batch(torch.zeros(len(moments)), {}, tensors)


def _from_batch(batch: Batch, names: Sequence[str]) -> dict[str, Moments]:
    columns = {f.name: batch[f.name].tolist() for f in fields(Moments)}
    return {name: Moments(**{key: column[i] for key, column in columns.items()}) for i, name in enumerate(names)}


def check_reward_sources(rewards: Sequence[RewardConfig], train: Loader, held_out: Loader | None) -> None:
    """Refuse rewards for sources that have no rows, and sources of training rows that get no reward.

    Nothing is refused for a stream, whose rows are not known yet.
    """
    if not any(reward.sources for reward in rewards) or not train.is_known:
        return
    sources = {*train.sources, *(held_out.sources if held_out else ())}
    for index, reward in enumerate(rewards):
        for name in reward.sources:
            if name not in sources:
                raise ValueError(f"reward[{index}].sources: no row is of the source '{name}'{suggest(name, sources)}")
    for name in train.sources:
        if not any(reward.weight and (not reward.sources or name in reward.sources) for reward in rewards):
            raise ValueError(
                f"reward: no part with weight is for rows of '{name}' (data.train); add one, or leave it out"
            )
