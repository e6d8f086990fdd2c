"""The same tests on both clusters: `cluster` is shared, `make(models, **runtime)` starts one for a single test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from coalign.cluster.base import Cluster, start_cluster
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.roles import Context

HERE = "tests.cluster.modules"


@pytest.fixture(scope="package")
def ray_here() -> Iterator[None]:
    """One Ray for all tests; clusters that find it running do not end it."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # else they starve beside another busy process
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture(scope="package", params=["local", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster with `policy`, `judge` and `trainer`, shared by tests that leave it as it is."""
    if request.param == "ray":
        request.getfixturevalue("ray_here")
    for build in _maker(request.param):
        yield build(
            {
                m: {"module": c}
                for m, c in (("policy", "EchoModule"), ("judge", "SumModule"), ("trainer", "GroupModule"))
            }
        )


@pytest.fixture(params=["local", "ray"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """``make({"name": {"module": "SumModule", ...}}, call_timeout=...)``: a cluster with these models running."""
    if request.param == "ray":
        request.getfixturevalue("ray_here")
    yield from _maker(request.param)


@pytest.fixture
def make_local() -> Iterator[Callable[..., Cluster]]:
    yield from _maker("local")


@pytest.fixture
def make_ray(ray_here: None) -> Iterator[Callable[..., Cluster]]:
    yield from _maker("ray")


def _maker(kind: str) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def build(models: dict[str, dict[str, object]], **runtime: object) -> Cluster:
        configs = {n: ModelConfig(**(m | {"module": f"{HERE}:{m['module']}"})) for n, m in models.items()}
        settings = RuntimeConfig(**({"cluster": kind, "threads": 1, "call_timeout": 60.0} | runtime))
        cluster = start_cluster(RunConfig(algorithm="none", models=configs, runtime=settings))
        clusters.append(cluster)
        for name, config in configs.items():
            cluster.spawn(name, config, Context(model=name, threads=1))
        return cluster

    yield build
    for cluster in clusters:
        cluster.shutdown()


@pytest.fixture
def prompts() -> Batch:
    """Seven sequences of different lengths in five groups."""
    lengths = torch.tensor([3, 1, 4, 1, 5, 2, 6])
    return Batch(lengths).with_(
        tokens=torch.arange(int(lengths.sum()), dtype=torch.int32),
        group=torch.tensor([0, 0, 1, 2, 2, 3, 4]),
        rows=[{"id": i} for i in range(7)],
    )
