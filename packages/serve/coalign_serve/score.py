"""`coalign score`: a score for every response of a file, by a reward model or reward functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from coalign.config.schema import SourceConfig
from coalign.data.loader import open_row_images
from coalign.data.messages import Message, parse_response
from coalign.data.reader import RowReader
from coalign.data.sources import BadRow, FileRows, open_rows
from coalign.report.display import Display
from coalign.types import Status
from coalign_serve.config.stages import ScoreConfig
from coalign_serve.judges import ResponseJudge, ResponseToScore, Verdict, open_judge
from coalign_serve.resumable import JsonRecord, ResumableOutput, fingerprint_settings, list_inputs, require_writable

CHUNK = 256  # rows that are scored and saved together


def score(config: ScoreConfig, output: Path, display: Display, *, overwrite: bool = False) -> dict[str, float]:
    """Write the rows of ``config.data.train`` with their scores to ``output``; return counts, mean and spread.

    A row gets `score` (and `rewards`, of several functions); a pair gets `chosen_score` and `rejected_score`. A score
    that could not be computed is null. Continues where a killed call stopped. Raises ValueError for a file without
    rows, a row without a response, or an output that is an input, and FileExistsError for a file that another command
    has written (unless ``overwrite`` says that it may be replaced), before anything is scored.
    """
    require_writable(output, config, overwrite)
    rows = [row for source in config.data.train for row in _open_rows(config, source)]
    chunks = list(_split_rows(rows))
    bar = display.progress("scoring", len(rows))
    with (
        closing(open_judge(config, config.data.images, config.data.on_long)) as judge,
        ResumableOutput(output, fingerprint_settings(config), list_inputs(config), overwrite=overwrite) as partial,
        bar as advance,
    ):
        advance(sum(map(len, chunks[: partial.done])))
        for chunk in chunks[partial.done :]:
            partial.add(score_rows(judge, [row.read() for row in chunk]))
            advance(len(chunk))
        counts = summarise_scores(record for unit in partial.units() for record in unit)
        partial.finish()
    report_unscored(judge, display)
    if judge.dtype and not display.quiet:
        display.note(f"scored by {config.reward_model} in {judge.dtype}")
    return counts


@dataclass(frozen=True)
class RowWithResponses:
    """A row and its responses, by the prefix of their scores' keys (without ``_``)."""

    row: JsonRecord
    responses: dict[str, ResponseToScore]


@dataclass(frozen=True)
class RowToScore:
    """A row of a file, not kept in memory. Neighbours of one ``group`` answer the same prompt."""

    config: ScoreConfig
    reader: RowReader
    rows: FileRows
    number: int
    group: int

    def read(self) -> RowWithResponses:
        """Read the row. Raises ValueError with its place in the file if there is nothing to score.

        A pair with an empty response has no responses if ``data.on_empty`` drops such rows.
        """
        row = self.reader.add_names(self.rows[self.number])
        try:
            texts = self._extract_responses(row)
        except BadRow as error:
            if error.reason == "empty" and self.config.data.on_empty == "drop":
                return RowWithResponses(row, {})
            raise ValueError(f"{self.rows.where(self.number)}: {error}") from error
        index, tokens = (row[key] if isinstance(row.get(key), int) else 0 for key in ("index", "tokens"))
        tools, truncated = self.reader.tools(row), row.get("status") == Status.TRUNCATED.label
        locate = partial(self.rows.where, self.number)
        return RowWithResponses(
            row,
            {
                name: ResponseToScore(
                    prompt, response, row, self.group, index, tokens, tools, truncated=truncated, locate=locate
                )
                for name, (prompt, response) in texts.items()
            },
        )

    def _extract_responses(self, row: JsonRecord) -> dict[str, tuple[list[Message], list[Message]]]:
        """Return (prompt, response) by name: `chosen` and `rejected`, or a single one without a name."""
        data, key = self.config.data, self.config.response_key
        if self.reader.has(row, key):
            response = row[key]
            if isinstance(response, str):
                return {"": (self.reader.prompt(row), [{"role": "assistant", "content": response}])}
            return {"": (self.reader.prompt(row), parse_response(response, key))}
        if self.reader.has(row, data.chosen_key):
            pair = {name: self.reader.value(row, name) for name in (data.chosen_key, data.rejected_key)}
            prompt, responses = self.reader.compared(row, pair)
            return {name: (prompt, r) for name, r in zip(("chosen", "rejected"), responses, strict=True)}
        if not self.reader.has(row, data.messages_key):
            raise BadRow(
                f"nothing to score: the row has neither '{key}' nor '{data.messages_key}' nor '{data.chosen_key}'; "
                f"it has {', '.join(sorted(row)) or 'no keys'}"
            )
        *prompt, last = self.reader.conversation(row)
        return {"": (prompt, [last])}


def score_rows(judge: ResponseJudge, rows: Sequence[RowWithResponses]) -> list[JsonRecord]:
    """Return the rows with the judge's scores."""
    answers = [(i, name, answer) for i, row in enumerate(rows) for name, answer in row.responses.items()]
    records = [row.row | ({} if row.responses else {"score": None}) for row in rows]
    for (i, name, _), verdict in zip(answers, judge([answer for *_, answer in answers]), strict=True):
        records[i] |= verdict_entries(verdict, f"{name}_" if name else "")
    return records


def verdict_entries(verdict: Verdict, prefix: str = "") -> JsonRecord:
    """Return the entries of a record that hold a verdict."""
    terms = {f"{prefix}rewards": verdict.terms} if verdict.terms else {}
    return {f"{prefix}score": verdict.score, **terms}


def summarise_scores(records: Iterable[JsonRecord]) -> dict[str, float]:
    """Count rows and scores; return their mean and spread too.

    ``pair_accuracy`` is the share of pairs whose chosen response has the higher score; equal scores count half.
    """
    rows, scores, wins, pairs, missing = 0, [], 0.0, 0, 0
    for record in records:
        rows += 1
        pair = "chosen_score" in record
        values = [record[key] for key in (("chosen_score", "rejected_score") if pair else ("score",))]
        scores += [value for value in values if value is not None]
        missing += sum(value is None for value in values)
        if pair and None not in values:
            pairs += 1
            wins += (values[0] > values[1]) + 0.5 * (values[0] == values[1])
    counts: dict[str, float] = {"rows": rows, "scored": len(scores), "unscored": missing}
    if scores:
        spread = {"std": statistics.pstdev(scores), "min": min(scores), "max": max(scores)}
        counts |= {"mean": statistics.fmean(scores), **spread}
    return counts | ({"pairs": pairs, "pair_accuracy": wins / pairs} if pairs else {})


def report_unscored(judge: ResponseJudge, display: Display) -> None:
    """Report the responses that this call could not score."""
    if judge.failed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in judge.failed.items())
        display.note(f"warning: responses without a score: {reasons}; first: {judge.first}")


def _open_rows(config: ScoreConfig, source: SourceConfig) -> Iterator[RowToScore]:
    """Yield the rows of a source. Each is read once, so a broken row is reported before a model loads."""
    reader = RowReader(config.data, source, open_row_images(config.data, source))
    rows = open_rows(source.path, source.max_samples)
    previous, group = None, -1
    for number in range(len(rows)):
        row = RowToScore(config, reader, rows, number, 0)
        name = row.read().row.get("group")
        group += name is None or name != previous
        previous = name
        yield replace(row, group=group)


def _split_rows(rows: Sequence[RowToScore]) -> Iterator[list[RowToScore]]:
    """Yield chunks of CHUNK rows or a few more: neighbours of a group stay together."""
    chunk: list[RowToScore] = []
    for _, group in groupby(rows, key=lambda row: (id(row.rows), row.group)):
        chunk += group
        if len(chunk) >= CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
