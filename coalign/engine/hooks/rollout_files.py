"""Writes the tokens of the logged samples of a step beside samples.jsonl; coalign.run_files.rollouts has the format."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coalign.data.batch import Batch
from coalign.data.templates import decode
from coalign.files import Sink, describe_problem
from coalign.run_files.rollouts import (
    FOLDER,
    LoggedRollouts,
    find_rollouts,
    list_rollout_steps,
    read_rollouts,
    write_rollouts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
MAX_TOTAL_BYTES = 1024**3
_WORD_START = "\u2581"  # begins a word in SentencePiece's pieces; decoded alone, a token loses this space
# Columns whose values matter only where a token is trained on -> their names in the file.
_TRAINED = {
    "old_logprobs": "trainer_logprob",
    "ref_logprobs": "reference_logprob",
    "advantages": "advantage",
}


class RolloutFiles:
    """Keeps the logged samples of the newest ``keep`` steps of a run as files, in at most MAX_TOTAL_BYTES.

    A thread writes, so no step waits for the disk; a disk that is full or unreachable does not stop a run.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self.run = run
        self.keep = keep
        self._pieces: dict[int, str] = {}  # token id -> text
        self._sizes: dict[int, int] | None = None  # step -> bytes of its file; None: not read yet
        self._sink = Sink(str(run / FOLDER))
        self._writer = ThreadPoolExecutor(1, "coalign-rollouts")

    def add(self, step: int, batches: Sequence[Batch], tokenizer: PreTrainedTokenizerBase) -> None:
        """Add the rows of some batches to the file of a step."""
        if not self.keep or not any(map(len, batches)):
            return
        rollouts = [_select_columns(batch, self._decode_pieces(batch, tokenizer)) for batch in batches]
        self._writer.submit(self._write, step, rollouts).add_done_callback(_report_problem)

    def cut(self, step: int) -> None:
        """Delete the files of later steps, which will train again."""
        self._writer.submit(self._delete_later, step).add_done_callback(_report_problem)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def _decode_pieces(self, batch: Batch, tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
        tokens = batch["tokens"].unique().tolist()
        self._pieces |= {token: _decode_piece(tokenizer, token) for token in tokens if token not in self._pieces}
        return {token: self._pieces[token] for token in tokens}

    def _write(self, step: int, rollouts: list[LoggedRollouts]) -> None:
        path = find_rollouts(self.run, step)
        with self._sink.survive():
            path.parent.mkdir(exist_ok=True)
            if path.exists():  # the evaluation after the same step
                rollouts = [read_rollouts(path), *rollouts]
            write_rollouts(path, step, reduce(LoggedRollouts.extend, rollouts))
            if self._sizes is None:
                self._sizes = {
                    kept_step: find_rollouts(self.run, kept_step).stat().st_size
                    for kept_step in list_rollout_steps(self.run)
                }
            self._sizes[step] = path.stat().st_size
            for old in _list_excess(self._sizes, self.keep):
                self._delete(old)

    def _delete_later(self, step: int) -> None:
        with self._sink.survive():
            for later in [kept_step for kept_step in list_rollout_steps(self.run) if kept_step > step]:
                self._delete(later)

    def _delete(self, step: int) -> None:
        find_rollouts(self.run, step).unlink(missing_ok=True)
        if self._sizes is not None:
            self._sizes.pop(step, None)


def _list_excess(sizes: Mapping[int, int], keep: int, max_bytes: int = MAX_TOTAL_BYTES) -> list[int]:
    """Return the oldest steps beyond the newest ``keep``, and beyond those whose files have ``max_bytes`` together.

    ``sizes`` are the bytes of the files by step.
    """
    steps, total = sorted(sizes), 0
    for kept, step in enumerate(reversed(steps)):
        total += sizes[step]
        if kept == keep or (total > max_bytes and kept):  # the newest one stays, however large
            return steps[: len(steps) - kept]
    return []


def _select_columns(batch: Batch, pieces: dict[int, str]) -> LoggedRollouts:
    """Return the columns of a batch (with ``prompt_length``) that the file keeps."""
    trained = batch["loss_mask"]
    versions = batch.get("versions")
    columns = {"loss_mask": trained.to(torch.uint8)}
    if versions is not None:
        columns["weight_version"] = versions
    if (logprobs := batch.get("rollout_logprobs")) is not None:
        columns["logprob"] = _blank(logprobs, trained if versions is None else versions >= 0)
    for name, public in _TRAINED.items():
        if (values := batch.get(name)) is not None:
            columns[public] = _blank(values, trained)
    return LoggedRollouts(
        batch["tokens"].numpy(),
        batch.offsets[1:].numpy(),
        batch["prompt_length"].numpy(),
        {name: column.numpy() for name, column in columns.items()},
        pieces,
    )


def _decode_piece(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of one token alone, with the space that begins a word."""
    text, piece = decode(tokenizer, [token]), tokenizer.convert_ids_to_tokens(token)
    has_lost_space = isinstance(piece, str) and piece.startswith(_WORD_START) and not text.startswith(" ")
    return f" {text}" if has_lost_space else text


def _blank(values: Tensor, has_value: Tensor) -> Tensor:
    """Return ``values`` as f32, with NaN outside of the mask ``has_value``."""
    return torch.where(has_value, values.float(), torch.nan)


def _report_problem(written: Future[None]) -> None:
    if problem := written.exception():  # a run without these files is better than none
        log.error("the rollouts of a step are not kept: %s", describe_problem(problem))
