"""`coalign score`: a score for every response of a file, by a reward model or reward functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from coalign.commands import pipeline
from coalign.commands.judges import Judge, JudgedResponse, Verdict, open_judge
from coalign.commands.resumable import Partial, Record
from coalign.config.schema import ScoreConfig, SourceConfig
from coalign.data.messages import Message, parse_response
from coalign.data.reader import RowReader
from coalign.data.sources import BadRow, FileRows, open_rows
from coalign.report.display import Display

CHUNK = 256  # rows that are scored, and kept, together


def score(config: ScoreConfig, output: Path, display: Display) -> dict[str, float]:
    """Write the rows of ``config.data.train`` with their scores to ``output``; the counts, and means, of what came out.

    A row gets `score` (and `rewards`, of several functions); a pair gets `chosen_score` and `rejected_score`. Null
    stands for a score that could not be had. Goes on where a killed call stopped. Raises ValueError for a file without
    rows, or a row without a response, before anything is scored.
    """
    rows = [row for source in config.data.train for row in _rows(config, source)]
    works = list(_chunks(rows))
    depends = pipeline.fingerprint_settings(config)
    bar = display.progress("scoring", len(rows))
    with closing(open_judge(config)) as judge, Partial(output, depends) as partial, bar as advance:
        advance(sum(map(len, works[: partial.done])))
        for work in works[partial.done :]:
            partial.add(judged(judge, [row.read() for row in work]))
            advance(len(work))
        counts = summary(record for unit in partial.units() for record in unit)
        partial.finish()
    tell(judge, display)
    return counts


@dataclass(frozen=True)
class RowAnswers:
    """A row, and the answers in it by the name that their scores get a prefix from."""

    row: Record
    answers: dict[str, JudgedResponse]


@dataclass(frozen=True)
class ScoreRow:
    """A row of a file, not kept in memory. Neighbours of one ``group`` answer the same prompt."""

    config: ScoreConfig
    reader: RowReader
    rows: FileRows
    number: int
    group: int

    def read(self) -> RowAnswers:
        """Raises ValueError with the row's place if there is nothing to score; an empty response to compare has no
        answer where ``data.on_empty`` drops such rows."""
        row = self.reader.add_names(self.rows[self.number])
        try:
            said = self._answers(row)
        except BadRow as error:
            if error.reason == "empty" and self.config.data.on_empty == "drop":
                return RowAnswers(row, {})
            raise ValueError(f"{self.rows.where(self.number)}: {error}") from error
        rest = {"group": self.group, "index": _number(row, "index"), "tokens": _number(row, "tokens")}
        tools = self.reader.tools(row)
        return RowAnswers(row, {name: JudgedResponse(*pair, row, tools=tools, **rest) for name, pair in said.items()})

    def _answers(self, row: Record) -> dict[str, tuple[list[Message], list[Message]]]:
        """(prompt, response) by name: one without a name, or chosen and rejected."""
        data, key = self.config.data, self.config.response_key
        if self.reader.has(row, key):
            said = row[key]
            answer = [{"role": "assistant", "content": said}] if isinstance(said, str) else parse_response(said, key)
            return {"": (self.reader.prompt(row), answer)}
        if self.reader.has(row, data.chosen_key):
            said = {name: self.reader.value(row, name) for name in (data.chosen_key, data.rejected_key)}
            prompt, responses = self.reader.compared(row, said)
            return {name: (prompt, r) for name, r in zip(("chosen", "rejected"), responses, strict=True)}
        if not self.reader.has(row, data.messages_key):
            raise BadRow(
                f"nothing to score: the row has neither '{key}' nor '{data.messages_key}' nor '{data.chosen_key}'; "
                f"it has {', '.join(sorted(row)) or 'no keys'}"
            )
        *prompt, response = self.reader.conversation(row)
        return {"": (prompt, [response])}


def judged(judge: Judge, rows: Sequence[RowAnswers]) -> list[Record]:
    """The rows with the judge's scores."""
    answers = [(i, name, answer) for i, scored in enumerate(rows) for name, answer in scored.answers.items()]
    records = [scored.row | ({} if scored.answers else {"score": None}) for scored in rows]
    for (i, name, _), verdict in zip(answers, judge([answer for *_, answer in answers]), strict=True):
        records[i] |= entries(verdict, f"{name}_" if name else "")
    return records


def entries(verdict: Verdict, prefix: str = "") -> Record:
    """What a record says of a verdict."""
    parts = {f"{prefix}rewards": verdict.parts} if verdict.parts else {}
    return {f"{prefix}score": verdict.score, **parts}


def summary(records: Iterable[Record]) -> dict[str, float]:
    """Rows, scores and their spread; of pairs the share in which the chosen response has the higher score (equal scores
    count half)."""
    rows, scores, wins, pairs, missing = 0, [], 0.0, 0, 0
    for record in records:
        rows += 1
        pair = "chosen_score" in record
        found = [record[key] for key in (("chosen_score", "rejected_score") if pair else ("score",))]
        scores += [value for value in found if value is not None]
        missing += sum(value is None for value in found)
        if pair and None not in found:
            pairs += 1
            wins += (found[0] > found[1]) + 0.5 * (found[0] == found[1])
    counts: dict[str, float] = {"rows": rows, "unscored": missing}
    if scores:
        spread = {"std": statistics.pstdev(scores), "min": min(scores), "max": max(scores)}
        counts |= {"mean": statistics.fmean(scores), **spread}
    return counts | ({"pairs": pairs, "pair_accuracy": wins / pairs} if pairs else {})


def tell(judge: Judge, display: Display) -> None:
    """Report the responses that this call could not score."""
    if judge.failed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in judge.failed.items())
        display.note(f"warning: responses without a score: {reasons}; first: {judge.first}")


def _rows(config: ScoreConfig, source: SourceConfig) -> Iterator[ScoreRow]:
    """The rows of a source, each of them read once: what is wrong with a file is told before a model loads."""
    reader, rows = RowReader(config.data, source), open_rows(source.path, source.max_samples)
    before, group = None, -1
    for number in range(len(rows)):
        row = ScoreRow(config, reader, rows, number, 0)
        name = row.read().row.get("group")
        group += name is None or name != before
        before = name
        yield replace(row, group=group)


def _chunks(rows: Sequence[ScoreRow]) -> Iterator[list[ScoreRow]]:
    """Pieces of CHUNK rows or a few more: neighbours of a group stay together."""
    piece: list[ScoreRow] = []
    for _, group in groupby(rows, key=lambda row: (id(row.rows), row.group)):
        piece += group
        if len(piece) >= CHUNK:
            yield piece
            piece = []
    if piece:
        yield piece


def _number(row: Record, key: str) -> int:
    return row[key] if isinstance(row.get(key), int) else 0
