"""Fetches the models that a run names, before anything else starts.

A run keeps the commits of the hub that it began with, in hub.json of its folder: {name: name with its commit}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from coalign.config import locate_problems
from coalign.config.schema import ModelConfig, RunConfig
from coalign.files import write_text_atomically
from coalign.hub import fetch_model, list_sources, pin

FILE = "hub.json"


def fetch_models(config: RunConfig, *, weights: bool = True) -> RunConfig:
    """Download and convert what this machine lacks of a run's models; return the configuration with their commits.

    They are those of the run folder, or else the newest of their revisions. Without ``weights``, of each model only its
    configuration and its tokenizer. Raises ConfigError, with the key, for what the hub does not have or does not give.
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
                raise ValueError(f"models.{name}.load: {problem}") from problem
    return config.model_copy(update={"models": models})


def write_commits(folder: Path, before: RunConfig, after: RunConfig) -> None:
    """Keep in the run folder which commits stand in ``after`` for the names in ``before``."""
    pairs = [
        (named[1], fetched[1])
        for name, model in before.models.items()
        for named, fetched in zip(list_sources(model), list_sources(after.models[name]), strict=True)
    ]
    if commits := {name: commit for name, commit in pairs if name != commit}:
        write_text_atomically(folder / FILE, json.dumps(commits, indent=2) + "\n")


def _name_commits(model: ModelConfig, commits: Mapping[str, str]) -> ModelConfig:
    named = {key: commits.get(name) or pin(name) for key in ("load", "tokenizer") if (name := getattr(model, key))}
    lora = model.lora
    if lora and lora.load:
        lora = lora.model_copy(update={"load": commits.get(lora.load) or pin(lora.load)})
    return model.model_copy(update={"lora": lora, **named})
