"""What of the scored responses is learnt from: conversations for SFT, pairs for DPO, labelled responses for KTO."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coalign.commands.resumable import JsonRecord
from coalign.config.schema import DataConfig, SelectConfig, SourceConfig
from coalign.data.messages import Message
from coalign.data.reader import RowReader
from coalign.data.sources import FileRows, open_rows
from coalign.types import Status

CUT = Status.TRUNCATED.name.lower()
READER = RowReader(DataConfig(), SourceConfig(path=""))


@dataclass(frozen=True)
class ScoredResponse:
    """A response with a score; its row is read when it is wanted."""

    score: float
    rows: FileRows
    number: int

    @property
    def row(self) -> JsonRecord:
        return self.rows[self.number]


class DroppedPrompt(Exception):
    """A prompt that gives nothing to learn; the text is the reason that is counted."""


def select(config: SelectConfig, output: Path) -> dict[str, float]:
    """Write what is to be learnt to ``output``; the counts: prompts, rows (written), and what was dropped why.

    Responses of one prompt have the same `group`, or else the same prompt. A conversation is {messages, score}; a pair
    is {prompt (messages), chosen, rejected, margin, chosen_score, rejected_score}; a single response {prompt, answer,
    label}. Raises ValueError for rows without
    `response` and `score`, and if nothing is left.
    """
    counts: Counter[str] = Counter()
    groups = _groups(config, counts)
    aside = output.with_name(output.name + ".writing")
    with open(aside, "w", encoding="utf-8") as out:
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
        raise ValueError(f"nothing is left to learn from of {', '.join(config.data)}: {_told(counts)}")
    os.replace(aside, output)
    return dict(counts)


def keep_best(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """The response with the highest score, of equals the first."""
    highest = max(members, key=lambda member: member.score)
    if config.threshold is not None and highest.score < config.threshold:
        raise DroppedPrompt("below_threshold")
    return [_conversation(highest)]


def keep_above_threshold(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """Every response that reaches the threshold."""
    good = [member for member in members if member.score >= config.threshold]
    if not good:
        raise DroppedPrompt("below_threshold")
    return keep_all(good, config)


def keep_all(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """Every response, each text once."""
    return [_conversation(member) for member in _distinct(members)]


def label_all(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """Every response, each text once, with whether it reaches the threshold."""
    rows = [(member, member.row) for member in _distinct(members)]
    return [
        {"prompt": _prompt(row), "answer": row["response"], "label": member.score >= config.threshold, **_rest(row)}
        for member, row in rows
    ]


def pair_best_worst(members: Sequence[ScoredResponse], config: SelectConfig) -> list[JsonRecord]:
    """The highest score against the lowest."""
    chosen, rejected = max(members, key=lambda m: m.score), min(members, key=lambda m: m.score)
    margin = chosen.score - rejected.score
    if len(members) == 1:
        raise DroppedPrompt("single_response")
    if not margin:
        raise DroppedPrompt("tie")
    if margin < config.min_margin:
        raise DroppedPrompt("below_margin")
    if config.threshold is not None and chosen.score < config.threshold:
        raise DroppedPrompt("below_threshold")
    row, texts = chosen.row, {"chosen": chosen.row["response"], "rejected": rejected.row["response"]}
    if texts["chosen"] == texts["rejected"]:
        raise DroppedPrompt("identical")
    scores = {"margin": margin, "chosen_score": chosen.score, "rejected_score": rejected.score}
    return [{"prompt": _prompt(row), **texts, **scores, **_rest(row)}]


KEEP: Mapping[str, Callable[[Sequence[ScoredResponse], SelectConfig], list[JsonRecord]]] = {
    "best": keep_best,
    "threshold": keep_above_threshold,
    "all": keep_all,
    "best_worst": pair_best_worst,
    "labelled": label_all,
}


def _groups(config: SelectConfig, counts: Counter[str]) -> dict[str, list[ScoredResponse]]:
    """The responses of each prompt that can be learnt from."""
    groups: dict[str, list[ScoredResponse]] = {}
    for path in config.data:
        rows = open_rows(path)
        for number in range(len(rows)):
            row = rows[number]
            if "score" not in row or not isinstance(row.get("response"), str):
                raise ValueError(f"{rows.where(number)}: no `score` and `response`; the row has {', '.join(row)}")
            name = [path, row["group"]] if "group" in row else _prompt(row)
            members = groups.setdefault(json.dumps(name), [])
            if row["score"] is None:
                counts["unscored"] += 1
            elif config.truncated == "drop" and row.get("status") == CUT:
                counts["truncated"] += 1
            else:
                members.append(ScoredResponse(row["score"], rows, number))
    return groups


def _distinct(members: Sequence[ScoredResponse]) -> list[ScoredResponse]:
    """The first response of each text."""
    first: dict[str, ScoredResponse] = {}
    for member in members:
        first.setdefault(member.row["response"], member)
    return list(first.values())


def _conversation(member: ScoredResponse) -> JsonRecord:
    row = member.row
    answer = {"role": "assistant", "content": row["response"]}
    return {"messages": [*_prompt(row), answer], "score": member.score, **_rest(row)}


def _prompt(row: JsonRecord) -> list[Message]:
    return READER.prompt(row)


def _rest(row: JsonRecord) -> JsonRecord:
    return {key: row[key] for key in ("tools", "group") if key in row}


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)
