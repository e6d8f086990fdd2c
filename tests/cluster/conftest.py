"""The same tests on both clusters: `cluster` is shared, `make(models, **runtime)` starts one for a single test.

A process of Ray takes seconds to start: a test starts one only for what the shared cluster cannot show.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch

from coalign.cluster.choice import start_cluster
from coalign.cluster.cluster import Cluster
from coalign.config.schema import ModelConfig, RunConfig, RuntimeConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from tests.cluster.modules import SumModule

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


MODELS = {"policy": "SumModule", "judge": "SumModule", "trainer": "GroupModule"}


@pytest.fixture(scope="package")
def local_cluster() -> Iterator[Cluster]:
    for build in _maker("local"):
        yield build({name: {"module": module} for name, module in MODELS.items()})


@pytest.fixture(scope="package")
def ray_cluster(ray_here: None) -> Iterator[Cluster]:
    """Two replicas of a policy (that can score, too), one judge, a group of two ranks as trainer; all end with it."""
    processes = {"policy": 2, "judge": 1, "trainer": 2}
    for build in _maker("ray"):
        cluster = build({m: {"module": c, "num_process": processes[m]} for m, c in MODELS.items()})
        pids = [pid for model in cluster.models.values() for pid in model.run(find_pid).result()]
        yield cluster
        cluster.shutdown()
        wait_gone(pids)


@pytest.fixture(scope="package", params=["local", "ray"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """A cluster with `policy`, `judge` and `trainer`, shared by tests that leave it as it is."""
    return request.getfixturevalue(f"{request.param}_cluster")


def find_pid(module: object, store: object) -> int:
    return os.getpid()


def wait_gone(pids: list[int]) -> None:
    """Until these processes have ended; an error after 20 s."""
    deadline = time.monotonic() + 20.0
    while alive := [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.1)


@pytest.fixture(params=["local", "ray"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """``make({"name": {"module": "SumModule", ...}}, call_timeout=...)``: a cluster with these models running."""
    if request.param == "ray":
        request.getfixturevalue("ray_here")
    yield from _maker(request.param)


# For what a worker does wherever it runs: an actor's answer in error, whatever the call, is one and the same.
ON_RAY_SLOW = pytest.mark.parametrize("make", ["local", pytest.param("ray", marks=pytest.mark.slow)], indirect=True)


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
    SumModule.awake.set()  # else the threads of a local cluster are waited for
    for cluster in clusters:
        cluster.shutdown()
    SumModule.awake.clear()


@pytest.fixture
def prompts() -> Batch:
    """Seven sequences of different lengths in five groups."""
    lengths = torch.tensor([3, 1, 4, 1, 5, 2, 6])
    return Batch(lengths).with_(
        tokens=torch.arange(int(lengths.sum()), dtype=torch.int32),
        group=torch.tensor([0, 0, 1, 2, 2, 3, 4]),
        rows=[{"id": i} for i in range(7)],
    )
