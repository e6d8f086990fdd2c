"""What `self.reward` is in a flow: every function and reward model that the run lists, combined into one reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coalign.algorithms.advantages import Moments
from coalign.algorithms.combine import RewardTerm, combine
from coalign.cluster.functions import merge_columns
from coalign.cluster.future import BatchRef, Future
from coalign.config.schema import FUNCTIONS, ModelConfig, RewardConfig, RunConfig
from coalign.data.batch import Batch
from coalign.data.templates import is_finished
from coalign.rewards.calls import RewardError
from coalign.types import Stat, Stats, Status, Total

if TYPE_CHECKING:
    from coalign.cluster.base import Cluster
    from coalign.cluster.dist import DistModel
    from coalign.engine.reference import BaseWeights
    from coalign.roles import Scorer


class Reward:
    """A Scorer that asks all parts side by side and sums them by weight, as `reward:` says.

    The moments of `running` parts pass from call to call in the order in which the flow makes the calls, so they do not
    depend on what is computed first.
    """

    def __init__(
        self, cluster: Cluster, parts: Sequence[RewardConfig], models: Mapping[str, DistModel[Scorer] | BaseWeights]
    ) -> None:
        """``models`` holds what ``parts`` name, and FUNCTIONS if there are functions."""
        self._cluster = cluster
        self._models = models
        self._parts = parts
        self._terms = build_terms(parts)
        self._running = _running(self._terms)
        self._seen: BatchRef | Future | None = self._remember({}) if self._running else None

    def forward_step(self, batch: BatchRef | Future, *, into: str | None = None) -> Future:
        """Columns ``reward`` f32[N] and ``reward/<part>`` f32[N] (values as they came), and ``status``; Stats: mean and
        standard deviation of each part, `reward/<part>/mean` and `reward/<part>/std`.

        ``into`` replaces ``reward``: values that samples are compared with (a baseline). They are normalised by the
        moments of the samples scored so far, and are not among them.

        A row that lacks a part which has weight becomes ERROR, counted in `reward/<part>/failed`; its reward is NaN, as
        is that of rows which are not at their end. Prompts of evaluation (negative groups) get the weighted sum of the
        values as they are. The call fails with RewardError if no row could be judged.
        """
        if into and (apart := [t.name for t in self._terms if t.normalise in ("batch", "group")]):
            raise ValueError(
                f"reward '{apart[0]}': this flow compares rewards of two calls ('{into}' is another one), which cannot "
                "be normalised each for itself; set normalise to `running` or `none`"
            )
        scored = [
            self._models[part.model].forward_step(batch, into=f"reward/{part.called}")
            for part in self._parts
            if part.model
        ]
        if FUNCTIONS in self._models:
            scored.append(self._models[FUNCTIONS].forward_step(batch))
        settings = {"terms": self._terms, "into": into or "reward"}
        if self._seen is None:
            return self._cluster.transform(combine_rewards, batch, *scored, **settings)
        if into is None:
            self._seen = self._cluster.transform(observe_rewards, self._seen, batch, *scored, terms=self._terms)
        return self._cluster.transform(combine_with_moments, self._seen, batch, *scored, **settings)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The moments of each `running` part, as JSON. Waits for the calls made so far."""
        if self._seen is None:
            return {}
        seen = _moments(self._cluster.resolve(self._seen).fetch(), self._running)
        return {name: asdict(moments) for name, moments in seen.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from what ``state_dict`` gave; a part that was not running then begins anew."""
        if self._running:
            self._seen = self._remember({name: Moments(**moments) for name, moments in state.items()})

    def _remember(self, seen: Mapping[str, Moments]) -> BatchRef:
        return self._cluster.put(_columns([seen.get(name, Moments()) for name in self._running]))


def combine_rewards(
    out: Batch,
    *scored: Batch,
    terms: Sequence[RewardTerm],
    into: str,
    seen: Mapping[str, Moments] = MappingProxyType({}),
) -> tuple[Batch, Stats]:
    """The columns and Stats of Reward.forward_step, for ``out`` and what each part said of it."""
    judged = CombinedRewards.of(out, scored, terms)
    if judged.rows.any() and not judged.whole.any():
        lacking = ", ".join(f"{name} {count}" for name, count in judged.failed(terms).items() if count)
        raise RewardError(
            f"none of {int(judged.rows.sum())} samples has a reward; values that are missing: {lacking}"
            f"{_first_failures(merge_columns([out, *scored]), terms)}"
        )
    columns = {into: torch.full((len(out),), float("nan"))}
    columns |= {f"{into}/{term.name}": own for term, own in zip(terms, judged.values, strict=True)}
    for rows, scale in ((judged.whole & judged.training, terms), (judged.whole & ~judged.training, _plain(terms))):
        columns[into][rows] = combine(judged.values[:, rows], out["group"][rows], scale, seen).float()
    status = out["status"].masked_fill(judged.rows & ~judged.whole, int(Status.ERROR))
    return Batch(out.lengths, {}, {**columns, "status": status}), judged.stats(terms, into)


def _first_failures(scored: Batch, terms: Sequence[RewardTerm]) -> str:
    """What each part that has weight said of the first row that it failed on, if it said anything."""
    text = ""
    for term in terms:
        said = scored.get(f"reward/{term.name}/failure") or []
        row = next((row for row, failure in enumerate(said) if failure and term.weight), None)
        if row is not None:
            text += f"; '{term.name}' first on group {int(scored['group'][row])}, row {row}: {said[row]}"
    return text


def observe_rewards(seen: Batch, out: Batch, *scored: Batch, terms: Sequence[RewardTerm]) -> Batch:
    """The moments ``seen`` of `running` terms, with those of the rows that are trained on."""
    judged = CombinedRewards.of(out, scored, terms)
    names = _running(terms)
    before = _moments(seen, names)
    rows = judged.whole & judged.training
    own = {term.name: values for term, values in zip(terms, judged.values, strict=True)}
    return _columns([before[name] + Moments.of(own[name][rows]) for name in names])


def combine_with_moments(
    seen: Batch, out: Batch, *scored: Batch, terms: Sequence[RewardTerm], into: str
) -> tuple[Batch, Stats]:
    """`combine_rewards` by the moments ``seen`` of `running` terms."""
    return combine_rewards(out, *scored, terms=terms, into=into, seen=_moments(seen, _running(terms)))


@dataclass(frozen=True)
class CombinedRewards:
    """values f32[parts, N], NaN where there is none; bool[N] each: ``rows`` at their end, those of them that are
    ``whole`` (no part that has weight is missing), and rows of ``training`` rather than evaluation."""

    values: Tensor
    rows: Tensor
    whole: Tensor
    training: Tensor

    @staticmethod
    def of(out: Batch, scored: Sequence[Batch], terms: Sequence[RewardTerm]) -> CombinedRewards:
        columns = merge_columns([out, *scored])
        rows = is_finished(out["status"])
        values = torch.stack([columns[f"reward/{term.name}"].float() for term in terms])
        values = values.masked_fill(~(values.isfinite() & rows), float("nan"))
        weighty = torch.tensor([term.weight != 0 for term in terms])
        return CombinedRewards(values, rows, rows & values[weighty].isfinite().all(0), out["group"] >= 0)

    def failed(self, terms: Sequence[RewardTerm]) -> dict[str, int]:
        """Rows without a value, for each term."""
        return {t.name: int((self.rows & own.isnan()).sum()) for t, own in zip(terms, self.values, strict=True)}

    def stats(self, terms: Sequence[RewardTerm], into: str) -> Stats:
        stats: Stats = {f"{into}/{name}/failed": Total(float(n)) for name, n in self.failed(terms).items() if n}
        for term, own in zip(terms, self.values, strict=True):
            there = own[own.isfinite()]
            if len(there):
                stats[f"{into}/{term.name}/mean"] = Stat.of(there)
                stats[f"{into}/{term.name}/std"] = Stat(there.double().std(unbiased=False).item())
        return stats


def build_terms(parts: Sequence[RewardConfig]) -> list[RewardTerm]:
    """How the parts of a reward are combined."""
    return [RewardTerm(part.called, part.weight, part.normalise, part.clip) for part in parts]


def list_reward_parts(config: RunConfig) -> list[RewardConfig]:
    """What `reward` lists; of a run that lists nothing, the model of that name, if there is one."""
    if config.reward:
        return config.reward
    return [RewardConfig(model="reward")] if "reward" in config.models else []


def list_reward_models(parts: Sequence[RewardConfig]) -> list[str]:
    """The models that compute the parts of a reward, and the worker of its functions."""
    functions = [FUNCTIONS] if any(part.fn for part in parts) else []
    return [*dict.fromkeys(part.model for part in parts if part.model), *functions]


def describe_reward(parts: Sequence[RewardConfig], models: Mapping[str, ModelConfig]) -> str:
    """What the reward of a run is made of, in words: a line for each part. Empty without one."""
    lines = []
    for part in parts:
        source = f"function {part.fn}" if part.fn else f"model {part.model}"
        if part.model and models[part.model].chat_template:
            source += " (reads text with its own tokenizer)"
        scale = f", normalised by {part.normalise}" if part.normalise != "none" else ""
        bound = f", within ±{part.clip:g}" if part.clip else ""
        logged = "" if part.weight else ", logged"
        lines.append(f"  {part.weight:+g} × {part.called}: {source}{scale}{bound}{logged}")
    return "\n".join(["reward", *lines]) if lines else ""


def _running(terms: Sequence[RewardTerm]) -> list[str]:
    return [term.name for term in terms if term.weight and term.normalise == "running"]


def _plain(terms: Sequence[RewardTerm]) -> list[RewardTerm]:
    return [RewardTerm(term.name, term.weight) for term in terms]


def _columns(moments: Sequence[Moments]) -> Batch:
    """Moments as a batch of one row each, so that they can wait where they are computed."""
    columns = {f.name: [getattr(m, f.name) for m in moments] for f in fields(Moments)}
    tensors = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return Batch(torch.zeros(len(moments)), {}, tensors)


def _moments(batch: Batch, names: Sequence[str]) -> dict[str, Moments]:
    columns = {f.name: batch[f.name].tolist() for f in fields(Moments)}
    return {name: Moments(**{key: own[i] for key, own in columns.items()}) for i, name in enumerate(names)}
