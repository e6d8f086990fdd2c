"""Finds functions and classes by name, and checks arguments against a function's keyword-only parameters.

A name is a dotted path (``my.pkg:fn``), or a short name in the home module of its section. There is no registry: users
can name all public functions and classes of the module. Python callers may pass a function itself: `name_object` names
it, so that a configuration holds only texts.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import sysconfig
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.alias_generators import to_snake
from pydantic.errors import PydanticUserError

from coalign.companions import EXPLAINS, ask, list_entries, list_modules, load
from coalign.config.errors import (
    ConfigError,
    ConfigProblem,
    describe_error,
    find_nearest,
    format_value,
    parse_key,
    suggest,
)

THIS_PROCESS = "<this process>"  # stands for the module in names of objects that cannot be imported
_FRAME = re.compile(r'^ *File "(.+?)", line (\d+)(?:, in (.+))?\n(?: +(?! *File ")(.+))?', re.MULTILINE)
_PACKAGE = str(Path(__file__).resolve().parents[1])
# What other frameworks, or people, call the functions here.
_SYNONYMS = {
    "dpo": ("sigmoid", "robust", "dpo_loss"),
    "policy_gradient": ("ppo", "grpo", "dapo", "dr_grpo", "bnpo", "clip", "clipped", "ppo_clip", "vanilla", "pg"),
    "sft": ("cross_entropy", "ce", "nll", "lm"),
    "bradley_terry": ("bt", "reward", "ranking"),
    "distillation": ("gkd", "kd", "jsd"),
    "group": ("grpo", "group_norm", "group_relative"),
    "reinforce_pp": ("reinforce_plus_plus", "reinforce++"),
    "reinforce_pp_baseline": ("reinforce_plus_plus_baseline",),
    "FixedKL": ("fixed", "constant"),
    "AdaptiveKL": ("adaptive",),
    "math": ("accuracy", "accuracy_reward", "math_verify", "gsm8k", "boxed"),
    "exact_match": ("exact", "em", "equals"),
    "f1": ("token_f1", "squad"),
    "tags": ("format", "format_reward", "think_format_reward"),
    "code": ("code_execution", "sandbox", "unit_tests"),
    "Remote": ("http", "remote_rm", "url"),
    "reward_model": ("rm", "reward", "reward_modeling"),
}
_objects: dict[str, Any] = {}  # objects of THIS_PROCESS, by the rest of their names


_refuses_code = False


def refuse_code(refuse: bool = True) -> None:
    """Let this process find only Coalign's own functions and classes: for configurations of strangers."""
    global _refuses_code
    _refuses_code = refuse


def is_code_refused() -> bool:
    return _refuses_code


def name_object(value: Any) -> str:
    """Return the name by which `resolve` finds a function, class or other callable object.

    That is its dotted path, if its module has it under its own name. Otherwise (a lambda, a nested function, a bound
    method) this process keeps the object, and no other process can resolve the name.
    """
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in sys.modules and path and _attribute(sys.modules[module], path) is value:
        return f"{module}:{path}"
    name = next((name for name, item in _objects.items() if item is value), None)
    if name is None:  # numbered, because functions made by another one share their name
        name = f"{len(_objects)}.{getattr(value, '__name__', type(value).__name__).strip('<>')}"
        _objects[name] = value
    return f"{THIS_PROCESS}:{name}"


def is_bound_to_process(name: str) -> bool:
    """Whether only this process can resolve ``name``; the `__main__` of another process is another program."""
    return name.startswith((f"{THIS_PROCESS}:", "__main__:"))


def resolve(name: str, home: str) -> Any:
    """Find a function or class: ``pkg.mod:attr``, or a public attribute of the module ``home``.

    Short names ignore case, and `cosine_length` finds the class CosineLength. ValueError suggests the nearest names.
    """
    if ":" in name:
        return _import_dotted(name)
    module, brought = importlib.import_module(home), list_entries(home)
    names = [*_public(module), *brought]
    if match := _match_case(name, names) or _match_case(name.replace("_", ""), names):
        return brought[match].load() if match in brought else getattr(module, match)
    load(home, name, f"'{name}'")  # refuses what a missing companion has
    raise ValueError(f"'{name}' is not in {home}{_correct(name, names)} (a function of your own: `my.module:name`)")


def resolve_class(name: str, home: str) -> type:
    """Find a class: ``pkg.mod:Class``, or a key of the table ``CLASSES`` of the package ``home``.

    ``resolve_class("fsdp", "coalign.backends")`` is ``coalign.backends.hf.fsdp.FSDPModule``. Short names ignore case.
    ValueError suggests the nearest names.
    """
    if ":" in name:
        return _import_dotted(name)
    classes = list_classes(home)
    if short := _match_case(name, list(classes)):
        return _import_dotted(classes[short])
    load(home, name, f"'{name}'")  # refuses what a missing companion has
    raise ValueError(f"'{name}' is not in {home}{_correct(name, classes)} (a class of your own: `my.module:Class`)")


def _correct(name: str, names: Iterable[str]) -> str:
    """Correct a name that is not among ``names``, as the end of a sentence: by what others call it, or by spelling."""
    names = list(names)
    plain = re.sub(r"_(loss|reward|advantage)$", "", name.lower())
    meant = (n for n in names if n == plain or {plain, name.lower()} & set(_SYNONYMS.get(n, ())))
    return f"; did you mean '{shorten_name(match)}'?" if (match := next(meant, None)) else suggest(name, names)


def list_classes(home: str) -> Mapping[str, str]:
    """Return short names, and where each class is: the table ``CLASSES`` of ``home``, and what companions bring."""
    brought = {name: entry.value for name, entry in list_entries(home).items()}
    return {**importlib.import_module(home).CLASSES, **brought}


def list_functions(home: str) -> dict[str, Callable[..., Any]]:
    """Return the functions and classes that settings can name, by their names: of ``home``, and of companions."""
    module = importlib.import_module(home)
    brought = {name: entry.load() for name, entry in list_entries(home).items()}
    return {name: getattr(module, name) for name in _public(module)} | brought


def shorten_name(name: str) -> str:
    """Return the name of a function, or `cosine_length` for a class CosineLength."""
    return name if name.islower() else to_snake(name)


def list_arguments(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of ``fn``, which are its configuration, by name; inherited ones last."""
    parameters = inspect.signature(fn).parameters
    names = [*(vars(fn).get("__annotations__", ()) if is_dataclass(fn) else ()), *parameters]
    return {name: p for name in names if (p := parameters.get(name)) and p.kind is p.KEYWORD_ONLY}


def bind(fn: Callable[..., Any], arguments: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Check ``arguments`` against the keyword-only parameters of ``fn``, and add the defaults.

    ``section`` is the dotted path of the function's section. ConfigError has one problem for each unknown, missing or
    ill-typed argument. A ``**kwargs`` parameter takes any name; an annotation that pydantic cannot check (such as a
    tensor) accepts any value.
    """
    named = list_arguments(fn)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(fn).parameters.values())
    types = get_annotations(fn)
    bound, problems = {}, []
    for name, value in arguments.items():
        if name not in named and not takes_any:
            problems.append(ConfigProblem(_path(section, name), _correct_argument(name, value, fn, named)))
            continue
        try:
            bound[name] = _check_value(value, types.get(name, Any))
        except ValidationError as error:
            problems += [p for e in error.errors() for p in _problems(_path(section, name, *e["loc"]), e)]
    for name, parameter in named.items():
        if name not in arguments and parameter.default is parameter.empty:
            problems.append(ConfigProblem(_path(section, name), f"missing: {fn.__name__} needs it"))
        elif name not in arguments:
            bound[name] = parameter.default
    if problems:
        raise ConfigError(problems)
    return bound


def _correct_argument(name: str, value: Any, fn: Callable[..., Any], named: Iterable[str]) -> str:
    names = list(named)
    if not find_nearest(name, names) and (translated := ask(EXPLAINS, "foreign_key", (name,), value)):
        return translated
    return (
        f"unknown argument of {fn.__name__}{suggest(name, names)}"
        if names
        else f"unknown argument; {fn.__name__} takes none"
    )


def list_columns(fn: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """List the columns that a flow function takes, in order: (required, optional)."""
    positional = [
        p for p in inspect.signature(fn).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    required = [p.name for p in positional if p.default is p.empty]
    return required, [p.name for p in positional if p.default is not p.empty]


def _import_dotted(name: str) -> Any:
    path, _, attribute = name.partition(":")
    if path == THIS_PROCESS:
        if attribute not in _objects:
            raise ValueError(f"'{name}' was passed as an object to another process; pass it again, or name a module's")
        return _objects[attribute]
    if _refuses_code and (path.partition(".")[0] not in list_modules() or "." in attribute):
        raise ValueError(f"'{name}' is not Coalign's own: with --no-code nothing else is imported")
    if path.endswith(".py") or not all(word.isidentifier() for word in path.split(".")):
        name = f"{Path(path).name.removesuffix('.py')}:{attribute}"
        raise ValueError(f"'{path}' is no name of a module; write it as `import` has it, such as `{name}`")
    try:
        value: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise ValueError(f"'{name}': no module '{error.name}' in the current directory or installed") from error
    for member in attribute.split("."):
        if not hasattr(value, member):
            names = _public(value) if isinstance(value, ModuleType) else dir(value)
            raise ValueError(f"'{name}': '{path}' has no '{member}'{suggest(member, names)}")
        value = getattr(value, member)
    if _refuses_code and str(getattr(value, "__module__", "")).partition(".")[0] not in list_modules():
        raise ValueError(f"'{name}' is not Coalign's own: with --no-code nothing else is used")
    if not callable(value):
        raise ValueError(f"'{name}' is {format_value(value)}; expected a function or a class")
    return value


def _attribute(value: Any, path: str) -> Any:
    """Follow the dotted ``path`` below ``value``; None if it does not exist."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _public(module: ModuleType) -> list[str]:
    """The names that users can refer to: ``__all__``, or the functions and classes that the module itself defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _match_case(name: str, names: Iterable[str]) -> str | None:
    names = list(names)
    return name if name in names else next((n for n in names if n.lower() == name.lower()), None)


def _path(section: str, *keys: str | int) -> tuple[str | int, ...]:
    return (*parse_key(section), *keys)


def _problems(key: tuple[str | int, ...], error: Any) -> list[ConfigProblem]:
    """Convert a pydantic error. A value may itself name a function, whose arguments were checked in turn."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return [ConfigProblem((*key, *problem.key), problem.message) for problem in cause.problems]
    return [ConfigProblem(key, describe_error(error))]


def get_annotations(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's parameters, or of those of a class, by name."""
    if inspect.isclass(fn) and not is_dataclass(fn):
        return typing.get_type_hints(fn.__init__, include_extras=True)
    return typing.get_type_hints(fn if hasattr(fn, "__annotations__") else type(fn).__call__, include_extras=True)


def _check_value(value: Any, annotation: Any) -> Any:
    try:
        adapter = TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value
    # As JSON, because YAML writes tuples, sets and enumerations as lists or texts.
    return adapter.validate_json(json.dumps(value), strict=True)


class _TraceFrame(NamedTuple):
    """A frame in the text of a traceback."""

    file: str
    line: int
    function: str
    source: str

    @property
    def place(self) -> str:
        """`my_rewards.py:12`: relative to the working directory where it lies there."""
        path = Path(self.file)
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{self.line}"


def find_own_frame(trace: str) -> _TraceFrame | None:
    """Find the last frame of people's own code: no file of Coalign, of an installed package or of Python."""
    installed = (_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")
    for frame in reversed(_list_frames(trace)):
        if not frame.file.startswith(installed) and "site-packages" not in frame.file:
            return frame
    return None


def find_last_frame(trace: str) -> _TraceFrame | None:
    """Find the last frame in the text of a traceback."""
    return next(reversed(_list_frames(trace)), None)


def _list_frames(trace: str) -> list[_TraceFrame]:
    return [_TraceFrame(file, int(line), function, source) for file, line, function, source in _FRAME.findall(trace)]
