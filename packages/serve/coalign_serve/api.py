"""`coalign.generate` and `coalign.evaluate`: commands as functions that return values and raise errors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from coalign.api import Function, Overrides, PathText, Source, load_config
from coalign.config import load_section
from coalign_serve.config.stages import GenerateConfig


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
    from coalign.report.display import Display
    from coalign_serve.generate import generate as respond

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
    from coalign.report.display import Display
    from coalign_serve.evaluate import evaluate as measure

    config = load_config(source, overrides, reward=reward, loss=loss)
    if model is None and dtype != "auto":
        raise ValueError(f"dtype {dtype} is for another model; that of the run has its own: models.NAME.dtype")
    return measure(config, None if model is None else Path(model), Display(quiet=quiet), dtype)


def _write_prompts(prompts: Any, key: str, folder: Path) -> Path:
    """The data file that holds the prompts."""
    if isinstance(prompts, os.PathLike):
        return Path(prompts)
    several = [prompts] if isinstance(prompts, str) else prompts
    rows = [prompt if isinstance(prompt, Mapping) else {key: prompt} for prompt in several]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _read_lines(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:  # not splitlines: a response may hold other line separators
        return [json.loads(line) for line in lines]
