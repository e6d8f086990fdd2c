"""`coalign select`: training data from scored responses: conversations for SFT, pairs for DPO, labels for KTO."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.reader import RowReader
from coalign.data.sources import BadRow, FileRows, is_number, open_rows
from coalign.files import require_free_output, write_atomically
from coalign.types import Status
from coalign_serve.config.stages import SelectConfig
from coalign_serve.resumable import JsonRecord, open_records

READER = RowReader(DataConfig(), SourceConfig(path=""))


@dataclass(frozen=True)
class ScoredResponse:
    """A response with a score. Its row is read from the file on each access."""

    score: float
    rows: FileRows
    number: int

    @property
    def row(self) -> JsonRecord:
        return self.rows[self.number]


class DroppedPrompt(Exception):
    """Raised for a prompt that gives no training data; the text is the reason to count."""


def select(config: SelectConfig, output: Path) -> dict[str, float]:
    """Write training data to ``output``; return the counts of prompts, rows written, and drops by reason.

    Responses of one prompt have the same `group`, or else the same prompt. A conversation is {messages, score}; a pair
    is {prompt (messages), chosen, rejected, margin, chosen_score, rejected_score}; a labelled response {prompt, answer,
    label}. Raises ValueError for rows without `response` and `score`, and if nothing is left.
    """
    require_free_output(output, config.data, overwrite=True)  # a pipeline's folder is its own
    counts: Counter[str] = Counter()
    groups = _group_responses(config, counts)
    with write_atomically(output) as aside, open_records(aside) as out:
        for members in groups.values():
            try:
                if not members:
                    raise DroppedPrompt("no_response")
                chosen = KEEP[config.keep](members, config)
            except DroppedPrompt as reason:
                counts[f"dropped/{reason}"] += 1
                continue
            counts["rows"] += len(chosen)
            out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in chosen)
        counts["prompts"] = len(groups)
        if not counts["rows"]:
            reasons = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            raise ValueError(f"nothing is left to learn from of {', '.join(config.data)}: {reasons}")
    return dict(counts)


def keep_best(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """Return the response with the highest score, the first of equal ones."""
    highest = max(members, key=lambda member: member.score)
    _check_threshold(highest, config)
    return [_make_conversation(highest)]


def keep_above_threshold(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """Return every response that reaches the threshold."""
    good = [member for member in members if _reaches_threshold(member, config)]
    if not good:
        raise DroppedPrompt("below_threshold")
    return keep_all(good, config)


def keep_all(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """Return every response, each text once."""
    return [_make_conversation(member) for member in _distinct(members)]


def label_all(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """Return every response, each text once, labelled by whether it reaches the threshold."""
    return [
        {
            "prompt": READER.prompt(row := member.row),
            "answer": row["response"],
            "label": _reaches_threshold(member, config),
            **_copy_entries(row),
        }
        for member in _distinct(members)
    ]


def pair_best_worst(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """Return the response with the highest score against the one with the lowest."""
    chosen, rejected = max(members, key=lambda m: m.score), min(members, key=lambda m: m.score)
    margin = chosen.score - rejected.score
    if len(members) == 1:
        raise DroppedPrompt("single_response")
    if not margin:
        raise DroppedPrompt("tie")
    if margin < config.min_margin:
        raise DroppedPrompt("below_margin")
    _check_threshold(chosen, config)
    row, texts = chosen.row, {"chosen": chosen.row["response"], "rejected": rejected.row["response"]}
    if texts["chosen"] == texts["rejected"]:
        raise DroppedPrompt("identical")
    scores = {"margin": margin, "chosen_score": chosen.score, "rejected_score": rejected.score}
    return [{"prompt": READER.prompt(row), **texts, **scores, **_copy_entries(row)}]


def _reaches_threshold(member: ScoredResponse, config: SelectConfig) -> bool:
    return config.threshold is None or member.score >= config.threshold


def _check_threshold(member: ScoredResponse, config: SelectConfig) -> None:
    if not _reaches_threshold(member, config):
        raise DroppedPrompt("below_threshold")


KEEP: Mapping[str, Callable[[Sequence[ScoredResponse], SelectConfig], list[JsonRecord]]] = {
    "best": keep_best,
    "threshold": keep_above_threshold,
    "all": keep_all,
    "best_worst": pair_best_worst,
    "labelled": label_all,
}


def _group_responses(config: SelectConfig, counts: Counter[str]) -> dict[str, list[ScoredResponse]]:
    """Return the usable responses of each prompt; count the others."""
    groups: dict[str, list[ScoredResponse]] = {}
    for path in config.data:
        rows = open_rows(path)
        for number in range(len(rows)):
            row = rows[number]
            if "score" not in row or not isinstance(row.get("response"), str):
                raise ValueError(f"{rows.where(number)}: no `score` and `response`; the row has {', '.join(row)}")
            if row["score"] is not None and not is_number(row["score"]):
                raise ValueError(f"{rows.where(number)}: score is {row['score']!r:.60}; expected a number or null")
            try:
                prompt = READER.prompt(row)
            except BadRow as error:
                raise ValueError(f"{rows.where(number)}: {error}") from error
            members = groups.setdefault(json.dumps([path, row["group"]] if "group" in row else prompt), [])
            if row["score"] is None:
                counts["unscored"] += 1
            elif config.truncated == "drop" and row.get("status") == Status.TRUNCATED.label:
                counts["truncated"] += 1
            else:
                members.append(ScoredResponse(row["score"], rows, number))
    return groups


def _distinct(members: Sequence[ScoredResponse]) -> list[ScoredResponse]:
    """Return the first response with each text."""
    first: dict[str, ScoredResponse] = {}
    for member in members:
        first.setdefault(member.row["response"], member)
    return list(first.values())


def _make_conversation(member: ScoredResponse) -> JsonRecord:
    row = member.row
    answer = {"role": "assistant", "content": row["response"]}
    return {"messages": [*READER.prompt(row), answer], "score": member.score, **_copy_entries(row)}


def _copy_entries(row: JsonRecord) -> JsonRecord:
    return {key: row[key] for key in ("tools", "group") if key in row}
