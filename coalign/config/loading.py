"""Loads a YAML file as a validated RunConfig, and reports all problems at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from glob import iglob
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from pydantic import ValidationError

from coalign.companions import EXPLAINS, ask
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
from coalign.config.introspect import find_input, find_type, is_nullable, is_path
from coalign.config.layering import (
    ConfigLayer,
    apply_override,
    drop_foreign_arguments,
    escape_references,
    expand_shorthands,
    merge_layers,
    read_file,
    read_mapping,
    set_key,
    suggest_file,
    walk,
)
from coalign.config.schema import KEYS_OF_WEIGHTS, InputPath, RunConfig, Section
from coalign.config.secrets import remember_secret
from coalign.config.yaml_reader import MAX_BYTES, parse, parse_scalar
from coalign.files import read_bounded
from coalign.hub import is_hub_name
from coalign.hub_data import is_dataset, is_url

THIS = "<this>"  # key of the section's own data among the names that references can use
Defaults = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
Overrides = Sequence[str] | Mapping[str, Any]


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Overrides = (),
    defaults: Defaults = MappingProxyType({}),
    *,
    planned: bool = False,
    elsewhere: bool = False,
) -> RunConfig:
    """Read, merge, resolve and validate the configuration of a run.

    ``source`` is a YAML file, or a mapping of the same shape. ``overrides`` are ``key=value`` with dotted keys
    (``data.train[0].weight`` inside a list) and YAML values, or a mapping of dotted keys; each value replaces the old
    one. A mapping may hold functions and classes instead of their names. ``defaults`` has the shape of the YAML; a
    callable receives the algorithm's name and raises ValueError for an unknown one.

    Layers, from the bottom: defaults, `include`d files (relative to the file; later ones win, lists replace), the file,
    overrides. Then `like` between models is applied; `${a.b}`, `${env:NAME}` and `${env:NAME,default}` are resolved.
    null means "not given" where it is not a value of the key, so ``models.reference=null`` removes the model. If a file
    names another ``fn`` than the defaults, the defaults' arguments are dropped. Data and model paths must exist; they
    are relative to the current directory, or else to that of the YAML file. With ``planned``, a model that another run
    will make (`OUTPUT/model`) need not exist yet. With ``elsewhere``, absolute paths are those of other machines.

    ConfigError has one line per problem: file and line (or override), key, and the expected value.
    """
    layer, folder = read_layer(source, overrides)
    _refuse_other_files(layer, source)
    return load_run(layer, LoadContext(folder, allow_planned=planned, elsewhere=elsewhere), defaults)


def _refuse_other_files(layer: ConfigLayer, source: object) -> None:
    """Refuse files that are no run: those of other frameworks, empty ones, and pipelines."""
    if isinstance(layer.data.get("algorithm"), str) or isinstance(source, Mapping):
        return
    location = ConfigLocation(str(source))
    if message := _name_command(Path(str(source))):
        raise ConfigError([ConfigProblem((), message, location)])
    if layer.problems or "algorithm" in layer.data:
        return
    if not layer.data:
        raise ConfigError([ConfigProblem((), "is empty; `coalign init grpo` prints a run to begin with", location)])
    if "stages" in layer.data:
        message = f"makes this file a pipeline, not a run: start it with `coalign pipeline {source}`"
        raise ConfigError([layer.locations.on(ConfigProblem(("stages",), message))])


def _name_command(path: Path) -> str | None:
    """Say which command translates a file of another framework; None for other files."""
    try:
        text = read_bounded(path, MAX_BYTES).decode()
        if path.suffix in (".sh", ".bash", ".py"):
            return ask(EXPLAINS, "foreign_file", path, None, text)
        return ask(EXPLAINS, "foreign_file", path, parse(text, str(path))[0])
    except (OSError, ValueError):
        return None  # it is reported where it is read


def load_section(
    schema: type[Section], source: str | os.PathLike[str] | Mapping[str, Any], overrides: Overrides = ()
) -> Any:
    """Load a configuration of another ``schema`` than a run's; otherwise like `load`."""
    layer, folder = read_layer(source, overrides, schema)
    raise_problems(layer)
    return validate_layer(layer, LoadContext(folder))


@dataclass(frozen=True)
class LoadContext:
    """The surroundings of a section that is loaded."""

    folder: Path  # that of its file
    names: Mapping[str, Any] = field(default_factory=dict)  # for references, besides the section's own keys
    planned: Collection[str] = ()  # input files that need not exist yet
    allow_planned: bool = False  # nor need any model that a run will make
    elsewhere: bool = False  # absolute paths are those of other machines


def load_run(layer: ConfigLayer, context: LoadContext, defaults: Defaults) -> RunConfig:
    """Build the configuration of a run from a layer; see `load`."""
    raise_problems(layer)
    _lay_defaults(layer, defaults)
    _inherit(layer)
    config = validate_layer(layer, context)
    config._locations = layer.locations
    return config


def validate_layer(layer: ConfigLayer, context: LoadContext) -> Any:
    """Build an instance of the layer's schema. ConfigError with all problems."""
    data = _without_nulls(_resolve_text(layer, context.names), (), layer.schema)
    _expand_homes(data, layer.schema)
    layer.problems += _find_inputs(data, layer.schema, context)
    failed = [problem.key for problem in layer.problems]
    try:
        config = layer.schema.model_validate(data)
    except ValidationError as error:
        problems = [_problem(e, data, layer.schema) for e in error.errors()]
        layer.problems += [problem for problem in problems if problem.key not in failed]
    raise_problems(layer)
    return config


def raise_problems(layer: ConfigLayer) -> None:
    """Raise a ConfigError if the layer has problems."""
    if layer.problems:
        raise ConfigError(_locate_problems(layer.problems, layer.locations))


def check_names(config: RunConfig, allowed: Iterable[str]) -> None:
    """Refuse models that the recipe does not have: ConfigError with the location and the nearest name."""
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
            config.locations.on(ConfigProblem(("models", name), f"`{config.algorithm}` has no such model{said[name]}"))
            for name in unknown
        )


def read_layer(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Overrides, schema: type[Section] = RunConfig
) -> tuple[ConfigLayer, Path]:
    """Read the file or mapping and apply the overrides; also return the directory of the file."""
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
    """Put the recipe's defaults beneath the layer."""
    name = layer.data.get("algorithm")
    if isinstance(name, str) and "${" in name:
        try:
            name = OmegaConf.create(layer.data).get("algorithm")
        except OmegaConfBaseException:
            return  # the reference is reported when it is resolved
    if not isinstance(name, str):
        return  # validation reports it
    try:
        settings = defaults(name) if callable(defaults) else defaults
    except ValueError as error:
        layer.problems.append(ConfigProblem(("algorithm",), str(error)))
        return
    base = read_mapping(settings, ConfigLocation(f"defaults of {name}"))
    base.data = drop_foreign_arguments(base.data, layer.data)
    base.lay(layer)
    layer.data, layer.locations = base.data, base.locations


def _inherit(layer: ConfigLayer) -> None:
    """Add the keys that models take from others by `like`."""
    models = layer.data.get("models")
    if isinstance(models, dict):
        done: set[str] = set()
        for name in models:
            _inherit_model(layer, models, name, done, ())


def _inherit_model(
    layer: ConfigLayer, models: dict[str, Any], name: str, done: set[str], trail: tuple[str, ...]
) -> None:
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
        names = [model_name for model_name in models if model_name != name]
        layer.problems.append(ConfigProblem(key, f"there is no model '{source}'{suggest(source, names)}"))
    elif isinstance(models[source], dict):  # validation refuses other types
        _inherit_model(layer, models, source, done, trail)
        taken = drop_foreign_arguments(models[source], model, ("models", name))
        if (load := model.get("load")) and not _name_same_weights(layer, load, taken.get("load")):
            taken = _without_weights(layer, taken)
        models[name] = merge_layers(taken, model)
        layer.locations.inherit(("models", source), ("models", name))
    done.add(name)


def _without_weights(layer: ConfigLayer, model: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model without those that belong to its weights."""
    kept = {name: value for name, value in model.items() if name not in KEYS_OF_WEIGHTS}
    if isinstance(lora := _resolve_early(layer, kept.get("lora")), Mapping):
        kept["lora"] = {name: value for name, value in lora.items() if name != "load"}
    return kept


def _name_same_weights(layer: ConfigLayer, load: Any, inherited: Any) -> bool:
    load, inherited = _resolve_early(layer, load), _resolve_early(layer, inherited)
    return load == inherited or (isinstance(load, str) and isinstance(inherited, str) and Path(load) == Path(inherited))


def _resolve_early(layer: ConfigLayer, value: Any) -> Any:
    """Resolve a text that refers to another key; return the text if it cannot be resolved yet."""
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        resolved = OmegaConf.create({**layer.data, THIS: value})[THIS]
    except OmegaConfBaseException:
        return value  # it is reported when all references are resolved
    return OmegaConf.to_container(resolved) if OmegaConf.is_config(resolved) else resolved


_MISSING = "???"  # OmegaConf's mark of a value that is not known yet
_MAX_DEPTH = 20  # how often a reference may lead to another one
_MAX_LENGTH = 2**20  # characters of all resolved values together


def _resolve_text(layer: ConfigLayer, names: Mapping[str, Any]) -> dict[str, Any]:
    """Replace all references by their values; one that cannot be resolved is reported and becomes null.

    Each is resolved once, after those that it refers to; otherwise nested texts would grow without end.
    """
    data, resolved = deepcopy(layer.data), deepcopy(layer.data)
    waiting = [(key, text) for key, text in walk(data) if isinstance(text, str) and "${" in text]
    length, steps = 0, 0
    for key, _ in waiting:
        _put(resolved, key, _MISSING)
    while waiting and steps < _MAX_DEPTH and length <= _MAX_LENGTH:
        steps, done = steps + 1, []
        tree = OmegaConf.create({**resolved, **names, THIS: resolved})
        for key, text in waiting:
            try:
                value = _resolve_one(tree, key, text)
            except (InterpolationToMissingValueError, MissingMandatoryValue):
                continue
            except (OmegaConfBaseException, RecursionError) as error:
                layer.problems.append(ConfigProblem(key, _list_unresolved(text, error)))
                value = None
            done.append(key)
            length += sum(len(item) if isinstance(item, str) else 1 for _, item in walk(value))
            _put(data, key, value)
            _put(resolved, key, escape_references(value))
            if length > _MAX_LENGTH:
                break
        waiting = [(key, text) for key, text in waiting if key not in done]
        if not done:
            break
    reason = "references add up to too much" if length > _MAX_LENGTH or steps == _MAX_DEPTH else "refers to itself"
    for key, text in waiting:
        layer.problems.append(ConfigProblem(key, f"{format_value(text)}: {reason}"))
        _put(data, key, None)
    return expand_shorthands(data, (), layer.schema)


def _resolve_one(tree: Any, key: Key, text: str) -> Any:
    parent = _follow(tree, (THIS, *key[:-1]))
    parent[key[-1]] = text
    try:
        value = parent[key[-1]]
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value
    finally:
        parent[key[-1]] = _MISSING


def _put(data: Any, key: Key, value: Any) -> None:
    _follow(data, key[:-1])[key[-1]] = value


def _follow(value: Any, key: Key) -> Any:
    for name in key:
        value = value[name]
    return value


def _list_unresolved(text: str, error: Exception) -> str:
    reason = str(error).splitlines()[0].partition("while resolving interpolation: ")[2] or str(error).splitlines()[0]
    if isinstance(error, InterpolationKeyError):
        reason = reason.replace("Interpolation key", "there is no key").removesuffix(" not found")
    elif isinstance(error, UnsupportedInterpolationType):
        reason = "only ${key.of.this.file} and ${env:NAME,default} are known"
    return f"{format_value(text)}: {reason}"


def _environment(name: str, *default: Any) -> Any:
    """``${env:NAME,default}``: the variable's value, read as YAML."""
    if name in os.environ:
        value = parse_scalar(os.environ[name])
        remember_secret(name, os.environ[name], value)
        return value
    if not default:
        raise ValueError(f"the environment variable {name} is not set; set it, or write ${{env:{name},default}}")
    return default[0]


def _environment_text(name: str, *default: Any) -> Any:
    """``${oc.env:NAME,default}``: the variable's value as text; as OmegaConf's resolver, but it remembers secrets."""
    if name in os.environ:
        remember_secret(name, os.environ[name], os.environ[name])
        return os.environ[name]
    return _environment(name, *default)


OmegaConf.register_resolver("env", _environment, replace=True)
OmegaConf.register_resolver("oc.env", _environment_text, replace=True)


def _without_nulls(value: Any, key: Key, schema: type[Section]) -> Any:
    """Remove the nulls of keys that cannot be null, where null means "not given"."""
    if isinstance(value, list):
        return [_without_nulls(item, (*key, index), schema) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {
        name: item for name, item in value.items() if item is not None or is_nullable(find_type((*key, name), schema))
    }
    return {name: _without_nulls(item, (*key, name), schema) for name, item in kept.items()}


def _problem(error: Any, data: Any, schema: type[Section]) -> ConfigProblem:
    """Convert a pydantic error."""
    key, message = _as_written(error["loc"], data), describe_error(error)
    cause = error.get("ctx", {}).get("error")
    if key == ("kl", "fn") and error["type"] == "missing":
        message += "; `kl: {fn: FixedKL, coef: 0.1}` is a penalty in the reward, and loss.kl_coef a term of the loss"
    elif isinstance(cause, Conflict):
        key += cause.key
    elif error["type"] == "extra_forbidden":
        message = _correct(key, error["input"], schema)
    elif key == ("algorithm",) and error["type"] == "missing":
        message += "; name a recipe, such as `algorithm: grpo` (`coalign recipes` lists them)"
    elif key == ("algorithm",) and isinstance(error["input"], dict):
        message = ask(EXPLAINS, "foreign_key", key, error["input"]) or message
    return ConfigProblem(key, message)


def _correct(key: Key, value: Any, schema: type[Section]) -> str:
    """Say what an unknown key is called, here or in this version."""
    from coalign.config.nearest_key import describe_renaming, find_elsewhere, suggest_key  # for mistakes alone

    if renamed := describe_renaming(key):
        return renamed
    near = find_elsewhere(key, value, schema)
    if near and not (schema is RunConfig and ask(EXPLAINS, "exact_foreign_key", key, value)):
        return f"unknown key{near}"
    translated = ask(EXPLAINS, "foreign_key", key, value) if schema is RunConfig else None
    return translated or f"unknown key{suggest_key(key, value, schema)}"


def _as_written(key: Key, data: Any) -> Key:
    """Remove the index 0 of a single list item that was written without brackets."""
    written: list[str | int] = []
    for name in key:
        if isinstance(name, int) and not isinstance(data, list):
            continue
        written.append(name)
        if isinstance(data, dict):
            data = data.get(name)
        elif isinstance(data, list):
            data = data[name] if isinstance(name, int) and name < len(data) else None
    return tuple(written)


def _expand_homes(data: dict[str, Any], schema: type[Section]) -> None:
    """Expand `~` at the beginning of paths, as a shell does."""
    for key, text in list(walk(data)):
        if isinstance(text, str) and text.startswith("~") and is_path(key, schema):
            _put(data, key, os.path.expanduser(text))


def _find_inputs(data: dict[str, Any], schema: type[Section], context: LoadContext) -> Iterator[ConfigProblem]:
    """Resolve input paths that exist only relative to the YAML file; yield a problem for each that does not exist."""
    for key, text in list(walk(data)):
        required = find_input(key, schema) if isinstance(text, str) else None
        if required is None or _exists(Path(text)) or text in context.planned:
            continue
        if context.elsewhere and os.path.isabs(text):
            continue
        if _exists(context.folder / text):
            _follow(data, key[:-1])[key[-1]] = str(context.folder / text)
            continue
        is_remote_data = required.content == "data" and (is_dataset(text) or is_url(text))
        is_planned = context.allow_planned and Path(text).name == "model"
        if not is_remote_data and not (required.content == "model" and (is_hub_name(text) or is_planned)):
            yield ConfigProblem(key, _nowhere(text, required, context.folder))


def _exists(path: Path) -> bool:
    """Whether the file exists, or any file that matches the pattern; a name that is too long names none."""
    return os.path.exists(path) or any(iglob(str(path), recursive=True))


def _nowhere(text: str, required: InputPath, folder: Path) -> str:
    if text.startswith("<") and text.endswith(">"):
        return f"{text} is still to be filled in"
    tried = list(dict.fromkeys([Path(text).absolute(), (folder / text).absolute()]))
    suggestion = next((hint for path in tried if (hint := suggest_file(path))), "")
    if required.content == "model" and (page := re.match(r"https?://[^/]+/([\w.-]+/[\w.-]+)", text)):
        return f"'{text}' is the address of a page; the name of its model is `{page[1]}`"
    input_type = {"model": "directory", "data": "file"}.get(required.content, required.content)
    return f"there is no {input_type} '{text}' (looked for {' and '.join(map(str, tried))}){suggestion}"


def _locate_problems(problems: Iterable[ConfigProblem], locations: KeyLocations) -> list[ConfigProblem]:
    """Add locations to problems and drop duplicates: a value taken by `like` is wrong only where it was written."""
    unique: dict[tuple[Any, ...], ConfigProblem] = {}
    for problem in map(locations.on, problems):
        path, message = problem.key, problem.message
        if path[:1] == ("models",) and len(path) > 2:  # a correction names the model, too
            message = message.replace(f"'models.{path[1]}.", "'models.NAME.")
        unique.setdefault((problem.location, path[-1:], message), problem)
    return sorted(unique.values(), key=lambda p: (p.location.source, p.location.line or 0) if p.location else ("", 0))
