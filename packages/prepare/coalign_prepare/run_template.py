"""What a run's YAML begins with: the keys that a person has to fill in, and those that most people set."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from string import Formatter
from textwrap import wrap
from typing import Any

from coalign.backends.base import build_objective
from coalign.config import load
from coalign.config.functions import list_classes
from coalign.config.schema import ModelConfig
from coalign.data.kinds import KINDS
from coalign.launch.plan import find_recipe
from coalign.roles import Rollout, Trainable
from coalign_prepare.yaml_writer import to_commented_yaml, to_short_yaml

MODEL, DATA, REWARD = "<model directory or name of the hub>", "<data file>", "<math or my.module:function>"
FIRST = ("sft", "dpo", "grpo")  # recipes to begin with
INDENT = " " * 6
ENGINES = ("models.native", "models.transformers", "models.vllm", "runtime.eval_sampling")  # for sampling alone


class RunTemplate:
    """A recipe with its models, and which of these need weights to load."""

    def __init__(self, algorithm: str) -> None:
        """ValueError, with the nearest name, for a recipe that is not there."""
        self.algorithm = algorithm
        self.recipe = find_recipe(algorithm)
        self.defaults = self.recipe.defaults
        self.config = load({"algorithm": algorithm}, defaults=lambda _: self.defaults)
        loss = build_objective(self.config.loss) if self.config.loss else None
        self.roles = self.recipe.roles(self.config, loss)
        self.models = {name: {} for name in self.roles if name != "reward"} | self.defaults.get("models", {})
        self.loaded = [name for name, model in self.models.items() if not model.keys() & {"like", "load"}]
        self.needs_reward = "reward" in self.roles and not self.config.reward

    @property
    def summary(self) -> str:
        """The first line of the recipe's description."""
        return (inspect.getdoc(self.recipe) or "").partition("\n")[0]

    def describe_models(self) -> str:
        """Say which models a run has to name, and which it has besides."""
        given = [*self.loaded, *(["reward"] if self.needs_reward else [])]
        derived = ", ".join(name for name in self.roles if name not in given)
        return f"needs {', '.join(given)}" + (f"; also has {derived}" if derived else "")

    def write(self, *, full: bool = False) -> str:
        """Write the YAML: what is needed in <angle brackets>, and the settings that most people set, or all."""
        named = {name for _, name, *_ in Formatter().parse(self.config.data.prompt_format) if name} - {"prompt"}
        keys = [KINDS[self.recipe.source].keys, *(f"`{name}`" for name in sorted(named))]
        lines = [
            self.summary,
            f"Data: rows with {'; also '.join(keys)}.",
            "Replace what stands in <angle brackets>; nothing else is needed.",
            *([] if full else [f"`coalign init {self.algorithm} --full` shows all settings."]),
        ]
        intro = "".join(f"# {line}\n" for line in lines)
        if full:
            return f"{intro}\n{to_commented_yaml(self._list_all(), self._list_unread())}"
        return f"{intro}\n{to_short_yaml(self._list_common())}"

    def _list_all(self) -> dict[str, Any]:
        models = {name: ({"load": MODEL} if name in self.loaded else {}) | keys for name, keys in self.models.items()}
        reward = {"reward": REWARD} if self.needs_reward else {}
        data = {"train": DATA} | self.defaults.get("data", {})
        return {**self._name_run(), **reward, **self.defaults, "data": data, "models": models}

    def _list_common(self) -> dict[str, Any]:
        models: dict[str, dict[str, Any]] = {name: {"load": MODEL} for name in self.loaded}
        learning = next((name for name, role in self.roles.items() if role is Trainable), None)
        for name, role in self.roles.items():
            model = self.config.models.get(name, ModelConfig())
            if role is Rollout:
                models.setdefault(name, {})["sampling"] = {"max_new_tokens": model.sampling.max_new_tokens}
            elif name == learning:
                models.setdefault(name, {})["optimizer"] = {"lr": model.optimizer.lr}
        runtime = self.config.runtime
        size = "tokens_per_step" if runtime.tokens_per_step else "prompts_per_step"
        samples = {"samples_per_prompt": runtime.samples_per_prompt} if self.recipe.source == "prompts" else {}
        return {
            **self._name_run(),
            "data": {"train": DATA},
            "models": models,
            **({"reward": REWARD} if self.needs_reward else {}),
            "runtime": {"steps": runtime.steps, size: getattr(runtime, size), **samples},
        }

    def _name_run(self) -> dict[str, str]:
        return {"algorithm": self.algorithm, "output": f"runs/{self.algorithm.rpartition(':')[2]}"}

    def _list_unread(self) -> list[str]:
        sync = () if self.recipe.sync else ("sync",)
        return [*self.recipe.list_unread(), *sync, *(() if Rollout in self.roles.values() else ENGINES)]


def describe_recipes(width: int) -> Iterator[str]:
    """Yield lines of at most ``width`` characters on each recipe, by the data that it takes."""
    templates = [RunTemplate(name) for name in list_classes("coalign.recipes")]
    yield f"`*`: to begin with. `coalign init {FIRST[0]}` writes a run."
    for row_type, encoder in KINDS.items():
        yield ""
        yield from wrap(f"Rows with {encoder.keys} ({row_type}):", width)
        for template in templates:
            if template.recipe.source == row_type:
                mark = "*" if template.algorithm in FIRST else " "
                yield f"{mark} {template.algorithm}: {template.describe_models()}"
                yield from wrap(template.summary, width, initial_indent=INDENT, subsequent_indent=INDENT)
