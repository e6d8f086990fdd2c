"""Reads samples.jsonl by step, group and sample. Lists are short records; one sample is read whole.

A run goes on writing, and a list may have many thousand rows. So an index keeps where each line is and what lists sort
by; it reads what is new in the file, and a request reads the lines that it shows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from coalign.board.readers.records import is_number, read_choice, read_integer
from coalign.board.readers.rollouts import find_rollouts, read_row

NAME = "samples.jsonl"
EXCERPT = 160  # characters of a text in a list
MOST = 200  # samples in one answer
_TAIL = 64  # bytes before the end of what was read, by which a file that was replaced is known
PHASES = ("train", "eval")


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """One line of samples.jsonl as lists need it.

    ``number`` counts the lines that can be read, from 0, and ``row`` those of the same step. ``offset`` and ``size``
    are bytes of the file. ``tokens`` were generated, by the weight ``versions`` (the lowest and the highest).
    """

    number: int
    row: int
    offset: int
    size: int
    step: int
    phase: str
    group: int
    index: int
    reward: float | None
    status: str
    tokens: int
    versions: tuple[int, int] | None
    turns: int
    images: int

    def to_json(self) -> dict[str, Any]:
        names = ("number", "step", "phase", "group", "index", "reward", "status", "tokens", "versions", "turns")
        return {name: getattr(self, name) for name in (*names, "images")}


class SampleIndex:
    """The summaries of a samples.jsonl, which may grow, be cut or be replaced between two calls of ``update``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._clear()

    def update(self) -> list[SampleSummary]:
        """Read what is new; return all summaries in the order of the file. FileNotFoundError if there is no file."""
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} is missing: recipes without roll-outs write no samples")
        with self._lock, open(self.path, "rb") as file:
            file.seek(max(0, self._end - _TAIL))
            if file.read(self._end - file.tell()) != self._tail:
                self._clear()
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self._add(line)
                self._end += len(line)
                self._tail = (self._tail + line)[-_TAIL:]
            return list(self._summaries)

    def _clear(self) -> None:
        self._end, self._tail = 0, b""
        self._summaries: list[SampleSummary] = []
        self._rows: dict[int, int] = {}  # lines of each step

    def _add(self, line: bytes) -> None:
        record = _parse(line)
        if record is None:
            return
        step, versions = record["step"], record.get("versions") or []
        row = self._rows.get(step, 0)
        self._rows[step] = row + 1
        numbers = [version for version, _ in versions]
        self._summaries.append(
            SampleSummary(
                number=len(self._summaries),
                row=row,
                offset=self._end,
                size=len(line),
                step=step,
                phase=record.get("phase", PHASES[0]),
                group=record["group"],
                index=record.get("index", 0),
                reward=record["reward"] if is_number(record.get("reward")) else None,
                status=record.get("status", ""),
                tokens=sum(tokens for _, tokens in versions),
                versions=(min(numbers), max(numbers)) if numbers else None,
                turns=sum(message.get("role") == "assistant" for message in record.get("messages") or ()),
                images=len(record.get("images") or ()),
            )
        )


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if it is not one of a sample."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(key), int) for key in ("step", "group")):
        return None
    return record


@lru_cache(maxsize=32)
def open_index(path: Path) -> SampleIndex:
    """Return the index of a file, which later calls continue."""
    return SampleIndex(path)


def list_summaries(folder: Path) -> list[SampleSummary]:
    return open_index(folder / NAME).update()


def read_sample_steps(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return what was sampled at each step: `samples`, `groups`, rewards, and groups whose rewards are all the same.

    `tokens_recorded`: the step has a file of tokens (coalign.board.readers.rollouts).
    """
    summaries = sorted(list_summaries(folder), key=lambda each: (each.step, PHASES.index(_phase(each)), each.group))
    steps = []
    for (step, phase), members in groupby(summaries, key=lambda each: (each.step, _phase(each))):
        groups = [list(group) for _, group in groupby(members, key=lambda each: each.group)]
        everyone = [sample for group in groups for sample in group]
        steps.append(
            {
                "step": step,
                "phase": phase,
                "samples": len(everyone),
                "groups": len(groups),
                "flat": sum(is_flat(group) for group in groups),
                "tokens_recorded": find_rollouts(folder, step).is_file(),
                **_summarise(everyone),
            }
        )
    return {"steps": steps, "samples": len(summaries)}


def read_sample_groups(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the groups of a `step` and a `phase` (train, eval), each with its prompt and its rewards."""
    step, phase = read_integer(params, "step"), read_choice(params, "phase", PHASES)
    members = [each for each in list_summaries(folder) if each.step == step and _phase(each) == phase]
    groups = []
    with open(folder / NAME, "rb") as file:
        for number, group in groupby(sorted(members, key=lambda each: each.group), key=lambda each: each.group):
            samples = list(group)
            prompt = str(_read_record(file, samples[0]).get("prompt", ""))
            groups.append(
                {
                    "group": number,
                    "samples": len(samples),
                    "flat": is_flat(samples),
                    "prompt": prompt[-EXCERPT:],
                    **_summarise(samples),
                }
            )
    return {"step": step, "phase": phase, "groups": groups}


def is_flat(samples: Iterable[SampleSummary]) -> bool:
    """Whether a group has several rewards, all the same: it has no advantage, so nothing is learnt from it."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return len(rewards) > 1 and min(rewards) == max(rewards)


def read_samples(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of samples, with excerpts of their texts.

    Parameters: `step`, `phase`, `group` choose; `search` is text, in whatever case, of prompt, response or messages;
    `sort` is file, reward or length, `order` up or down; `offset` and `limit` are the page (at most 200 samples).
    """
    chosen = list_summaries(folder)
    for name in ("step", "group"):
        if params.get(name):
            number = read_integer(params, name)
            chosen = [each for each in chosen if getattr(each, name) == number]
    if params.get("phase"):
        phase = read_choice(params, "phase", PHASES)
        chosen = [each for each in chosen if _phase(each) == phase]
    needle = params.get("search", "").casefold()
    with open(folder / NAME, "rb") as file:
        if needle:
            chosen = [each for each in chosen if _find_text(_read_record(file, each), needle)]
        key, order = read_choice(params, "sort", ("file", "reward", "length")), read_choice(params, "order", _ORDERS)
        chosen = _sort(chosen, key, descending=order == "down")
        offset, limit = read_integer(params, "offset", 0), min(MOST, read_integer(params, "limit", 100))
        page = [_show(each, _read_record(file, each), needle) for each in chosen[offset : offset + limit]]
    return {"total": len(chosen), "offset": offset, "samples": page}


_ORDERS = ("up", "down")


def read_sample(folder: Path, params: Mapping[str, str]) -> dict[str, Any]:
    """Return the sample of a `number` whole, with its `tokens` and their values if the run has recorded them.

    ValueError if the file of tokens is damaged, or is not of this sample.
    """
    summaries, number = list_summaries(folder), read_integer(params, "number")
    if number >= len(summaries):
        raise FileNotFoundError(f"{folder / NAME} has {len(summaries)} samples; there is no number {number}")
    summary = summaries[number]
    with open(folder / NAME, "rb") as file:
        record = _read_record(file, summary)
    path = find_rollouts(folder, summary.step)
    tokens = read_row(path, summary.row) if path.is_file() else None
    written = 0 if tokens is None else sum(version >= 0 for version in tokens["measures"].get("weight_version", ()))
    if tokens is not None and "weight_version" in tokens["measures"] and written != summary.tokens:
        raise ValueError(
            f"{path}: row {summary.row} has {written} generated tokens, and {NAME} says {summary.tokens} for the sample"
        )
    return {**record, "number": number, "generated": summary.tokens, "tokens": tokens}


def _phase(sample: SampleSummary) -> str:
    return sample.phase if sample.phase in PHASES else PHASES[0]


def _summarise(samples: list[SampleSummary]) -> dict[str, Any]:
    """Return mean, lowest and highest reward (null: none has one) and the mean length."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return {
        "reward": fmean(rewards) if rewards else None,
        "reward_range": [min(rewards), max(rewards)] if rewards else None,
        "tokens": fmean(sample.tokens for sample in samples),
    }


def _sort(samples: list[SampleSummary], key: str, *, descending: bool) -> list[SampleSummary]:
    """Sort; samples without a reward come last, either way."""
    if key == "file":
        return samples[::-1] if descending else samples
    if key == "length":
        return sorted(samples, key=lambda each: each.tokens, reverse=descending)
    scored = [each for each in samples if each.reward is not None]
    rest = [each for each in samples if each.reward is None]
    return [*sorted(scored, key=lambda each: each.reward or 0.0, reverse=descending), *rest]


def _read_record(file: Any, summary: SampleSummary) -> dict[str, Any]:
    file.seek(summary.offset)
    return _parse(file.read(summary.size)) or {}  # empty: the file was replaced since the index was read


def _list_texts(record: Mapping[str, Any]) -> Iterator[str]:
    for key in ("response", "prompt"):
        yield str(record.get(key, ""))
    for message in record.get("messages") or ():
        content = message.get("content")
        yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        if calls := message.get("tool_calls"):
            yield json.dumps(calls, ensure_ascii=False)


def _find_text(record: Mapping[str, Any], needle: str) -> str | None:
    """Return the text around the first place of ``needle``, which is casefolded; None if no text has it."""
    for text in _list_texts(record):
        at = text.casefold().find(needle)  # folding may move a few characters, which an excerpt does not mind
        if at >= 0:
            start = max(0, at - EXCERPT // 4)
            return text[start : start + EXCERPT]
    return None


def _show(summary: SampleSummary, record: Mapping[str, Any], needle: str) -> dict[str, Any]:
    texts = {"prompt": str(record.get("prompt", ""))[-EXCERPT:], "response": str(record.get("response", ""))[:EXCERPT]}
    return summary.to_json() | texts | ({"found": _find_text(record, needle)} if needle else {})
