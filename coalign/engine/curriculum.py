"""Passes over prompts that are too easy or too hard, by the share of right answers among the run's own samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coalign.config.schema.rollout import CurriculumConfig
from coalign.data.batch import Batch
from coalign.data.examples import MARKS
from coalign.data.loader import Loader
from coalign.types import SOURCE_KEY, Stat, Stats, Total


class Curriculum:
    """Draws prompts whose share of right answers is within the bounds, or unknown, or forgotten.

    ``known`` maps the hash of a row's content to its last share and the step that measured it.
    """

    def __init__(self, config: CurriculumConfig, loader: Loader) -> None:
        self.config = config
        self.loader = loader
        self.known: dict[str, tuple[float, int]] = {}

    def draw(self, rows: int, step: int) -> tuple[Batch, Stats]:
        """Draw ``rows`` prompts for ``step``; curriculum/passed_over. RuntimeError if too few are within the bounds."""
        parts: list[Batch] = []
        drawn, missing = 0, rows
        while missing or not parts:
            prompts = self.loader.next(missing)
            drawn += missing
            parts.append(
                prompts.select(torch.tensor([self._is_wanted(row, step) for row in prompts["rows"]], dtype=torch.bool))
            )
            missing -= len(parts[-1])
            if missing and drawn > rows + 2 * len(self.known):
                raise RuntimeError(
                    f"curriculum: of {drawn} prompts drawn for step {step + 1} only {rows - missing} of {rows} are "
                    f"within low={self.config.low} and high={self.config.high} or untried ({len(self.known)} are "
                    "known). Widen the bounds, or set curriculum.forget, so that prompts are tried again"
                )
        return Batch.concat(parts), {"curriculum/passed_over": Total(float(drawn - rows))}

    def note(self, shares: Batch, step: int) -> Stats:
        """Take in the result of ``pass_rates``. Metrics: curriculum/pass_rate, curriculum/known (prompts)."""
        for key, share in zip(list(shares.sequence["key"]), shares["share"].tolist(), strict=True):
            self.known[str(key)] = (share, step)
        return {"curriculum/pass_rate": Stat.of(shares["share"]), "curriculum/known": Stat(float(len(self.known)))}

    def _is_wanted(self, row: Mapping[str, Any], step: int) -> bool:
        share, measured = self.known.get(hash_row(row), (None, 0))
        if share is None or (self.config.forget is not None and step - measured >= self.config.forget):
            return True
        return self.config.low <= share <= self.config.high

    def state_dict(self) -> dict[str, Any]:
        return dict(self.known)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known = {key: (share, step) for key, (share, step) in state.items()}


def pass_rates(batch: Batch, *, solved: float) -> Batch:
    """Return a row per group: ``key`` of its prompt, ``share`` f64 of its samples with reward >= ``solved``."""
    groups, member = torch.unique(batch["group"], return_inverse=True)
    count = torch.bincount(member, minlength=len(groups))
    right: Tensor = torch.bincount(member, weights=(batch["reward"] >= solved).double(), minlength=len(groups))
    keys = [hash_row(row) for row in list_first_rows(batch, member)]
    return Batch(torch.zeros(len(groups)), {}, {"share": right / count, "key": keys})


def list_first_rows(batch: Batch, member: Tensor) -> list[Mapping[str, Any]]:
    """Return the row of data of each group; ``member`` i64[N] numbers the groups."""
    first: dict[int, Mapping[str, Any]] = {}
    for group, row in zip(member.tolist(), batch["rows"], strict=True):
        first.setdefault(group, row)
    return [first[group] for group in sorted(first)]


def hash_row(row: Mapping[str, Any]) -> str:
    """Hash the content of a row of data, without its place in the file."""
    content = {key: value for key, value in row.items() if key not in (*MARKS, SOURCE_KEY)}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
