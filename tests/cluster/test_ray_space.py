"""Ray without a token, too old, or out of space is named before it hangs."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pytest

from coalign.cluster.ray.space import MIB, StoreSpace, _check_ray_version, describe_open_cluster

DiskUse = namedtuple("DiskUse", "total used free")


@pytest.mark.parametrize("version", ["2.9.3", "2.52.1", "2.59.9"])
def test_an_old_ray_is_refused(version):
    with pytest.raises(ValueError, match=rf"ray {version} is installed, and Coalign needs ray >= 2.60.*coalign\[ray\]"):
        _check_ray_version(version)


@pytest.mark.parametrize("version", ["2.60.0", "2.61.2", "3.0.0.dev0"])
def test_a_ray_that_asks_for_a_token_is_taken(version):
    _check_ray_version(version)


def test_an_old_ray_ends_a_run_before_it_is_imported(monkeypatch):
    from coalign.cluster import choice as base
    from coalign.cluster.ray import space
    from coalign.config.schema import RunConfig, RuntimeConfig

    monkeypatch.setattr(space, "version", {"ray": "2.40.0"}.__getitem__)
    with pytest.raises(ValueError, match=r"ray 2.40.0 is installed"):
        base.start_cluster(RunConfig(algorithm="none", models={}, runtime=RuntimeConfig(cluster="ray")))


def test_an_open_cluster_is_named_with_what_closes_it():
    assert "the Ray cluster at 10.0.0.1:6379 asks for no token" in describe_open_cluster("10.0.0.1:6379")
    assert "RAY_AUTH_MODE=token" in describe_open_cluster("10.0.0.1:6379")
    assert "that was started here asks for no token" in describe_open_cluster(None)
    assert "without RAY_AUTH_MODE=disabled" in describe_open_cluster(None)


@pytest.mark.parametrize(
    ("free", "payload", "can"), [(100, 9, True), (100, 10, False), (90, 0, False), (91, 0, True), (10, 0, False)]
)
def test_a_store_can_spill_onto_what_is_free_below_ray_s_limit(monkeypatch, free, payload, can):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUse(200 * MIB, (200 - free) * MIB, free * MIB))
    assert StoreSpace("host", 80 * MIB, 48 * MIB, "/spill").can_spill(payload * MIB) == can


def test_a_full_store_is_described_with_sizes_and_what_to_set(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUse(60 * MIB, 60 * MIB, 0))
    text = StoreSpace("host", 80 * MIB, 48 * MIB, "/spill").describe()
    assert "on node host is full: its 80 MiB of memory" in text and "48 MiB were spilled to /spill" in text
    assert "0 of 60 MiB left" in text and "--object-store-memory=BYTES --object-spilling-directory=DIRECTORY" in text


def test_the_disk_of_another_machine_is_taken_to_have_space(tmp_path):
    assert StoreSpace("host", 80, 0, str(tmp_path / "not here")).can_spill(1)
