"""Models, clusters and jobs that the planner's tests share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from coalign_plan.gpus import ClusterSpec
from coalign_plan.hf_config import read_model_size
from coalign_plan.job import JobShape, LengthDistribution, ModelWork, Parallelism
from coalign_plan.model_size import ModelSize

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CLUSTER = ClusterSpec.parse("4x8:H100")


@cache
def model(name: str) -> ModelSize:
    models = json.loads((BENCHMARKS / "data/planner/models.json").read_text(encoding="utf-8"))["models"]
    return read_model_size(models[name], name)


def trainer(name: str = "Qwen2.5-7B", data: int = 8, **settings) -> ModelWork:
    keys = {"tensor", "pipeline", "context", "expert", "sharding"} & set(settings)
    layout = {key: settings.pop(key) for key in keys}
    return ModelWork("trainer", "trainer", model(name), Parallelism(data=data, **layout), **settings)


def engine(name: str = "Qwen2.5-7B", data: int = 8, **settings) -> ModelWork:
    layout = {key: settings.pop(key) for key in ("tensor", "pipeline", "expert") if key in settings}
    return ModelWork("policy", "rollout", model(name), Parallelism(data=data, **layout), **settings)


def job(*works: ModelWork, **settings) -> JobShape:
    settings = {"prompts": 128, "samples": 8, "responses": LengthDistribution(1000, 8000)} | settings
    return JobShape(works or (engine(), trainer()), **settings)
