"""Lost processes: the engine goes on from its last step or from a checkpoint; tests/chaos loses real ones."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from coalign.checkpoint import folder as folder_module
from coalign.checkpoint.folder import CheckpointFolder, MemoryFolder
from coalign.checkpoint.resume import find_newest
from coalign.cluster.batch_ref import WorkerFailure
from coalign.cluster.cluster import Cluster
from coalign.cluster.future import Call, WorkerLost
from coalign.cluster.placement.nodes import ProcessPlacement
from coalign.engine.engine import Engine, Hook, Trainer
from coalign.engine.environment import Environment
from coalign.engine.hooks.evaluation import EvaluationHook
from coalign.files import report_written
from coalign_diagnose.explain import explain
from tests.runs import metrics, run, settings, weights_hash


def configure(directory, name="run", **runtime):
    config = settings(directory, "grpo", steps=5, eval_at_start=False, save_every=5, **runtime)
    return config | {"output": str(directory / name)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of the weights of a run that loses nothing."""
    config = configure(tmp_path_factory.mktemp("undisturbed"))
    assert run(config) == 0
    return weights_hash(config, 5)


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """The directory that stands for /dev/shm."""
    monkeypatch.setattr(folder_module, "MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture
def replaced(monkeypatch):
    """Lost processes of this process's cluster are "started again"; returns the names of their models, by loss."""
    found = []

    def replace_lost(self, lost):
        found.append(lost.call.model)
        self.error, self._refuses_calls = None, False
        return {lost.call.model}

    monkeypatch.setattr(Cluster, "replace_lost", replace_lost)
    return found


def lose(monkeypatch, owner, method, model, when):
    """Let a method raise WorkerLost, once, where ``when(self, *arguments)`` is true."""
    real, left = getattr(owner, method), [1]

    def once(self, *arguments):
        if left[0] and when(self, *arguments):
            left[0] = 0
            raise WorkerLost(Call(model, "x"), [f"{model}, replica 0"], WorkerFailure("worker lost", "killed", ""))
        return real(self, *arguments)

    monkeypatch.setattr(owner, method, once)


def steps(config):
    return [line["step"] for line in metrics(config)]


def check_complete(config, expected):
    """Train to the end: every step is there once, and the weights are the expected ones."""
    assert run(config) == 0
    assert steps(config) == [1, 2, 3, 4, 5] and weights_hash(config, 5) == expected


def test_a_lost_trainer_repeats_one_step(tmp_path, monkeypatch, replaced, memory, undisturbed, caplog):
    config = configure(tmp_path, save_in_memory_every=1)
    rollouts, real = [], Environment.next
    monkeypatch.setattr(Environment, "next", lambda self, *a: (rollouts.append(a[0]), real(self, *a))[1])

    def half_way(self, batch):  # the trainer has taken its step, and nobody heard of it
        if rollouts == [0, 1, 2]:
            self.flow(batch)
            return True
        return False

    lose(monkeypatch, Trainer, "step", "trainer", half_way)
    check_complete(config, undisturbed)
    assert replaced == ["trainer"] and rollouts == [0, 1, 2, 2, 3, 4]
    assert "step_2; step 3 is made again" in caplog.text
    last = metrics(config)[-1]
    assert last["goodput/restart"] > 0 and last["goodput/redone"] > 0
    assert sum(value for name, value in last.items() if name.startswith("goodput/")) == pytest.approx(1)
    assert not list(memory.iterdir()), "the memory is not freed"


def test_a_lost_sampler_costs_no_step(tmp_path, monkeypatch, replaced, undisturbed):
    config = configure(tmp_path)
    lose(monkeypatch, Environment, "next", "policy", lambda self, version, served: version == 3)
    check_complete(config, undisturbed)
    assert replaced == ["policy"]


@pytest.mark.parametrize("model", ["policy", pytest.param("trainer", marks=pytest.mark.slow)])
def test_weights_that_were_under_way_are_sent_again(tmp_path, monkeypatch, replaced, undisturbed, model):
    config = configure(tmp_path, save_in_memory_every=1)
    lose(monkeypatch, Trainer, "sync", model, lambda self, version: version == 2)
    check_complete(config, undisturbed)


class Heard(Hook):
    def __init__(self):
        self.heard = []

    def after_step(self, engine, stats, batch):
        self.heard.append(engine.step)


@pytest.mark.parametrize(("step", "before"), [pytest.param(0, [], marks=pytest.mark.slow), (2, [1, 2])])
def test_an_evaluation_that_loses_its_policy_is_made_again(tmp_path, monkeypatch, replaced, step, before):
    """Every hook hears of every step once: those that come before the evaluation, too."""
    whole = configure(tmp_path, "whole", eval_every=2)
    whole["runtime"]["eval_at_start"] = True
    config = whole | {"output": str(tmp_path / "run")}
    run(whole)
    first, last = Heard(), type("Later", (Heard,), {})()
    method = "begin" if step == 0 else "after_step"
    real = getattr(EvaluationHook, method)

    def after(self, engine, *arguments):
        if first not in engine.hooks:
            engine.hooks.insert(0, first)
        real(self, engine, *arguments)

    monkeypatch.setattr(EvaluationHook, method, after)
    lose(monkeypatch, EvaluationHook, method, "policy", lambda self, engine, *a: engine.step == step)
    assert run(config, hooks=[last]) == 0
    assert replaced == ["policy"] and last.heard == [1, 2, 3, 4, 5]
    assert weights_hash(config, 5) == weights_hash(whole, 5)
    evaluated = [[line["step"] for line in metrics(each) if "eval/mean" in line] for each in (config, whole)]
    assert evaluated[0] == evaluated[1] == [0, 2, 4, 5]


def test_without_a_saved_state_the_run_ends(tmp_path, monkeypatch, replaced):
    config = configure(tmp_path)
    lose(monkeypatch, Trainer, "step", "trainer", lambda self, batch: True)
    with pytest.raises(WorkerLost, match="trainer, replica 0"):
        run(config)


def test_the_same_loss_three_times_is_no_bad_luck(tmp_path, monkeypatch, replaced):
    config = configure(tmp_path, save_in_memory_every=1)
    real = Trainer.step

    def fail(self, batch):
        if len(metrics(config)) == 2:
            raise WorkerLost(Call("trainer", "x"), ["trainer, rank 0"], WorkerFailure("worker lost", "killed", ""))
        return real(self, batch)

    monkeypatch.setattr(Trainer, "step", fail)
    with pytest.raises(WorkerLost):
        run(config)
    assert replaced == ["trainer", "trainer"] and steps(config) == [1, 2]


def end_driver(config, monkeypatch):
    """Run until the driver ends in the training of step 4."""
    real = Trainer.step

    def die(self, batch):
        if len(metrics(config)) == 3:
            raise SystemExit("killed")
        return real(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", die)
        with pytest.raises(SystemExit):
            run(config)


def test_a_driver_that_ends_goes_on_from_memory(tmp_path, monkeypatch, memory, undisturbed):
    config = configure(tmp_path, save_in_memory_every=1)
    end_driver(config, monkeypatch)
    [folder] = memory.iterdir()
    assert folder == MemoryFolder(Path(config["output"])).directory
    assert (folder / "step_3" / "manifest.json").exists() and not (folder / "step_3" / "hf").exists()
    check_complete(config, undisturbed)


def move_trainer(engine):
    """Let the cluster say that the trainer runs on another node than the driver."""
    engine.cluster.placements["trainer"] = [ProcessPlacement(engine.cluster.driver_node + 1, ())]


def test_memory_of_another_node_is_refused(tmp_path, monkeypatch):
    real = Engine.learn
    monkeypatch.setattr(Engine, "learn", lambda self, recover: (move_trainer(self), real(self, recover))[1])
    with pytest.raises(ValueError, match=r"save_in_memory_every is 1, and models\.trainer has processes on another"):
        run(configure(tmp_path, save_in_memory_every=1))


def test_a_trainer_that_moves_to_another_node_goes_on_from_the_disk(
    tmp_path, monkeypatch, replaced, undisturbed, caplog
):
    """Memory is not used from then on, and the log says so once."""
    config = configure(tmp_path, save_in_memory_every=1)
    config["runtime"]["save_every"] = 2
    real = EvaluationHook.after_step

    def move(self, engine, *arguments):
        if engine.step == 3:
            move_trainer(engine)
        real(self, engine, *arguments)

    monkeypatch.setattr(EvaluationHook, "after_step", move)
    lose(monkeypatch, Trainer, "step", "trainer", lambda self, batch: len(metrics(config)) == 3)
    check_complete(config, undisturbed)
    assert "step_2; step 3 is made again" in caplog.text
    assert caplog.text.count("now has processes on another node") == 1


@pytest.mark.parametrize("resume", ["never", "auto"])  # auto: a new folder of the same path is another run
def test_a_run_that_begins_anew_does_not_read_what_is_in_memory(tmp_path, memory, resume):
    config = settings(tmp_path, "sft", steps=2, eval_at_start=False, resume=resume)
    left = MemoryFolder(Path(config["output"])).directory
    (left / "step_1").mkdir(parents=True)
    (left / "step_1" / "manifest.json").write_text('{"files": {}}')
    assert run(config) == 0
    assert steps(config) == [1, 2] and (resume == "auto" or not left.exists())


def write_file(directory):
    (directory / "file").write_text("x")
    return SimpleNamespace(paths=[], finish=lambda: None)


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "expected"),
    [
        ([], [], None),
        ([3, 4], [2], ("memory", 4)),
        ([4], [4], ("disk", 4)),
        ([3], [4], ("disk", 4)),
        ([], [2], ("disk", 2)),
        ([1], [], ("memory", 1)),
    ],
)
def test_the_newest_checkpoint_counts(tmp_path, in_memory, on_disk, expected):
    folders = {
        "memory": CheckpointFolder(tmp_path / "memory2", 9, hashes=False),
        "disk": CheckpointFolder(tmp_path / "disk", 9),
    }
    for name, written in (("memory", in_memory), ("disk", on_disk)):
        folders[name].directory.mkdir()
        for step in written:
            folders[name].write(step, write_file)
    found = find_newest([folders["disk"], folders["memory"]])
    assert found == (expected and folders[expected[0]].path(expected[1]))


def test_a_damaged_checkpoint_in_memory_gives_way(tmp_path):
    memory, disk = CheckpointFolder(tmp_path / "m", 9, hashes=False), CheckpointFolder(tmp_path / "d", 9)
    for folder, step in ((memory, 5), (disk, 3)):
        folder.directory.mkdir()
        folder.write(step, write_file)
    assert "sha256" not in json.loads((memory.path(5) / "manifest.json").read_text())["files"]["file"]
    (memory.path(5) / "file").write_text("longer")
    with pytest.raises(OSError, match=r"no checkpoint in .* is intact"):
        find_newest([CheckpointFolder(tmp_path / "none", 9), memory])
    assert find_newest([disk, memory]) == disk.path(3)


@pytest.mark.parametrize("written", [True, False])
def test_a_checkpoint_whose_writer_is_lost_is_given_up(tmp_path, written):
    folder = CheckpointFolder(tmp_path / "folder", 9)
    folder.directory.mkdir()

    def write(path):
        (path / "weights").mkdir()
        if written:
            report_written(path / "weights")
        return SimpleNamespace(paths=[path / "weights"], finish=lambda: None)

    folder.begin(3, write)
    if written:
        folder.settle()
    else:
        with pytest.raises(Exception, match=r"^$"):
            folder.settle()
    assert folder.steps() == ([3] if written else []) and not list(folder.directory.glob(".w*"))


def test_the_memory_of_deleted_runs_is_freed(tmp_path, memory):
    """Not that of a run that lives where this process cannot see it, as in another container: it writes every step."""
    for name, target, age in (("gone", "no such run", 2), ("new", "no such run", 0), ("there", ".", 2)):
        folder = memory / f"coalign-{os.getuid()}-{name}"
        folder.mkdir()
        (folder / "run").symlink_to(tmp_path / target)
        os.utime(folder, (time.time() - age * 86400,) * 2)
    (memory / f"coalign-{os.getuid()}-other").mkdir()
    MemoryFolder(tmp_path / "run")
    assert sorted(folder.name.split("-")[2] for folder in memory.iterdir()) == ["new", "other", "there"]


@pytest.mark.parametrize("model", ["policy", pytest.param("trainer", marks=pytest.mark.slow)])
def test_the_journal_accounts_for_every_group_over_a_loss(tmp_path, monkeypatch, replaced, model):
    config = configure(tmp_path, journal=True, save_in_memory_every=1)
    owner, method = (Environment, "_take_batch") if model == "policy" else (Trainer, "step")
    lose(monkeypatch, owner, method, model, lambda self, *arguments: len(metrics(config)) == 3)
    assert run(config) == 0
    told = json.loads(explain(Path(config["output"]), as_json=True))
    assert (told["drawn"], told["trained"], told["waiting"], told["dropped"]) == (20, 20, 0, {})
    assert told["steps"] == 5 and not told["damaged_lines"]


@pytest.mark.parametrize("phase", ["rollout", pytest.param("train", marks=pytest.mark.slow)])
def test_a_machine_that_is_taken_away_saves_at_once(tmp_path, monkeypatch, undisturbed, phase):
    config = configure(tmp_path, preemption_notice=30)
    owner, method = (Environment, "next") if phase == "rollout" else (Trainer, "step")
    real = getattr(owner, method)

    def interrupted(self, *arguments):
        if len(metrics(config)) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1 if phase == "train" else 20)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        begun = time.monotonic()
        assert run(config) == 128 + signal.SIGTERM
        assert time.monotonic() - begun < 18
    assert steps(config) == ([1, 2] if phase == "rollout" else [1, 2, 3])
    check_complete(config, undisturbed)
