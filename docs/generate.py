"""Makes the pages of docs/reference from the package: settings, commands, recipes, functions, Python API.

MkDocs calls `build_reference` when it builds the site (docs/hooks.py). Nothing of it is kept in the repository.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperArgument, TyperCommand, TyperGroup

import coalign
from coalign.cli import app
from coalign.config.functions import list_arguments, list_classes, list_functions, shorten_name
from coalign.config.introspect import find_section, unwrap_type
from coalign.config.schema import Function, RunConfig, Section
from coalign.config.yaml_reader import emit, emit_inline
from coalign.data.kinds import KINDS
from coalign_jobs.sweep.config import SweepConfig
from coalign_prepare.run_template import RunTemplate
from coalign_serve.config.serving import CompletionServerConfig, ServeConfig
from coalign_serve.config.stages import PipelineConfig

# What a person's own recipe, loss or backend imports beside `coalign.…`; nothing else of the package is documented.
OWN_PARTS = {
    "Recipes": {
        "coalign.engine.engine": ("score",),
        "coalign.roles": ("Rollout", "Scorer", "Trainable", "Context"),
        "coalign.recipes.grpo": ("GRPO",),
        "coalign.recipes.ppo": ("PPO",),
        "coalign.recipes.online": ("Online",),
        "coalign.recipes.offline": ("Offline",),
    },
    "Losses and advantages": {
        "coalign.algorithms.losses.policy": ("PolicyGradient", "PolicyLoss", "Surrogate"),
        "coalign.algorithms.objective": ("Loss", "Objective"),
        "coalign.algorithms.advantages": ("group",),
        "coalign.backends.base": ("Module", "TrainableModule"),
        "coalign.types": ("Stats", "Status"),
    },
    "Backends": {
        "coalign.backends.hf.fsdp": ("FSDPModule",),
        "coalign.backends.engines.native.native_engine": ("NativeModule",),
        "coalign.backends.engines.rollout_module": ("RolloutModule",),
        "coalign.config.schema": ("ModelConfig", "OptimizerConfig", "SamplingConfig"),
    },
    "Rewards and environments": {
        "coalign.services": ("ServiceError",),
        "coalign.environments.episode": ("Episode",),
        "coalign_agents.games": ("Game",),
    },
    "Files of a run": {
        "coalign.run_files.records": ("read_records",),
        "coalign.run_files.state": ("RunState", "read_state"),
        "coalign.data.templates": ("read_samples",),
        "coalign.engine.hooks.guards": ("read_dump",),
    },
}
_BOUNDS = {"gt": "> ", "ge": "≥ ", "lt": "< ", "le": "≤ "}
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "mapping", Any: "anything"}


def build_reference() -> dict[str, str]:
    """Return the pages of the reference: their paths below docs/, and their Markdown."""
    return {
        "reference/configuration.md": "\n".join(_describe_settings()),
        "reference/commands.md": "\n".join(_describe_commands()),
        "reference/recipes.md": "\n".join(_describe_recipes()),
        "reference/functions.md": "\n".join(_describe_functions()),
        "reference/python.md": "\n".join(_describe_python()),
    }


def _describe_settings() -> Iterator[str]:
    yield from ["# Settings", "", "Every key of a run's YAML. A key without a default has to be written.", ""]
    yield from ["The files of pipelines, sweeps and servers have sections of their own at the end.", ""]
    roots = {
        "": RunConfig,
        "Pipelines": PipelineConfig,
        "Sweeps": SweepConfig,
        "`coalign serve`": CompletionServerConfig,
        "`coalign serve-reward`": ServeConfig,
    }
    for title, root in roots.items():
        seen: set[type[Section]] = set()
        yield from _describe_section(title or "A run", root, root, (), seen)


def _describe_section(
    title: str, section: type[Section], root: type[Section], key: tuple[str, ...], seen: set[type[Section]]
) -> Iterator[str]:
    """Yield the keys of a section, then those of the sections in it. One that comes twice is described once."""
    seen.add(section)
    yield from [f"{'##' if len(key) < 2 else '###'} {title}", ""]
    if about := _clean(section.__doc__ if section.__doc__ and section is not root else ""):
        yield from [about, ""]
    yield from ["| key | type | default | meaning |", "|---|---|---|---|"]
    inner: list[tuple[str, type[Section]]] = []
    for name, field in section.model_fields.items():
        below = find_section((*key, name), root) or _find_values(field)
        kind = "section" if below else describe_type(field.annotation, field.metadata)
        yield f"| `{name}` | {_cell(kind)} | {_cell(_describe_default(field))} | {_cell(_clean(field.description))} |"
        if below is not None and below not in seen and not any(below is other for _, other in inner):
            inner.append((name, below))
    yield ""
    for name, below in inner:
        star = "NAME" if _find_values(section.model_fields[name]) else None
        path = (*key, name, star) if star else (*key, name)
        yield from _describe_section(f"`{'.'.join(path)}`", below, root, path, seen)


def _find_values(field: FieldInfo) -> type[Section] | None:
    """Return the section of each value of a mapping such as `models`."""
    kind = unwrap_type(field.annotation)
    values = get_args(kind)[1] if get_origin(kind) is dict else None
    return values if isinstance(values, type) and issubclass(values, Section) else None


def describe_type(kind: Any, marks: Sequence[Any] = ()) -> str:
    """Say in words what values an annotation takes; ``marks`` are what `Annotated` adds to it."""
    if marks:
        bounds = [
            f"{sign}{getattr(mark, name):g}" for mark in marks for name, sign in _BOUNDS.items() if hasattr(mark, name)
        ]
        return " ".join([describe_type(kind), *bounds])
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        return describe_type(inner, [mark for part in more for mark in getattr(part, "metadata", [part])])
    if get_origin(kind) in (Union, types.UnionType):
        parts = [describe_type(part) for part in get_args(kind) if part is not type(None)]
        return ", or ".join([*parts, *(["null"] if type(None) in get_args(kind) else [])])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) in (list, tuple):
        return f"list of {describe_type(get_args(kind)[0])}" if get_args(kind) else "list"
    if get_origin(kind) is dict:
        return f"mapping to {describe_type(get_args(kind)[1])}"
    if isinstance(kind, type) and issubclass(kind, Section):
        return "section"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its own"
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        value = [item.model_dump(exclude_defaults=True) for item in value]
    return f"`{emit_inline(value)}`"


def _describe_commands() -> Iterator[str]:
    yield from ["# Commands", "", "What `coalign COMMAND --help` says, on one page.", ""]
    yield from ["`--traceback`, with any command, shows the whole traceback of an error.", ""]
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, command in list_commands(group):
        yield from [f"## coalign {name}", "", _clean(command.help), ""]
        words = [
            parameter.name.upper() if parameter.required else f"[{parameter.name.upper()}]"
            for parameter in command.params
            if isinstance(parameter, TyperArgument)
        ]
        yield from ["```text", " ".join(["coalign", name, "[OPTIONS]", *words]), "```", ""]
        yield from ["| argument or option | default | meaning |", "|---|---|---|"]
        for parameter in command.params:
            if parameter.name == "help":
                continue
            names = parameter.name.upper() if isinstance(parameter, TyperArgument) else ", ".join(parameter.opts)
            default = (
                "" if parameter.default in (None, False) or callable(parameter.default) else f"`{parameter.default}`"
            )
            yield f"| `{names}` | {_cell(default)} | {_cell(_clean(getattr(parameter, 'help', '')))} |"
        yield ""


def list_commands(group: TyperGroup, prefix: str = "") -> Iterator[tuple[str, TyperCommand]]:
    """Yield every command with its name, those of groups (`launch slurm`) included."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if isinstance(command, TyperGroup):
            yield from list_commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _describe_recipes() -> Iterator[str]:
    yield from ["# Recipes", "", "`algorithm: NAME` takes one; `coalign init NAME` writes a run to begin with.", ""]
    for name in list_classes("coalign.recipes"):
        template = RunTemplate(name)
        yield from [f"## {name}", "", _clean(inspect.getdoc(template.recipe)), ""]
        yield from [f"- rows: {KINDS[template.recipe.source].keys} ({template.recipe.source})"]
        yield from [f"- models: {', '.join(f'`{model}`' for model in template.roles)}", ""]
        yield from [
            "Its defaults, beside those of all settings:",
            "",
            "```yaml",
            emit(template.defaults).rstrip(),
            "```",
            "",
        ]


def _describe_functions() -> Iterator[str]:
    yield from ["# Functions", "", "What a section names by `fn`, with the arguments that stand beside it.", ""]
    for title, section in _list_function_sections():
        yield from [f"## {title}", "", f"Short names of `{section.home}`; your own are `my.module:name`.", ""]
        for name, fn in list_functions(section.home).items():
            yield from _describe_function(shorten_name(name), fn, "###")


def _list_function_sections() -> Iterator[tuple[str, type[Function]]]:
    """Yield the sections of a run that name a function, with their keys; those of models last."""
    seen: set[str] = set()
    waiting: list[tuple[str, type[Section]]] = [("", RunConfig)]
    while waiting:
        prefix, section = waiting.pop(0)
        for name, field in section.model_fields.items():
            kind = unwrap_type(field.annotation)
            inner = get_args(kind)[-1] if get_origin(kind) in (list, dict) else kind
            inner = unwrap_type(inner)
            if not isinstance(inner, type) or not issubclass(inner, Section):
                continue
            key = f"{prefix}{name}" + (".NAME" if get_origin(kind) is dict else "")
            waiting.append((f"{key}.", inner))
            if issubclass(inner, Function) and inner.home and inner.home not in seen:
                seen.add(inner.home)
                yield f"`{key}`", inner


def _describe_function(name: str, fn: Callable[..., Any], heading: str) -> Iterator[str]:
    yield from [f"{heading} {name}", "", _quote(inspect.getdoc(fn)), ""]
    arguments = list_arguments(fn)
    if not arguments:
        return
    yield from ["| argument | default |", "|---|---|"]
    for argument in arguments.values():
        default = "needed" if argument.default is argument.empty else f"`{argument.default!r}`"
        yield f"| `{argument.name}` | {_cell(default)} |"
    yield ""


def _describe_python() -> Iterator[str]:
    yield from ["# Python", "", "What `import coalign` offers; docs/python.md shows it at work.", ""]
    for name in coalign.__all__:
        if name != "__version__":
            yield from _describe_name(name, getattr(coalign, name), f"coalign.{name}")
    for title, modules in OWN_PARTS.items():
        yield from [
            f"# {title}",
            "",
            "For parts of your own; docs/README.md lists the pages that show them at work.",
            "",
        ]
        for module, names in modules.items():
            for name in names:
                yield from _describe_name(name, getattr(import_module(module), name), f"from {module} import {name}")


def _describe_name(name: str, value: Any, source: str) -> Iterator[str]:
    """Yield a class with its methods, or a function: where it comes from, its signature and its docstring."""
    yield from [f"## {name}", "", "```python", source, f"{name}{_find_signature(value)}", "```", ""]
    yield from [_quote(inspect.getdoc(value)), ""]
    for method, inner in vars(value).items() if inspect.isclass(value) else ():
        if inspect.isfunction(inner) and not method.startswith("_") and inner.__doc__:
            yield from [f"### {name}.{method}", "", "```python", f"{method}{inspect.signature(inner)}", "```", ""]
            yield from [_quote(inspect.getdoc(inner)), ""]


def _find_signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""


def _clean(text: str | None) -> str:
    """Return a description as a paragraph of Markdown; None is null in YAML."""
    return re.sub(r"\bNone\b", "null", " ".join((text or "").replace("``", "`").split()))


def _quote(docstring: str | None) -> str:
    """Return a docstring as Markdown: ``code`` becomes `code`, lists and blocks keep their lines."""
    return re.sub(r"``([^`]+)``", r"`\1`", docstring or "")


def _cell(text: str) -> str:
    return re.sub(r"`[^`]*`|\|", lambda found: "\\|" if found[0] == "|" else found[0], text)
