"""What the keepers of several nodes do with their files, and who holds what: without Ray, all in one process."""

import os
import resource

import numpy as np
import pytest

from coalign.cluster.survivors import keeper as keeper_module
from coalign.cluster.survivors.keeper import (
    Keeper,
    NodePath,
    StoredStep,
    find_missing,
    find_partners,
    merge_steps,
    name_folder,
)
from coalign.run_files.checkpoints import RUN, format_manifest, is_spread, parse_manifest

BLOCK = 1000
NODES = ("a" * 56, "b" * 56, "c" * 56)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(keeper_module, "BLOCK", BLOCK)


@pytest.fixture
def base(tmp_path):
    return str(tmp_path / "memory" / "coalign-0-run")


def start(base, *nodes):
    found = {node: Keeper(base, node, "/no/run", NODES) for node in nodes}
    for each in found.values():
        each.open()
    return found


def fill(base, node, directory, **files):
    for name, size in files.items():
        path = os.path.join(name_folder(base, node), directory, "models", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(np.random.default_rng(size).bytes(size))


def send(source, target, path, size):
    target.write(path, (source.read(path, offset) for offset in range(0, size, BLOCK)))


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 17])
def test_a_file_arrives_as_it_was_sent(base, size):
    keepers = start(base, *NODES[:2])
    fill(base, NODES[0], "step_1", shard=size)
    send(keepers[NODES[0]], keepers[NODES[1]], "step_1/models/shard", size)
    there, here = (os.path.join(name_folder(base, node), "step_1/models/shard") for node in NODES[:2])
    with open(there, "rb") as sent, open(here, "rb") as received:
        assert sent.read() == received.read()
    assert keepers[NODES[1]].list_files("step_1") == {"models/shard": size}


def test_a_node_without_memory_keeps_no_half_of_a_file(base):
    keepers = start(base, *NODES[:2])
    fill(base, NODES[0], "step_1", shard=5 * BLOCK)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            send(keepers[NODES[0]], keepers[NODES[1]], "step_1/models/shard", 5 * BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert keepers[NODES[1]].list_files("step_1") == {}


@pytest.mark.parametrize(
    ("nodes", "expected"), [("", {}), ("a", {}), ("ab", {"a": "b", "b": "a"}), ("acd", {"a": "c", "c": "d", "d": "a"})]
)
def test_the_next_node_holds_the_copy(nodes, expected):
    assert find_partners([*nodes]) == expected


def test_what_a_partner_lacks():
    written = {"a": {"x": 1, "state": 5}, "b": {"y": 2, "x": 1}, "c": {}}
    assert find_missing(written) == {"a": {"state": 5}, "b": {"y": 2, "x": 1}, "c": {}}
    with pytest.raises(OSError, match="several nodes have written x, with 1 and"):
        find_missing({"a": {"x": 1}, "b": {"x": 2}})


MANIFEST = format_manifest({"state.json": 3, "models/t/0": 10, "models/t/1": 20}, "one")
OTHER = format_manifest({"state.json": 3, "models/t/0": 10, "models/t/1": 20}, "two")
FIRST, SECOND = {"state.json": 3, "models/t/0": 10}, {"models/t/1": 20}


def stored(*files, manifest=MANIFEST):
    return {4: StoredStep(manifest, {name: size for each in files for name, size in each.items()})}


def test_any_one_of_three_nodes_may_be_lost():
    held = {"a": stored(FIRST), "b": stored(SECOND, FIRST), "c": stored(SECOND)}
    for lost in held:
        assert not merge_steps({node: steps for node, steps in held.items() if node != lost})[4].lost
    assert merge_steps({"c": held["c"]})[4].lost == ["state.json", "models/t/0"]
    assert merge_steps({}) == {}


def test_files_of_two_drivers_do_not_count_together():
    assert merge_steps({"a": stored(FIRST), "b": stored(SECOND, manifest=OTHER)})[4].lost == ["models/t/1"]
    whole = stored(FIRST, SECOND, manifest=OTHER)
    found = merge_steps({"a": stored(FIRST), "b": whole, "c": stored(SECOND, manifest=OTHER)})[4]
    assert found.manifest == OTHER and not found.lost and found.holders["models/t/1"] == ["b", "c"]


def test_a_file_that_is_cut_and_a_damaged_manifest_do_not_count():
    cut = {"models/t/1": 19}
    assert merge_steps({"a": stored(FIRST, cut)})[4].lost == ["models/t/1"]
    assert merge_steps({"a": {4: StoredStep("{", {})}, "b": stored(FIRST, SECOND)})[4].lost == []
    assert merge_steps({"a": {4: StoredStep("[]", {})}}) == {}


def test_a_node_gets_what_it_lacks_from_those_that_have_sent_least():
    spread = merge_steps({"a": stored(FIRST, SECOND), "b": stored(FIRST, SECOND), "c": stored(FIRST)})[4]
    assert spread.plan_fetches("c") == {"a": SECOND}
    assert spread.plan_fetches("a") == {}
    plan = spread.plan_fetches("new", "models/t")
    assert plan == {"a": {"models/t/0": 10}, "b": {"models/t/1": 20}}
    assert spread.plan_fetches("new", without="models") == {"a": {"state.json": 3}}
    assert spread.plan_fetches("new", "models/tt") == {}


def test_a_checkpoint_is_sealed_kept_and_deleted(base):
    [kept] = start(base, NODES[0]).values()
    folder = name_folder(base, NODES[0])
    assert os.stat(folder).st_mode & 0o777 == 0o700 and os.readlink(os.path.join(folder, RUN)) == "/no/run"
    for step in (1, 2, 3):
        fill(base, NODES[0], f".writing-step_{step}", shard=step)
        kept.seal(f".writing-step_{step}", step, format_manifest({"models/shard": step}, str(step)))
    assert {step: own.files["models/shard"] for step, own in kept.list_steps().items()} == {1: 1, 2: 2, 3: 3}
    fill(base, NODES[0], ".writing-step_4", shard=1)
    kept.keep([2, 3])
    kept.open()
    assert sorted(os.listdir(folder)) == [RUN, "step_2", "step_3"]
    fill(base, NODES[0], ".writing-step_3", shard=9)  # made again after another driver's
    kept.seal(".writing-step_3", 3, format_manifest({"models/shard": 9}, "again"))
    assert kept.list_steps()[3].files["models/shard"] == 9
    kept.seal(".writing-step_5", 5, MANIFEST)  # a node that had nothing to write
    assert parse_manifest(kept.list_steps()[5].manifest) == parse_manifest(MANIFEST)
    kept.clear()
    assert not os.path.exists(folder)


def test_further_files_come_to_those_of_the_same_checkpoint_alone(base, tmp_path):
    [kept] = start(base, NODES[0]).values()
    fill(base, NODES[0], "step_4", shard=10)
    kept.open_step(4, MANIFEST)  # what is there has no manifest
    assert [*kept.list_files("step_4")] == ["manifest.json"]
    fill(base, NODES[0], "step_4", shard=10)
    kept.open_step(4, MANIFEST)
    assert kept.list_files("step_4")["models/shard"] == 10
    kept.open_step(4, OTHER)
    assert [*kept.list_files("step_4")] == ["manifest.json"]
    assert is_spread(tmp_path / "memory" / os.path.basename(name_folder(base, NODES[0])) / "step_4")


def test_what_a_lost_node_of_this_machine_has_left_is_deleted(base, tmp_path):
    start(base, *NODES)
    (tmp_path / "memory" / "coalign-0-run2-aaaa").mkdir()  # another run's
    Keeper(base, NODES[0], "/no/run", NODES[:2])
    there = {path.name for path in (tmp_path / "memory").iterdir()}
    assert there == {*(os.path.basename(name_folder(base, node)) for node in NODES[:2]), "coalign-0-run2-aaaa"}


def test_a_path_is_another_one_on_each_node(base):
    path = NodePath(base, "step_4/models/t")
    assert path.find(NODES[0]) == f"{name_folder(base, NODES[0])}/step_4/models/t" != path.find(NODES[1])


def test_a_folder_of_another_user_is_refused(base, monkeypatch):
    [kept] = start(base, NODES[0]).values()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(PermissionError, match="belongs to another user"):
        kept.open()
