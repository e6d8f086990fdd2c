"""Reads the YAML of a pipeline: first its header, and each stage once the names that it refers to are known."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coalign.config.errors import ConfigError, ConfigLocation, ConfigProblem, Conflict, Key, suggest
from coalign.config.layering import ConfigLayer, apply_override, expand_shorthands, read_includes
from coalign.config.loading import Defaults, LoadContext, load_run, raise_problems, read_layer, validate_layer
from coalign.config.schema import Section
from coalign_serve.config.stages import STAGES, PipelineConfig


@dataclass(frozen=True)
class PipelineFile:
    """A pipeline's configuration: its validated ``header``, and the settings of each stage, validated on demand."""

    header: PipelineConfig
    layer: ConfigLayer
    source: Path

    def settings(self, index: int, names: Mapping[str, Any], planned: Collection[str], defaults: Defaults) -> Section:
        """Validate the settings of a stage: a GenerateConfig, ScoreConfig, SelectConfig or RunConfig.

        ``names``: what references can refer to (model, round, stages). ``planned``: files that need not exist yet.
        ``defaults``: those of the recipes, see `coalign.config.load`. ConfigError as in `load`.
        """
        stage_type = self.header.stages[index].task
        key: Key = ("stages", index, stage_type)
        data, locations = self.layer.data["stages"][index][stage_type], self.layer.locations.below(key)
        outside = LoadContext(self.source.parent, names, planned)
        with self.located(index):
            if stage_type == "train":
                return load_run(read_includes(self.source, dict(data), locations), outside, defaults)
            return validate_layer(ConfigLayer(data, locations, schema=STAGES[stage_type]), outside)

    @contextmanager
    def located(self, index: int) -> Iterator[None]:
        """Add the location in the file to errors from inside: a ConfigError, or a Conflict of the settings."""
        key: Key = ("stages", index, self.header.stages[index].task)
        try:
            yield
        except ConfigError as error:
            problems = [self.layer.locations.on(replace(p, key=key + p.key)) for p in error.problems]
            raise ConfigError(problems) from error.__cause__
        except Conflict as error:
            raise ConfigError([self.layer.locations.on(ConfigProblem(key + error.key, error.message))]) from None


def load_pipeline(source: str | os.PathLike[str], overrides: Sequence[str] = ()) -> PipelineFile:
    """Read a pipeline and validate its header; ConfigError as in `load`.

    ``overrides`` name stages by number or by name (``stages.train.runtime.steps=5``).
    """
    layer, folder = read_layer(source, (), PipelineConfig)
    raise_problems(layer)
    if "algorithm" in layer.data and "stages" not in layer.data:
        message = f"makes this file a run, not a pipeline: start it with `coalign train {source}`"
        raise ConfigError([layer.locations.on(ConfigProblem(("algorithm",), message))])
    _expand_stages(layer, folder)
    for override in overrides:
        apply_override(layer, _number_stage(override, _stages(layer)))
    raise_problems(layer)
    _expand_stages(layer, folder)
    header = replace(layer, data=_without_settings(layer), problems=[])
    return PipelineFile(validate_layer(header, LoadContext(folder)), layer, Path(source))


def _stages(layer: ConfigLayer) -> list[dict[str, Any]]:
    """The stages, empty in place of those that are no mapping; validation refuses these."""
    stages = layer.data.get("stages")
    return [stage if isinstance(stage, dict) else {} for stage in stages] if isinstance(stages, list) else []


def _expand_stages(layer: ConfigLayer, folder: Path) -> None:
    """Expand the short forms of stages (`score: math`, `train: sft.yaml`), so that overrides can reach inside."""
    for stage in _stages(layer):
        for stage_type, schema in STAGES.items():
            if stage_type == "train" and isinstance(stage.get(stage_type), str):
                path = Path(stage[stage_type])
                stage[stage_type] = {"include": os.path.abspath(path if path.exists() else folder / path)}
            elif stage_type in stage:
                stage[stage_type] = expand_shorthands(stage[stage_type], (), schema)


def _without_settings(layer: ConfigLayer) -> dict[str, Any]:
    """The data with only the names and types of the stages."""
    if not isinstance(layer.data.get("stages"), list):
        return layer.data
    stages = [
        {name: {} if name in STAGES and isinstance(item, dict) else item for name, item in stage.items()}
        if isinstance(stage, dict)
        else stage
        for stage in layer.data["stages"]
    ]
    return {**layer.data, "stages": stages}


def _number_stage(override: str, stages: Sequence[dict[str, Any]]) -> str:
    """Replace the stage's name in ``stages.train.runtime.steps=5`` by its number and type."""
    match = re.match(r"stages\.([A-Za-z]\w*)([.=].*)", override, re.DOTALL)
    if not match:
        return override
    types = [next((stage_type for stage_type in STAGES if stage_type in stage), "") for stage in stages]
    names = [stage.get("name") or stage_type for stage, stage_type in zip(stages, types, strict=True)]
    if match[1] not in names:
        problem = f"there is no stage '{match[1]}'{suggest(match[1], names)}"
        raise ConfigError([ConfigProblem(("stages",), problem, ConfigLocation(f"override '{override}'"))])
    index = names.index(match[1])
    return f"stages[{index}].{types[index]}{match[2]}"
