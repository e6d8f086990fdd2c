"""Processors and memory that a process may use: affinity, quotas of containers, and how its threads wait."""

import os
import subprocess
import sys

import pytest

from coalign.processes import host
from coalign_graders import processors

V1, PERIOD = "cpu__box", "100000"  # us


QUOTAS = [  # membership, files, processors
    ("0::/\n", {}, 64),
    ("0::/\n", {"cpu_dot_max": "max 100000\n"}, 64),
    ("0::/\n", {"cpu_dot_max": "200000 100000\n"}, 2),
    ("0::/\n", {"cpu_dot_max": "250000 100000\n"}, 2),
    ("0::/\n", {"cpu_dot_max": "50000 100000\n"}, 1),
    ("0::/\n", {"cpu_dot_max": "nonsense\n"}, 64),
    ("0::/\n", {"cpu_dot_max": "12800000 100000\n"}, 64),
    ("0::/pod/box\n", {"pod__box__cpu_dot_max": "max 100000\n", "pod__cpu_dot_max": "300000 100000\n"}, 3),
    ("4:cpu,cpuacct:/box\n", {f"{V1}__cpu_dot_cfs_quota_us": "400000", f"{V1}__cpu_dot_cfs_period_us": PERIOD}, 4),
    ("4:cpu,cpuacct:/box\n", {"cpu__cpu_dot_cfs_quota_us": "-1", "cpu__cpu_dot_cfs_period_us": PERIOD}, 64),
    ("4:memory:/box\n", {"cpu__cpu_dot_cfs_quota_us": "500000", "cpu__cpu_dot_cfs_period_us": PERIOD}, 5),
]


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """An empty tree of control groups on a machine of 64 processors."""
    for module in (host, processors):
        monkeypatch.setattr(module, "CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(module, "MEMBERSHIP", tmp_path / "membership")
        monkeypatch.setattr(module, "count_visible_processors", lambda: 64)

    def write(membership, **files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize(("membership", "files", "expected"), QUOTAS)
def test_processors_are_the_fewer_of_affinity_and_quota(groups, membership, files, expected):
    groups(membership, **files)
    assert host.count_processors() == processors.count_processors() == expected
    environment = {}
    host.prepare_threads(environment)
    assert environment.get("OMP_NUM_THREADS") == (None if expected == 64 else str(expected))


def test_memory_of_the_groups_around(groups):
    groups("0::/pod/box\n", pod__box__memory_dot_max="max\n", pod__memory_dot_max="1000\n", memory_dot_max="2000")
    assert sorted(host.list_memory_limits()) == [1000, 2000]


def test_what_a_person_set_is_kept(groups):
    groups("0::/\n", cpu_dot_max="200000 100000")
    chosen = {"OMP_NUM_THREADS": "7", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "200"}
    environment = dict(chosen)
    host.prepare_threads(environment)
    assert environment == chosen
    environment = {"OMP_WAIT_POLICY": "active"}
    host.prepare_threads(environment)
    assert environment == {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "2"}


def test_importing_coalign_sets_it_before_torch_is_loaded():
    code = "import coalign, os, sys; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    clean = {name: text for name, text in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == host.SPINS
