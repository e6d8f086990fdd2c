"""Checkpoints in the memory of several nodes, all of them in this process: which are whole, and where a run goes on.

tests/chaos/test_keepers.py has Ray, and loses real nodes.
"""

import errno
import os
import shutil
from contextlib import nullcontext

import pytest

pytest.importorskip("ray")
from coalign.cluster.cluster import Cluster
from coalign.cluster.local import LocalCluster
from coalign.cluster.survivors.keeper import Keeper, KeeperLost, NodePath, has_keepers, name_folder
from coalign.cluster.survivors.keepers import Keepers
from coalign.engine.engine import Trainer
from coalign.engine.hooks.checkpoint_folder import Checkpoints
from coalign.engine.hooks.recovery import NodeCheckpoints, find_newest
from coalign.files import report_written
from coalign.run_files.checkpoints import CorruptCheckpoint, name_memory_folder
from tests.engine.test_recovery import (  # noqa: F401 (fixtures)
    FilesOfALostProcess,
    configure,
    end_driver,
    lose,
    memory,
    replaced,
    steps,
    undisturbed,
)
from tests.runs import run, weights_hash

IDS = ["", "b" * 56, "c" * 56]  # workers of this process are on the first one


class LocalKeeper(Keeper):
    """Reads what another keeper sends in this process; ``full``: there is no memory left."""

    full = False

    def fetch(self, directory, files, source):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        for name in files:
            self.write(f"{directory}/{name}", [source.read(f"{directory}/{name}", 0)])


class LocalKeepers(Keepers):
    """Keepers in this process, of nodes that may be ``lost``."""

    def __init__(self, run, own=0):
        super().__init__(run, IDS, own, 1.0)
        self.lost = set()

    def _find_living(self):
        return {*IDS} - self.lost

    def _start_actor(self, node, living):
        return LocalKeeper(self._base, node, str(self._run), living)

    def _call(self, method, arguments, seconds):
        answers, problems = {}, {}
        for node, own in arguments.items():
            try:
                if node in self.lost:
                    self._actors.pop(node, None)
                    raise KeeperLost(node)
                answers[node] = getattr(self._actors[node], method)(*own)
            except (OSError, KeeperLost) as problem:
                problems[node] = problem
        return answers, problems

    def lose(self, number):
        """Lose a node, and its memory."""
        self.lost.add(IDS[number])
        shutil.rmtree(name_folder(self._base, IDS[number]), ignore_errors=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def open_nodes(folder, own=0, nodes=(0, 1, 2)):
    """The checkpoints of a driver on a node, where the trainer has its ranks on these nodes."""
    keepers = LocalKeepers(folder, own)
    keepers.choose({"trainer": list(nodes)}, IDS)
    return NodeCheckpoints(keepers, Checkpoints(name_memory_folder(folder), 2))


def write(found, step, nodes=(0, 1, 2)):
    def write_files(directory):
        (directory / "state.json").write_text(f"{step}")
        path = found.keepers.localize(str(directory / "models" / "trainer"))
        assert isinstance(path, NodePath)
        for rank, node in enumerate(nodes):
            os.makedirs(path.find(IDS[node]), exist_ok=True)
            with open(os.path.join(path.find(IDS[node]), f"rank{rank}"), "w") as file:
                file.write("x" * (rank + 1))
        own = directory / "models" / "trainer"
        report_written(type(own)(path.find(IDS[nodes[0]])))
        return FilesOfALostProcess(own)

    found.on_complete = lambda step: found.prune(None)
    return found.write(step, write_files)


@pytest.mark.parametrize("lost", [0, 2])
def test_any_node_may_be_lost_with_its_memory(folder, lost):
    found = open_nodes(folder)
    for step in (1, 2, 3):
        assert write(found, step) == found.path(step)
    assert found.steps() == [2, 3], "two are kept"
    own = 1 if lost == 0 else 0  # the next driver is on another node
    next_one = open_nodes(folder, own, [node for node in range(3) if node != lost])
    next_one.keepers.lose(lost)
    path = next_one.find_newest()
    assert path == next_one.path(3) and (path / "state.json").read_text() == "3"
    for node in {0, 1, 2} - {lost}:
        next_one.keepers.fetch(str(path / "models" / "trainer"), [node])
        there = name_folder(str(name_memory_folder(folder)), IDS[node])
        assert sorted(os.listdir(f"{there}/step_3/models/trainer")) == ["rank0", "rank1", "rank2"]


def test_after_two_lost_nodes_no_half_of_a_checkpoint_is_used(folder, tmp_path):
    found = open_nodes(folder)
    write(found, 4)
    found.keepers.lose(1)
    found.keepers.lose(2)
    with pytest.raises(CorruptCheckpoint, match="step 4: no node that lives holds models/trainer/rank1, one of 1"):
        found.find_newest()
    disk = Checkpoints(tmp_path / "disk", 2)
    disk.directory.mkdir()
    disk.write(3, lambda path: (path / "file").write_text("x") and None)
    assert find_newest(found, disk) == disk.path(3)
    with pytest.raises(KeeperLost, match="has lost files"):
        found.keepers.fetch(str(found.path(4) / "models" / "trainer"), [0])


def test_a_new_partner_is_chosen(folder):
    found = open_nodes(folder, nodes=[1])
    write(found, 1, [1])
    found.keepers.lose(1)
    found.keepers.choose({"trainer": [2]}, IDS)
    write(found, 2, [2])
    found.keepers.lose(2)
    path = found.find_newest()
    assert path == found.path(2) and (path / "models" / "trainer" / "rank0").exists(), "the copy is here"


def test_what_one_machine_had_in_memory_is_taken_along(folder):
    alone = Checkpoints(name_memory_folder(folder), 2, hashes=False)
    alone.directory.mkdir()
    alone.write(3, lambda path: (path / "state.json").write_text("3") and None)
    found = open_nodes(folder)
    assert found.find_newest() == found.path(3) and not alone.directory.exists()
    found.keepers.fetch(str(found.path(3)), [1])
    found.keepers.lose(0)
    assert (open_nodes(folder, own=1, nodes=[1]).find_newest() / "state.json").read_text() == "3"


def test_a_partner_without_memory_leaves_the_checkpoint_before(folder):
    found = open_nodes(folder, nodes=[0, 1])
    write(found, 1, [0, 1])
    found.keepers._actors[IDS[1]].full = True
    with pytest.raises(OSError, match="No space left"):
        write(found, 2, [0, 1])
    assert found.steps() == [1] and not list(found.directory.glob(".w*"))
    found.keepers._actors[IDS[1]].full = False
    write(found, 3, [0, 1])
    assert found.steps() == [1, 3]


def test_the_memory_of_all_nodes_is_freed(folder, memory):  # noqa: F811
    found = open_nodes(folder)
    write(found, 1)
    assert has_keepers(folder) and len(list(memory.iterdir())) == 3
    next_one = open_nodes(folder, nodes=[0])  # the others are known by the record alone
    next_one.clear()
    assert not has_keepers(folder) and not list(memory.iterdir())


@pytest.fixture
def nodes(monkeypatch):
    """Runs of this process keep their checkpoints on two nodes; returns the keepers, once there are some."""
    found = []

    def open_keepers(self, run, models):
        if self.keepers is None:
            self.keepers = LocalKeepers(run)
            found.append(self.keepers)
        self.keepers.choose({name: [0, 1] for name in models}, IDS)
        return self.keepers

    monkeypatch.setattr(LocalCluster, "open_keepers", open_keepers)
    return found


def test_a_lost_trainer_goes_on_from_the_copy(tmp_path, monkeypatch, replaced, nodes, memory, undisturbed):  # noqa: F811
    config = configure(tmp_path, save_in_memory_every=1)

    def lose_files(self, batch):
        if len(steps(config)) == 3:
            shutil.rmtree(nodes[0].folder / "step_3" / "models")
            return True
        return False

    lose(monkeypatch, Trainer, "step", "trainer", lose_files)
    assert run(config) == 0
    assert replaced == ["trainer"] and steps(config) == [1, 2, 3, 4, 5] and weights_hash(config, 5) == undisturbed
    assert not list(memory.iterdir())


def test_the_next_driver_goes_on_from_the_copy(tmp_path, monkeypatch, nodes, undisturbed):  # noqa: F811
    config = configure(tmp_path, save_in_memory_every=1)
    end_driver(config, monkeypatch)
    shutil.rmtree(nodes[0].folder)

    def find(alone, run, runtime):
        return nullcontext(NodeCheckpoints(LocalKeepers(run), alone))

    monkeypatch.setattr("coalign.launch.run.find_memory", find)
    assert run(config) == 0
    assert steps(config) == [1, 2, 3, 4, 5] and weights_hash(config, 5) == undisturbed


def test_a_run_goes_on_without_memory_on_the_other_node(tmp_path, monkeypatch, nodes, caplog):
    config = configure(tmp_path, save_in_memory_every=1)
    monkeypatch.setattr(LocalKeeper, "full", True)
    assert run(config) == 0
    assert steps(config) == [1, 2, 3, 4, 5]
    told = [entry.message for entry in caplog.records if "the checkpoint in memory" in entry.message]
    assert len(told) == 1 and "cannot be written: [Errno 28] No space left" in told[0]


def test_a_checkpoint_that_is_lost_while_it_is_fetched_ends_the_ranks(tmp_path, monkeypatch, replaced, nodes):  # noqa: F811
    """They have no state to go on with: the engine restores again, from what there is then."""
    config, real = configure(tmp_path, save_in_memory_every=1), Cluster.fetch_files
    lose(monkeypatch, Trainer, "step", "trainer", lambda self, batch: len(steps(config)) == 3)

    def lost_once(self, directory, name):
        if replaced == ["trainer"]:
            raise KeeperLost("its node is gone")
        real(self, directory, name)

    monkeypatch.setattr(Cluster, "fetch_files", lost_once)
    assert run(config) == 0
    assert replaced == ["trainer", "trainer"] and steps(config) == [1, 2, 3, 4, 5]
