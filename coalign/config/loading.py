"""From a YAML file to a validated RunConfig, with every problem found told at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from glob import iglob
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, UnsupportedInterpolationType
from pydantic import ValidationError

from coalign.config.errors import (
    ConfigError,
    ConfigLocation,
    ConfigProblem,
    Conflict,
    Key,
    KeyLocations,
    describe_error,
    format_value,
    parse_key,
    suggest,
)
from coalign.config.introspect import find_input, find_type, is_nullable, list_keys
from coalign.config.layers import (
    ConfigLayer,
    apply_override,
    drop_foreign_arguments,
    expand_shorthands,
    merge_layers,
    read_file,
    read_mapping,
    set_key,
    suggest_file,
)
from coalign.config.schema import InputPath, RunConfig, Section
from coalign.config.yaml_reader import parse_scalar

THIS = "<this>"  # where a section's own keys stand among the names that references know
Defaults = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
Overrides = Sequence[str] | Mapping[str, Any]


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Overrides = (),
    defaults: Defaults = MappingProxyType({}),
) -> RunConfig:
    """Read, merge, resolve and validate the configuration of a run.

    ``source`` is a YAML file, or a mapping of the same shape. ``overrides`` are ``key=value`` with dotted keys
    (``data.train[0].weight`` inside a list) and YAML values, or a mapping of dotted keys; the value replaces what is
    there. A mapping may hold functions and classes in place of their names. ``defaults`` lies beneath the file, in the
    shape of the YAML; a callable gets the algorithm's name and raises ValueError if there is none of that name.

    In order: `include`d files (relative to the file, later wins, lists replace), the file, the overrides; the defaults
    beneath; `like` between models; `${a.b}`, `${env:NAME}` and `${env:NAME,default}`. null stands for "not given" where
    it is no value of the key, so ``models.reference=null`` takes the model away. Where a file names another ``fn`` than
    the defaults, the arguments of the defaults are dropped. Data and model paths are looked up from the current
    directory, then from that of the YAML file; they must exist.

    Raises ConfigError with one line for every problem: file and line (or override), key, and what would be right.
    """
    layer, folder = read_layer(source, overrides)
    return load_run(layer, LoadContext(folder), defaults)


def load_section(
    schema: type[Section], source: str | os.PathLike[str] | Mapping[str, Any], overrides: Overrides = ()
) -> Any:
    """The configuration of something else than a run, of the given ``schema``; see `load` for the rest."""
    layer, folder = read_layer(source, overrides, schema)
    raise_problems(layer)
    return validate_layer(layer, LoadContext(folder))


@dataclass(frozen=True)
class LoadContext:
    """What a section stands in: the ``folder`` of its file, the ``names`` that its references know beside the section's
    own keys, and files that will have been ``made`` when they are needed."""

    folder: Path
    names: Mapping[str, Any] = field(default_factory=dict)
    made: Collection[str] = ()


def load_run(layer: ConfigLayer, outside: LoadContext, defaults: Defaults) -> RunConfig:
    """The run that a layer describes; see `load`."""
    raise_problems(layer)
    _lay_defaults(layer, defaults)
    _inherit(layer)
    config = validate_layer(layer, outside)
    config._places = layer.places
    return config


def validate_layer(layer: ConfigLayer, outside: LoadContext) -> Any:
    """The layer as an instance of its schema. Raises ConfigError with every problem there is."""
    data = _without_nulls(_resolved(layer, outside.names), (), layer.schema)
    layer.problems += _find_inputs(data, layer.schema, outside)
    failed = [problem.key for problem in layer.problems]
    try:
        config = layer.schema.model_validate(data)
    except ValidationError as error:
        found = [_problem(e, data, layer.schema) for e in error.errors()]
        layer.problems += [problem for problem in found if problem.key not in failed]
    raise_problems(layer)
    return config


def raise_problems(layer: ConfigLayer) -> None:
    """Raise ConfigError if the layer has problems."""
    if layer.problems:
        raise ConfigError(_placed(layer.problems, layer.places))


def check_names(config: RunConfig, allowed: Iterable[str]) -> None:
    """Refuse models that the recipe does not have. Raises ConfigError with the place and the nearest name."""
    allowed = list(allowed)
    unknown = [name for name in config.models if name not in allowed]
    if unknown:
        said = {
            name: f"; a model that judges takes part where the reward lists it: `reward: [{{model: {name}}}]`"
            if config.models[name].judge or config.models[name].head == "reward"
            else suggest(name, allowed)
            for name in unknown
        }
        raise ConfigError(
            config.places.on(ConfigProblem(("models", name), f"`{config.algorithm}` has no such model{said[name]}"))
            for name in unknown
        )


def read_layer(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Overrides, schema: type[Section] = RunConfig
) -> tuple[ConfigLayer, Path]:
    """What the person wrote, and the directory of the file."""
    if isinstance(source, Mapping):
        layer, folder = read_mapping(source, ConfigLocation("configuration"), schema), Path()
    else:
        layer, folder = read_file(Path(source), schema=schema), Path(source).parent
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            set_key(layer, parse_key(name), value, ConfigLocation(f"override '{name}'"))
        return layer, folder
    for override in overrides:
        apply_override(layer, override)
    return layer, folder


def _lay_defaults(layer: ConfigLayer, defaults: Defaults) -> None:
    """Put the recipe's defaults beneath what the person wrote."""
    name = _algorithm(layer)
    if name is None:
        return
    try:
        found = defaults(name) if callable(defaults) else defaults
    except ValueError as error:
        layer.problems.append(ConfigProblem(("algorithm",), str(error)))
        return
    base = read_mapping(found, ConfigLocation(f"defaults of {name}"))
    base.data = drop_foreign_arguments(base.data, layer.data)
    base.lay(layer)
    layer.data, layer.places = base.data, base.places


def _algorithm(layer: ConfigLayer) -> str | None:
    """The recipe's name, or None if there is none (validation or resolution will say so)."""
    try:
        name = OmegaConf.create(layer.data).get("algorithm")
    except OmegaConfBaseException:
        return None
    return name if isinstance(name, str) else None


def _inherit(layer: ConfigLayer) -> None:
    """Fill in what models take from others by `like`."""
    models = layer.data.get("models")
    done: set[str] = set()
    for name in models if isinstance(models, dict) else ():
        _take(layer, models, name, done, ())


def _take(layer: ConfigLayer, models: dict[str, Any], name: str, done: set[str], trail: tuple[str, ...]) -> None:
    model = models[name]
    source = model.get("like") if isinstance(model, dict) else None
    if name in done or not isinstance(source, str):
        return
    trail = (*trail, name)
    key: Key = ("models", name, "like")
    if source in trail:
        circle = " → ".join([*trail[trail.index(source) :], source])
        layer.problems.append(ConfigProblem(("models", source, "like"), f"models are like each other: {circle}"))
    elif models.get(source) is None:
        others = [other for other in models if other != name]
        layer.problems.append(ConfigProblem(key, f"there is no model '{source}'{suggest(source, others)}"))
    elif isinstance(models[source], dict):  # validation refuses another kind
        _take(layer, models, source, done, trail)
        models[name] = merge_layers(drop_foreign_arguments(models[source], model, ("models", name)), model)
        layer.places.inherit(("models", source), ("models", name))
    done.add(name)


def _resolved(layer: ConfigLayer, names: Mapping[str, Any]) -> dict[str, Any]:
    """The data with every reference replaced by its value; one that has none is reported and becomes null."""
    tree = OmegaConf.create({**layer.data, **names, THIS: layer.data})
    data = deepcopy(layer.data)
    for key, text in [(key, text) for key, text in _texts(data, ()) if "${" in text]:
        parent = _follow(data, key[:-1])
        try:
            value = _follow(tree, (THIS, *key))
            parent[key[-1]] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            layer.problems.append(ConfigProblem(key, _unresolved(text, error)))
            parent[key[-1]] = None
    return expand_shorthands(data, (), layer.schema)


def _texts(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, (*key, name))


def _follow(value: Any, key: Key) -> Any:
    for part in key:
        value = value[part]
    return value


def _unresolved(text: str, error: OmegaConfBaseException) -> str:
    reason = str(error).splitlines()[0].partition("while resolving interpolation: ")[2] or str(error).splitlines()[0]
    if isinstance(error, InterpolationKeyError):
        reason = reason.replace("Interpolation key", "there is no key").removesuffix(" not found")
    elif isinstance(error, UnsupportedInterpolationType):
        reason = "only ${key.of.this.file} and ${env:NAME,default} are known"
    elif "Recursive interpolation" in reason:
        reason = "refers to itself"
    return f"{format_value(text)}: {reason}"


def _environment(name: str, *default: Any) -> Any:
    """``${env:NAME,default}``: the variable's value, read as YAML."""
    if name in os.environ:
        return parse_scalar(os.environ[name])
    if not default:
        raise ValueError(f"the environment variable {name} is not set; set it, or write ${{env:{name},default}}")
    return default[0]


OmegaConf.register_resolver("env", _environment, replace=True)


def _without_nulls(value: Any, key: Key, schema: type[Section]) -> Any:
    """The data without the nulls of keys that cannot be null: there null says "not given"."""
    if isinstance(value, list):
        return [_without_nulls(item, (*key, index), schema) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {
        name: item for name, item in value.items() if item is not None or is_nullable(find_type((*key, name), schema))
    }
    return {name: _without_nulls(item, (*key, name), schema) for name, item in kept.items()}


def _problem(error: Any, data: Any, schema: type[Section]) -> ConfigProblem:
    """A pydantic error as a problem."""
    key, message = _as_written(error["loc"], data), describe_error(error)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Conflict):
        key += cause.key
    elif error["type"] == "extra_forbidden":
        message = f"unknown key{suggest(str(key[-1]), list_keys(key[:-1], schema))}"
    return ConfigProblem(key, message)


def _as_written(key: Key, data: Any) -> Key:
    """The key without the index 0 of an item that stands without the brackets of its list."""
    written: list[str | int] = []
    for part in key:
        if isinstance(part, int) and not isinstance(data, list):
            continue
        written.append(part)
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list):
            data = data[part] if part < len(data) else None
    return tuple(written)


def _find_inputs(data: dict[str, Any], schema: type[Section], outside: LoadContext) -> Iterator[ConfigProblem]:
    """Point the paths that exist only beside the YAML file there; yields a problem for each that exists nowhere."""
    for key, text in list(_texts(data, ())):
        wanted = find_input(key, schema)
        if wanted is None or _exists(Path(text)) or text in outside.made:
            continue
        if _exists(outside.folder / text):
            _follow(data, key[:-1])[key[-1]] = str(outside.folder / text)
        else:
            yield ConfigProblem(key, _nowhere(text, wanted, outside.folder))


def _exists(path: Path) -> bool:
    """Whether there is such a file, or any that the pattern fits."""
    return path.exists() or any(iglob(str(path), recursive=True))


def _nowhere(text: str, wanted: InputPath, folder: Path) -> str:
    tried = list(dict.fromkeys([Path(text).absolute(), (folder / text).absolute()]))
    suggestion = next((found for path in tried if (found := suggest_file(path))), "")
    return f"there is no {wanted.kind} '{text}' (looked for {' and '.join(map(str, tried))}){suggestion}"


def _placed(problems: Iterable[ConfigProblem], places: KeyLocations) -> list[ConfigProblem]:
    """The problems with their places, each told once (what a model takes by `like` is wrong where it was written)."""
    told: dict[tuple[Any, ...], ConfigProblem] = {}
    for problem in map(places.on, problems):
        told.setdefault((problem.place, problem.key[-1:], problem.message), problem)
    return sorted(told.values(), key=lambda p: (p.place.source, p.place.line or 0) if p.place else ("", 0))
