"""The tokens of the samples that a run logs, with a value for each column: `rollouts/step_N.safetensors`.

A file has the rows that samples.jsonl has of that step, in the same order. Any reader of safetensors reads it:

- `tokens` i32[T]: prompt and response of each row, rows end to end; `row_ends` i64[R]: where each row ends;
  `prompt_length` i32[R].
- for each token, if the step has them: `logprob` (the sampler's), `trainer_logprob` (before the step's first
  update), `reference_logprob`, `advantage`, f32[T], NaN where there is none; `loss_mask` u8[T];
  `weight_version` i32[T], -1 for a token that was not generated.
- metadata: `pieces`, a JSON object with the text of each token id alone; `step`; `format`, "1".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from coalign.files import describe_problem, open_regular, write_atomically

if TYPE_CHECKING:  # numpy is imported late: the board reads these files without its 11 MB of memory
    import numpy as np

FOLDER = "rollouts"
FORMAT = "1"
# Columns with a value for each token -> their dtype, and the value of a token without one.
MISSING: dict[str, tuple[str, float]] = {
    "logprob": ("float32", math.nan),
    "trainer_logprob": ("float32", math.nan),
    "reference_logprob": ("float32", math.nan),
    "advantage": ("float32", math.nan),
    "loss_mask": ("uint8", 0),
    "weight_version": ("int32", -1),
}


@dataclass(frozen=True)
class LoggedRollouts:
    """Rows of one step: ``tokens`` i32[T], ``row_ends`` i64[R], ``prompt_length`` i32[R].

    ``columns`` has arrays [T] by the names of MISSING. ``pieces`` are the texts of the token ids.
    """

    tokens: np.ndarray
    row_ends: np.ndarray
    prompt_length: np.ndarray
    columns: Mapping[str, np.ndarray]
    pieces: Mapping[int, str]

    def extend(self, later: LoggedRollouts) -> LoggedRollouts:
        """Return these rows and those of ``later``; a column that one of them lacks has no values there."""
        import numpy as np

        names = [name for name in MISSING if name in self.columns or name in later.columns]
        columns = {name: np.concatenate([self._get(name), later._get(name)]) for name in names}
        return replace(
            self,
            tokens=np.concatenate([self.tokens, later.tokens]),
            row_ends=np.concatenate([self.row_ends, later.row_ends + len(self.tokens)]),
            prompt_length=np.concatenate([self.prompt_length, later.prompt_length]),
            columns=columns,
            pieces={**self.pieces, **later.pieces},
        )

    def _get(self, name: str) -> np.ndarray:
        import numpy as np

        dtype, value = MISSING[name]
        return self.columns.get(name, np.full(len(self.tokens), value, dtype))


def find_rollouts(run: Path, step: int) -> Path:
    """Return the path of a step's file."""
    return run / FOLDER / f"step_{step}.safetensors"


def list_rollout_steps(run: Path) -> list[int]:
    """Return the steps that have a file, ascending."""
    names = [path.stem.removeprefix("step_") for path in (run / FOLDER).glob("step_*.safetensors")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def write_rollouts(path: Path, step: int, rollouts: LoggedRollouts) -> None:
    """Replace the file of a step. Raises OSError."""
    from safetensors.numpy import save_file

    arrays = {"tokens": rollouts.tokens, "row_ends": rollouts.row_ends, "prompt_length": rollouts.prompt_length}
    pieces = {str(token): text for token, text in rollouts.pieces.items()}
    metadata = {"pieces": json.dumps(pieces, ensure_ascii=False), "step": str(step), "format": FORMAT}
    with write_atomically(path) as aside:
        save_file({**arrays, **rollouts.columns}, aside, metadata)


def read_rollouts(path: Path) -> LoggedRollouts:
    """Read the file of a step. Raises FileNotFoundError, and ValueError for a file of another kind."""
    try:
        open_regular(path).close()  # `safe_open` would wait for a FIFO
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}; expected {FORMAT!r}")
        pieces = {int(token): text for token, text in json.loads(metadata["pieces"]).items()}
        columns = {name: arrays[name] for name in MISSING if name in arrays}
        return LoggedRollouts(arrays["tokens"], arrays["row_ends"], arrays["prompt_length"], columns, pieces)
    except (SafetensorError, ValueError, KeyError, AttributeError) as problem:
        raise ValueError(f"{path} holds no rollouts: {describe_problem(problem)}") from problem
