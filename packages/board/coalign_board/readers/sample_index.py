"""An index of samples.jsonl: what lists sort and count by, and where each line is. It grows with the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import IO, Any

from coalign.run_files.records import LARGEST_STEP, is_number, parse_record
from coalign_board.following import START, read_growth

NAME = "samples.jsonl"
PHASES = ("train", "eval")
_LONGEST_STATUS = 100  # characters
_CHUNK = 1 << 18  # bytes that are parsed at once


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """One line of samples.jsonl as lists need it.

    ``row`` counts the lines of the same step, from 0. ``offset`` and ``size`` are bytes of the file. ``tokens`` were
    generated, by the weight ``versions`` (the lowest and the highest). ``turns`` are the policy's, of an
    episode; 0 for a plain response. ``group`` is below 0 in evaluations, None in a line that names none. ``branch``
    counts the rows of an episode, from 0.
    """

    row: int
    offset: int
    size: int
    step: int
    phase: str
    group: int | None
    index: int
    branch: int
    reward: float | None
    status: str
    tokens: int
    versions: tuple[int, int] | None
    turns: int
    images: int


class SampleIndex:
    """The summaries of a samples.jsonl, which may grow, be cut or be replaced between two calls of ``update``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0  # lines that hold no sample
        self.summaries: list[SampleSummary] = []
        self._rows_of_step: Counter[int] = Counter()
        self._position = START

    def update(self) -> list[SampleSummary]:
        """Read what is new; return all summaries in the order of the file."""
        while True:
            growth = read_growth(self.path, self._position, _CHUNK)
            if growth.replaced:
                self.summaries, self.skipped, self._rows_of_step, self._position = [], 0, Counter(), START
            offset = self._position.offset
            for line in growth.lines:
                self._add(line, offset)
                offset += len(line) + 1
            self._position = growth.position
            if not growth.lines:
                return self.summaries

    def _add(self, line: bytes, offset: int) -> None:
        record = parse_record(line)
        if record is None or not is_sample(record):
            self.skipped += 1
            return
        step, versions = record["step"], record.get("versions") or []
        numbers = [version for version, _ in versions]
        reward, phase = record.get("reward"), record.get("phase")
        self.summaries.append(
            SampleSummary(
                row=self._rows_of_step[step],
                offset=offset,
                size=len(line),
                step=step,
                phase=PHASES[phase == PHASES[1]],
                group=record.get("group"),
                index=record.get("index", 0),
                branch=record.get("branch", 0),
                reward=reward if is_number(reward) else None,
                status=intern(str(record.get("status", ""))[:_LONGEST_STATUS]),  # one text for all lines
                tokens=sum(tokens for _, tokens in versions),
                versions=(min(numbers), max(numbers)) if numbers else None,
                turns=sum(message.get("role") == "assistant" for message in record.get("messages") or ()),
                images=len(record.get("images") or ()),
            )
        )
        self._rows_of_step[step] += 1


def is_sample(record: Mapping[str, Any]) -> bool:
    """Whether a record has what a sample has, each of its type, as far as the board reads it."""
    versions, messages = record.get("versions") or [], record.get("messages") or []
    return (
        (record.get("group") is None or _is_count(record["group"], least=-LARGEST_STEP))
        and _is_count(record.get("index", 0))
        and _is_count(record.get("branch", 0))
        and isinstance(versions, list)
        and all(isinstance(run, list) and len(run) == 2 and all(map(_is_count, run)) for run in versions)
        and isinstance(messages, list)
        and all(isinstance(message, dict) for message in messages)
        and isinstance(record.get("images") or [], list)
        and isinstance(record.get("rewards") or {}, dict)
    )


def _is_count(value: Any, *, least: int = 0) -> bool:
    return type(value) is int and least <= value < LARGEST_STEP


def read_record(file: IO[bytes], summary: SampleSummary) -> dict[str, Any]:
    """Return the line of a summary. FileNotFoundError if the file has changed since."""
    file.seek(summary.offset)
    record = parse_record(file.read(summary.size))
    if record is None or record["step"] != summary.step or not is_sample(record):
        raise FileNotFoundError(f"{NAME} has just been replaced; ask again")
    return record
