"""Fetches the models and the data that a run names, before anything else starts.

A run keeps the commits of the hub that it began with, in hub.json of its folder: {name: name with its commit}. Of a URL
it keeps the digest of its content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from coalign.config import ConfigError, locate_problems
from coalign.config.errors import ConfigProblem
from coalign.config.schema import ModelConfig, RunConfig, SourceConfig
from coalign.files import write_text_atomically
from coalign.hub import fetch_model, list_sources, pin
from coalign.hub_data import fetch_data, is_dataset, is_url, pin_data

FILE = "hub.json"
EVALUATION = ("data", "eval")  # never streamed, whatever `data.stream` says


def fetch_sources(config: RunConfig, *, weights: bool = True, rows: bool = True) -> RunConfig:
    """Download what this machine lacks of a run's models and data; return the configuration with their commits.

    The commits are those of the run folder, or else the newest of their revisions. Without ``weights``, only the
    configuration and the tokenizer of each model are fetched; without ``rows`` only the names of data are looked up, as
    with `data.stream` for the training data. Raises ConfigError, with the key, for what the hub does not give.
    """
    file = Path(config.output) / FILE
    commits = json.loads(file.read_text()) if file.is_file() and config.runtime.resume != "never" else {}
    models = {}
    with locate_problems(config):
        for name, model in config.models.items():
            try:
                models[name] = _name_commits(model, commits)
                fetch_model(models[name], weights=weights)
            except ValueError as problem:
                raise ConfigError([ConfigProblem(("models", name, "load"), str(problem))]) from problem
        data = {}
        for key, sources in list_data(config).items():
            read = rows and not (config.data.stream and key != EVALUATION)
            try:
                data[key] = [_fetch_source(source, commits, read) for source in sources]
            except ValueError as problem:
                raise ConfigError([ConfigProblem(key, str(problem))]) from problem
    sections = {
        section: getattr(config, section).model_copy(update={name: data[s, name] for s, name in data if s == section})
        for section, _ in data
    }
    return config.model_copy(update={"models": models, **sections})


def write_commits(folder: Path, requested: RunConfig, resolved: RunConfig) -> None:
    """Keep in the run folder which commits stand in ``resolved`` for the names in ``requested``."""
    pairs = [
        (named, fetched)
        for name, model in requested.models.items()
        for (named, _), (fetched, _) in zip(list_sources(model), list_sources(resolved.models[name]), strict=True)
    ]
    pairs += [
        (named.path, fetched.path)
        for key, sources in list_data(requested).items()
        for named, fetched in zip(sources, list_data(resolved)[key], strict=True)
    ]
    if commits := {name: commit for name, commit in pairs if name != commit}:
        write_text_atomically(folder / FILE, json.dumps(commits, indent=2) + "\n")


def list_data(config: RunConfig) -> dict[tuple[str, str], list[SourceConfig]]:
    """Return the sources of data under each key that names some."""
    more = {("ptx", "data"): config.ptx.data} if config.ptx else {}
    return {("data", "train"): config.data.train, EVALUATION: config.data.eval, **more}


def _fetch_source(source: SourceConfig, commits: Mapping[str, str], rows: bool) -> SourceConfig:
    if not (is_url(source.path) or is_dataset(source.path)):
        return source
    path = commits.get(source.path) or pin_data(source.path)
    fetch_data(path, rows=rows)
    return source.model_copy(update={"path": path})


def _name_commits(model: ModelConfig, commits: Mapping[str, str]) -> ModelConfig:
    named = {key: commits.get(name) or pin(name) for key in ("load", "tokenizer") if (name := getattr(model, key))}
    lora = model.lora
    if lora and lora.load:
        lora = lora.model_copy(update={"load": commits.get(lora.load) or pin(lora.load)})
    return model.model_copy(update={"lora": lora, **named})
