"""The Python API: what the commands of the command line do, as functions that return values and raise errors.

`import coalign` offers all of it (`coalign.train`); docs/python.md shows each function at work. The commands call
these functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalign.config import dump, load
from coalign.config.schema import RunConfig
from coalign.config.yaml_reader import parse
from coalign.run_files.records import read_records

if TYPE_CHECKING:
    from coalign.engine.engine import Hook

PathText = str | os.PathLike[str]
Source = PathText | Mapping[str, Any] | RunConfig
Overrides = Mapping[str, Any] | Sequence[str] | None
Function = Callable[..., Any] | str | Mapping[str, Any]


@dataclass(frozen=True)
class TrainResult:
    """The results of a run.

    ``metrics`` has a dictionary for each line of metrics.jsonl, in order: `step`, and numbers by their names.
    ``folder`` is the run folder, ``model`` the Hugging Face directory of the newest model, or of the best one
    (`runtime.best`); None if the run ended before its first checkpoint.
    """

    folder: Path
    metrics: list[dict[str, Any]]
    model: Path | None

    def __repr__(self) -> str:
        from coalign.report.result_view import describe_metrics

        return f"TrainResult({self.folder}: {describe_metrics(self.metrics)}; model {self.model})"

    def _repr_html_(self) -> str:
        """Show the line and the curve in a notebook."""
        from html import escape

        from coalign.report.result_view import draw_curve

        return f"<div>{escape(repr(self))}</div>{draw_curve(self.metrics)}"


class TrainingStopped(RuntimeError):
    """A run ended before its last step: a signal stopped it, or its guards did.

    ``result`` holds what the run had reached by then. ``exit_code`` is that of `coalign train`.
    """

    def __init__(self, reason: str, result: TrainResult, exit_code: int) -> None:
        super().__init__(f"{reason}; the same call goes on from the newest checkpoint in {result.folder}")
        self.result = result
        self.exit_code = exit_code


def load_config(
    source: Source,
    overrides: Overrides = None,
    *,
    reward: Function | Sequence[Function] | None = None,
    loss: Function | None = None,
    planned: bool = False,
) -> RunConfig:
    """Read, merge and validate the configuration of a run, with the defaults of its recipe.

    ``source`` is a YAML file, a dictionary of the same shape, or a configuration that this function returned.
    ``overrides`` maps dotted keys to values (``{"runtime.steps": 10}``). A list of texts (``["runtime.steps=10"]``), as
    the command line has them, works if no function is passed. ``reward`` and ``loss`` replace the sections of these
    names: functions, their names, or sections (``{"fn": score, "weight": 0.5}``). Functions may stand in a dictionary,
    too, wherever the YAML has a name. With ``planned``, a model that another run will make (`OUTPUT/model`) need not
    exist yet: enough to check the configuration.

    Raises ConfigError with one line for every problem.
    """

    def find_defaults(algorithm: str) -> Mapping[str, Any]:
        from coalign.launch.plan import find_recipe  # imports torch, which a file that cannot be read does without

        return find_recipe(algorithm).defaults

    functions = {name: value for name, value in (("reward", reward), ("loss", loss)) if value is not None}
    if isinstance(source, RunConfig):
        if not overrides and not functions:
            return source
        return load_config(parse(dump(source), "configuration")[0], overrides, reward=reward, loss=loss)
    if functions:
        if isinstance(overrides, Sequence):
            raise ValueError("overrides: beside `reward` or `loss` they are a dictionary, {'runtime.steps': 10}")
        overrides = {**(overrides or {}), **functions}
    return load(source, overrides or (), defaults=find_defaults, planned=planned)


def train(
    source: Source,
    overrides: Overrides = None,
    *,
    reward: Function | Sequence[Function] | None = None,
    loss: Function | None = None,
    hooks: Sequence[Hook] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train as a configuration says; see `load_config` for the arguments that describe it.

    ``hooks`` see every step (coalign.Hook). ``quiet`` shows warnings and the summary only. A run whose folder
    holds checkpoints goes on from the newest one, unless `runtime.resume` says otherwise.

    Raises ConfigError or ValueError before anything is loaded if the configuration cannot run, TrainingStopped if a
    signal or a guard ended the run, and whatever a model or a function of the run raised.
    """
    config = load_config(source, overrides, reward=reward, loss=loss)
    from coalign.launch.run import train as run  # slow to import: a wrong file is named before
    from coalign.report.display import Display

    code = run(config, Display(quiet=quiet), hooks)
    result = _read_result(Path(config.output))
    if code:
        raise TrainingStopped(
            "a signal or a request stopped the run" if code > 128 else "a guard stopped the run", result, code
        )
    return result


def _read_result(folder: Path) -> TrainResult:
    model, metrics = folder / "model", folder / "metrics.jsonl"
    return TrainResult(folder, list(read_records(metrics)), model if model.exists() else None)
