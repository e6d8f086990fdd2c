"""A pipeline's YAML: the header at once, each stage when the names that it refers to are known."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coalign.config.errors import ConfigError, Conflict, Key, Place, Problem, near
from coalign.config.layers import Layer, with_includes, written_out
from coalign.config.loading import Defaults, Outside, given, load_run, refuse, validated
from coalign.config.reading import parse
from coalign.config.schema import STAGES, PipelineConfig, Section


@dataclass(frozen=True)
class PipelineFile:
    """What a person wrote: ``header`` (validated, the stages' settings left out) and the settings of each stage."""

    header: PipelineConfig
    layer: Layer
    source: Path

    def settings(self, index: int, names: Mapping[str, Any], made: Collection[str], defaults: Defaults) -> Section:
        """The settings of a stage: GenerateConfig, ScoreConfig, SelectConfig or RunConfig.

        names: what its references know (model, round, stages). made: files that need not exist yet. defaults: of the
        recipes, see `coalign.config.load`. Raises ConfigError as `load` does.
        """
        kind = self.header.stages[index].kind
        key: Key = ("stages", index, kind)
        data, places = self.layer.data["stages"][index][kind], self.layer.places.below(key)
        outside = Outside(self.source.parent, names, made)
        with self.located(index):
            if kind == "train":
                data = {"include": os.path.abspath(self._beside(data))} if isinstance(data, str) else dict(data)
                return load_run(with_includes(self.source, data, places), outside, defaults)
            schema = STAGES[kind]
            return validated(Layer(written_out(data, (), schema), places, schema=schema), outside)

    @contextmanager
    def located(self, index: int) -> Iterator[None]:
        """Say of what rises inside (ConfigError, or a Conflict among the settings) where in the file it was written."""
        key: Key = ("stages", index, self.header.stages[index].kind)
        try:
            yield
        except ConfigError as error:
            problems = [self.layer.places.on(replace(p, key=key + p.key)) for p in error.problems]
            raise ConfigError(problems) from error.__cause__
        except Conflict as error:
            raise ConfigError([self.layer.places.on(Problem(key + error.key, error.message))]) from None

    def _beside(self, name: str) -> Path:
        """A file from the current directory, or else from that of the pipeline."""
        return Path(name) if Path(name).exists() else self.source.parent / name


def load_pipeline(source: str | os.PathLike[str], overrides: Sequence[str] = ()) -> PipelineFile:
    """Read a pipeline and validate what is not a stage's own. ``overrides`` name stages by number or by name
    (``stages.train.runtime.steps=5``). Raises ConfigError."""
    layer, folder = given(source, (), PipelineConfig)
    refuse(layer)
    layer, _ = given(source, [_numbered(text, layer.data.get("stages")) for text in overrides], PipelineConfig)
    refuse(layer)
    header = replace(layer, data=_without_settings(layer.data), problems=[])
    return PipelineFile(validated(header, Outside(folder)), layer, Path(source))


def is_pipeline(path: str | os.PathLike[str]) -> bool:
    """Whether a YAML file that can be read is one of a pipeline."""
    data, _ = parse(Path(path).read_text(encoding="utf-8"), str(path))
    return isinstance(data, dict) and "stages" in data


def _without_settings(data: dict[str, Any]) -> dict[str, Any]:
    stages = data.get("stages")
    if not isinstance(stages, list):
        return data
    bare = [
        {name: {} if name in STAGES and isinstance(item, dict | str) else item for name, item in stage.items()}
        if isinstance(stage, dict)
        else stage
        for stage in stages
    ]
    return {**data, "stages": bare}


def _numbered(override: str, stages: Any) -> str:
    """``stages.train.runtime.steps=5`` with the stage's number and kind for its name."""
    match = re.match(r"stages\.([A-Za-z]\w*)([.=].*)", override, re.DOTALL)
    if not match or not isinstance(stages, list):
        return override
    kinds = [next((k for k in STAGES if k in stage), "") if isinstance(stage, dict) else "" for stage in stages]
    names = [(isinstance(s, dict) and s.get("name")) or kind for s, kind in zip(stages, kinds, strict=True)]
    if match[1] not in names:
        problem = f"there is no stage '{match[1]}'{near(match[1], names)}"
        raise ConfigError([Problem(("stages",), problem, Place(f"override '{override}'"))])
    index = names.index(match[1])
    return f"stages[{index}].{kinds[index]}{match[2]}"
