"""The Python API: what the commands of the command line do, as functions that return values and raise errors.

`import coalign` offers all of it (`coalign.train`); docs/python.md shows each function at work. The commands call
these functions.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coalign.config import dump, load, load_section
from coalign.config.schema import GenerateConfig, RunConfig
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


def evaluate(
    source: Source,
    overrides: Overrides = None,
    *,
    model: PathText | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    reward: Function | Sequence[Function] | None = None,
    loss: Function | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """Measure a model on the evaluation set of a run: mean@n and pass@k, or the loss and its statistics.

    ``model`` is the directory to measure in place of the one that the run starts from, in ``dtype`` (`auto`: as of
    `generate`); see `load_config` for the others. ``quiet`` shows no progress bar. Returns numbers by their names
    (`eval/mean`). Raises ValueError if the run has no `data.eval`.
    """
    from coalign.commands.evaluate import evaluate as measure
    from coalign.report.display import Display

    config = load_config(source, overrides, reward=reward, loss=loss)
    if model is None and dtype != "auto":
        raise ValueError(f"dtype {dtype} is for another model; that of the run has its own: models.NAME.dtype")
    return measure(config, None if model is None else Path(model), Display(quiet=quiet), dtype)


def generate(
    model: PathText,
    prompts: str | os.PathLike[str] | Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]],
    *,
    output: PathText | None = None,
    samples: int = 1,
    keep: Literal["all", "best"] = "all",
    reward: Function | Sequence[Function] | None = None,
    reward_model: PathText | None = None,
    reward_template: str | None = None,
    reward_score_at: Literal["last_trained", "end_of_text"] | None = None,
    prompt_key: str = "prompt",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: str = "cpu",
    images: bool | Mapping[str, Any] = False,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    quiet: bool = False,
    overwrite: bool = False,
    **sampling: Any,
) -> list[dict[str, Any]]:
    """Generate ``samples`` responses to each prompt with the model in a Hugging Face directory, or a run folder.

    ``prompts``: a text is one prompt, a path names a data file; a list holds texts, conversations (lists of messages)
    or rows (dictionaries with the prompt under ``prompt_key``). ``sampling`` takes the keys of a policy's `sampling`
    section: ``max_new_tokens``, ``temperature``, ``top_p``, ``stop`` and so on. ``images``: read those of rows, with a
    model that sees; a mapping holds keys of `data.images`. ``chat_template``: as `data.chat_template`; None: what the
    run was trained with that made the model, else `auto`. ``dtype``: `auto` is bfloat16 for a model that is stored in
    16 bits a number or fewer, if the device multiplies that, else float32.

    Returns a dictionary for each response, ordered by prompt, then index: the prompt's row with `response`, `group`,
    `index`, `status`, `tokens`, `logprob`, and `score` if there is a ``reward`` (functions) or a ``reward_model`` (a
    directory). With ``keep="best"`` only the best-scored response to each prompt stays. ``output`` names a JSON-lines
    file that keeps them, too: a call that was killed goes on where it was, if its prompts are a file. Without
    ``output``, ``on_record`` sees each record as soon as it is there.

    Raises ConfigError for wrong settings, ValueError for a directory that holds no model and for prompts that fail,
    FileExistsError for an ``output`` that exists, unless ``overwrite`` is set.
    """
    from coalign.commands.generate import generate as respond
    from coalign.report.display import Display

    if output is not None and on_record is not None:
        raise ValueError("generate takes `output` or `on_record`, not both: records of a file appear together")
    seen = None if images is False else {} if images is True else dict(images)
    if seen is not None and not isinstance(prompts, os.PathLike):
        seen = {"root": os.getcwd()} | seen
    with tempfile.TemporaryDirectory() as folder:
        config = load_section(
            GenerateConfig,
            {
                "model": model,
                "data": {
                    "train": {"path": _write_prompts(prompts, prompt_key, Path(folder))},
                    "prompt_key": prompt_key,
                    **({} if chat_template is None else {"chat_template": chat_template}),
                    "chat_template_kwargs": chat_template_kwargs or {},
                    "max_prompt_tokens": 2**31,  # the model's own limit is the one that counts
                    "images": seen,
                    "shuffle": False,
                },
                "samples": samples,
                "keep": keep,
                "reward": [] if reward is None else reward,
                "reward_model": reward_model,
                "reward_template": reward_template,
                "reward_score_at": reward_score_at,
                "sampling": sampling,
                "seed": seed,
                "dtype": dtype,
                "device": device,
            },
        )
        records: list[dict[str, Any]] = []

        def take(record: dict[str, Any]) -> None:
            records.append(record)
            if on_record is not None:
                on_record(record)

        respond(config, take if output is None else Path(output), Display(quiet=quiet), overwrite=overwrite)
    return records if output is None else _read_lines(Path(output))


def _write_prompts(prompts: Any, key: str, folder: Path) -> Path:
    """The data file that holds the prompts."""
    if isinstance(prompts, os.PathLike):
        return Path(prompts)
    several = [prompts] if isinstance(prompts, str) else prompts
    rows = [prompt if isinstance(prompt, Mapping) else {key: prompt} for prompt in several]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _read_result(folder: Path) -> TrainResult:
    model, metrics = folder / "model", folder / "metrics.jsonl"
    return TrainResult(folder, list(read_records(metrics)), model if model.exists() else None)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:  # not splitlines: a response may hold other line separators
        return [json.loads(line) for line in lines]
