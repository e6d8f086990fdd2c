"""Copies of checkpoints: a run on a local object server, and the logic on `memory://` and `file://`."""

import json
import logging
import os
import shutil
import socket
import threading
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from coalign import load_config
from coalign.checkpoint import remote as remote_module
from coalign.checkpoint.folder import CheckpointFolder
from coalign.checkpoint.manifest import MANIFEST, CorruptCheckpoint, RemoteError, verify_checkpoint
from coalign.checkpoint.remote import RemoteCheckpoints
from coalign.checkpoint.resume import find_newest
from coalign.config.errors import ConfigError
from coalign.launch.plan import prepare
from tests.runs import metrics, run, settings, stopping_after, weights_hash


@pytest.fixture
def memory_url():
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path, memory_url):
    return memory_url if request.param == "memory" else f"file://{tmp_path}/remote/run"


@pytest.fixture
def disk(tmp_path):
    return CheckpointFolder(tmp_path / "run" / "checkpoints", keep=2)


def fill(step, base=b"frozen" * 1000):
    def write(directory):
        (directory / "hf").mkdir()
        (directory / "hf" / "base.bin").write_bytes(base)
        (directory / "hf" / "new.bin").write_bytes(bytes([step]) * 5000)
        (directory / "state.json").write_text(json.dumps({"step": step}))
        return SimpleNamespace(paths=[], finish=lambda: None)

    return write


def copy(remote, disk, *steps, best=None):
    for step in steps:
        disk.write(step, fill(step))
        remote.begin(step, best)
        remote.finish()


def listed(url):
    files, root = fsspec.url_to_fs(url)
    return sorted(path.removeprefix(root + "/") for path in files.find(root))


def steps(url):
    return sorted(int(name.split("/")[0][5:]) for name in listed(url) if name.endswith(f"/{MANIFEST}"))


@pytest.fixture
def sent(monkeypatch):
    """The names of the files that were uploaded."""
    names, send = [], RemoteCheckpoints._send

    def record(self, source, target):
        names.append(source.name)
        send(self, source, target)

    monkeypatch.setattr(RemoteCheckpoints, "_send", record)
    return names


def test_a_copy_is_whole_and_comes_back_as_it_was(url, disk, tmp_path):
    copy(RemoteCheckpoints(url, disk), disk, 1)
    assert listed(url) == [f"step_1/{name}" for name in ("hf/base.bin", "hf/new.bin", MANIFEST, "state.json")]
    other = CheckpointFolder(tmp_path / "other" / "checkpoints", keep=2)
    path = find_newest([RemoteCheckpoints(url, other)])
    assert path == other.path(1) and (path / "hf" / "new.bin").read_bytes() == b"\1" * 5000
    verify_checkpoint(path)
    assert (tmp_path / "other" / "model").resolve() == path / "hf"


def test_a_file_that_the_newest_copy_has_is_not_sent_again(url, disk, sent):
    remote = RemoteCheckpoints(url, disk)
    copy(remote, disk, 1)
    assert sorted(sent) == ["base.bin", "new.bin", "state.json"]
    sent.clear()
    copy(remote, disk, 2)
    assert sorted(sent) == ["new.bin", "state.json"]
    shutil.rmtree(disk.directory)
    verify_checkpoint(remote.fetch(2))


def test_a_server_that_copies_nothing_is_sent_everything(memory_url, disk, sent, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "cp_file", refuse)
    copy(RemoteCheckpoints(memory_url, disk), disk, 1, 2)
    assert sent.count("base.bin") == 2


def test_the_manifest_comes_last_and_goes_first(memory_url, disk, monkeypatch):
    remote, order = RemoteCheckpoints(memory_url, disk), []
    for name in ("put_file", "mv", "rm"):
        real = getattr(MemoryFileSystem, name)

        def record(self, path, *arguments, _name=name, _real=real, **keywords):
            order.append((_name, str(arguments[0] if arguments else path).removeprefix("/bucket/run/")))
            return _real(self, path, *arguments, **keywords)

        monkeypatch.setattr(MemoryFileSystem, name, record)
    copy(remote, disk, 1)
    assert order[3] == ("mv", f"step_1/{MANIFEST}") and all(name == "put_file" for name, _ in order[:3])
    order.clear()
    copy(remote, disk, 2, 3)
    assert [path for name, path in order if name == "rm" and "step_1" in path] == [f"step_1/{MANIFEST}", "step_1"]


def test_a_copy_with_a_file_cut_short_does_not_count(memory_url, disk, monkeypatch, caplog):
    send = RemoteCheckpoints._send

    def cut(self, source, target):
        send(self, source, target)
        if source.name == "new.bin":
            self._files.pipe_file(target, b"12")

    monkeypatch.setattr(RemoteCheckpoints, "_send", cut)
    remote = RemoteCheckpoints(memory_url, disk)
    copy(remote, disk, 1)
    assert steps(memory_url) == [] and remote.take_failures() == 1 and remote.take_failures() == 0
    assert "new.bin has 2 bytes, 5000 were written" in caplog.text and "NO copy" in caplog.text
    monkeypatch.setattr(RemoteCheckpoints, "_send", send)
    copy(remote, disk, 2)
    assert steps(memory_url) == [2] and not any("step_1" in name for name in listed(memory_url))


def test_the_newest_and_the_best_are_kept(url, disk):
    remote = RemoteCheckpoints(url, disk)
    for step in range(1, 6):
        copy(remote, disk, step, best=2 if step >= 2 else None)
    assert steps(url) == [2, 4, 5]


def test_a_run_without_its_folder_keeps_the_best_copy(url, disk, tmp_path):
    copy(RemoteCheckpoints(url, disk), disk, 1, 2, 3, best=1)
    other = CheckpointFolder(tmp_path / "other" / "checkpoints", keep=2)
    copy(RemoteCheckpoints(url, other), other, 4, 5, best=1)
    assert steps(url) == [1, 4, 5]


def test_a_newer_checkpoint_takes_the_place_of_the_one_that_waits(memory_url, disk, monkeypatch):
    gate, begun, send, copied = threading.Event(), threading.Event(), RemoteCheckpoints._copy, []

    def wait(self, step):
        begun.set()
        assert gate.wait(30)
        send(self, step)
        copied.append(step)

    monkeypatch.setattr(RemoteCheckpoints, "_copy", wait)
    remote, best = RemoteCheckpoints(memory_url, disk), 2
    for step in (1, 2, 3):
        disk.write(step, fill(step))
        remote.begin(step, best if step >= best else None)
        assert begun.wait(30)
        disk.prune(best, remote.list_held())
    assert disk.steps() == [1, 2, 3] and remote.list_held() == {1, 2, 3}
    gate.set()
    remote.finish()
    assert copied == [1, 3, 2] and remote.list_held() == set()  # step 2 did not wait its turn, but it is the best one


def test_a_remote_that_is_away_warns_once_and_is_tried_again(memory_url, disk, monkeypatch, caplog):
    def away(*_, **__):
        raise ConnectionError("no route to host")

    real = MemoryFileSystem.find
    remote = RemoteCheckpoints(memory_url, disk)
    monkeypatch.setattr(MemoryFileSystem, "find", away)
    remote.begin_run(-1)
    copy(remote, disk, 1, 2)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "no route to host" in caplog.text and remote.take_failures() == 2
    monkeypatch.setattr(MemoryFileSystem, "find", real)
    copy(remote, disk, 3)
    assert steps(memory_url) == [3] and "can be written again" in caplog.text and remote.take_failures() == 0


def test_no_secret_of_the_environment_is_logged(memory_url, disk, monkeypatch, caplog):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")

    def refuse(*_, **__):
        raise PermissionError("signature of wJalrXUtnFEMI does not match")

    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    copy(RemoteCheckpoints(memory_url, disk), disk, 1)
    assert "AWS_SECRET_ACCESS_KEY" in caplog.text and "wJalrXUtnFEMI" not in caplog.text


def test_a_checkpoint_that_is_replaced_meanwhile_is_copied_again(memory_url, disk, monkeypatch):
    remote, send = RemoteCheckpoints(memory_url, disk), RemoteCheckpoints._send

    def replace(self, source, target):
        send(self, source, target)
        if source.name == "state.json" and (source.parent / "hf" / "new.bin").read_bytes()[0] == 1:
            disk.write(1, fill(9))  # as after a rollback
            self.begin(1, None)

    monkeypatch.setattr(RemoteCheckpoints, "_send", replace)
    copy(remote, disk, 1)
    shutil.rmtree(disk.directory)
    assert (remote.fetch(1) / "hf" / "new.bin").read_bytes()[0] == 9


# ---- resuming


def test_the_newest_good_one_of_memory_disk_and_remote(url, disk, tmp_path, caplog):
    memory = CheckpointFolder(tmp_path / "memory", 2, hashes=False)
    remote = RemoteCheckpoints(url, disk)
    assert find_newest([disk, memory, remote]) is None
    copy(remote, disk, 1, 2, 3)
    assert find_newest([disk, memory, remote]) == disk.path(3)
    memory.write(4, fill(4))
    assert find_newest([disk, memory, remote]) == memory.path(4)
    shutil.rmtree(memory.directory)
    (disk.path(3) / "state.json").write_text("{}")
    assert find_newest([disk, memory, remote]) == disk.path(3)
    verify_checkpoint(disk.path(3))
    assert "is replaced by its copy" in caplog.text
    assert [path.name for path in disk.directory.glob("*before*")] == ["step_3.before-1"]


@pytest.mark.parametrize("file", ["hf/new.bin", "state.json", MANIFEST])
def test_a_damaged_copy_is_named_and_the_one_before_is_taken(url, disk, caplog, file):
    remote = RemoteCheckpoints(url, disk)
    copy(remote, disk, 1, 2)
    shutil.rmtree(disk.directory)
    files, root = fsspec.url_to_fs(url)
    content = bytearray(files.cat_file(f"{root}/step_2/{file}"))
    content[0] ^= 1
    files.pipe_file(f"{root}/step_2/{file}", bytes(content))
    assert find_newest([remote]) == disk.path(1)
    assert f"{url}/step_2" in caplog.text and file in caplog.text
    assert [path.name for path in disk.directory.iterdir()] == ["step_1"]


def test_all_copies_are_damaged(memory_url, disk, tmp_path):
    remote = RemoteCheckpoints(memory_url, disk)
    copy(remote, disk, 1)
    shutil.rmtree(disk.directory)
    MemoryFileSystem().pipe_file("/bucket/run/step_1/state.json", b"{}")
    with pytest.raises(CorruptCheckpoint, match=r"memory://bucket/run/step_1: state\.json has 2 bytes"):
        find_newest([disk, remote])


def test_a_manifest_that_names_files_elsewhere(memory_url, disk):
    copy(remote := RemoteCheckpoints(memory_url, disk), disk, 1)
    manifest = json.dumps({"files": {"../../../x": {"size": 1, "sha256": "0"}}}).encode()
    MemoryFileSystem().pipe_file(f"/bucket/run/step_1/{MANIFEST}", manifest)
    with pytest.raises(CorruptCheckpoint, match=r"'\.\./\.\./\.\./x' of '1' bytes is no file"):
        remote.fetch(1)


def test_copies_that_cannot_be_read(memory_url, disk, tmp_path, monkeypatch, caplog):
    def away(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "find", away)
    memory, remote = CheckpointFolder(tmp_path / "memory", 2), RemoteCheckpoints(memory_url, disk)
    with pytest.raises(RemoteError, match=r"has no checkpoint, and the copies .* no route .*resume=never"):
        find_newest([disk, memory, remote])
    path = disk.write(1, fill(1))
    assert find_newest([disk, memory, remote]) == path and "no route" in caplog.text


def test_a_copy_whose_download_fails_does_not_give_way_to_an_older_copy(memory_url, disk, monkeypatch, caplog):
    copy(remote := RemoteCheckpoints(memory_url, disk), disk, 1, 2)
    shutil.rmtree(disk.directory)
    get = MemoryFileSystem.get_file

    def fail(self, path, *arguments, **keywords):
        if "step_2" in path:
            raise ConnectionError("reset by peer")
        get(self, path, *arguments, **keywords)

    monkeypatch.setattr(MemoryFileSystem, "get_file", fail)
    with pytest.raises(RemoteError, match=r"has no checkpoint, and the copies .* reset by peer"):
        find_newest([disk, remote])
    disk.write(1, fill(1))
    assert find_newest([disk, remote]) == disk.path(1) and "reset by peer" in caplog.text


def test_copies_of_later_steps_do_not_count_for_a_run_that_begins_before_them(url, disk):
    copy(remote := RemoteCheckpoints(url, disk), disk, 1, 2)
    RemoteCheckpoints(url, disk).begin_run(1)
    assert steps(url) == [1] and "step_2/manifest.before.json" in listed(url)
    copy(remote, disk, 2)
    assert steps(url) == [1, 2] and "step_2/manifest.before.json" not in listed(url)
    RemoteCheckpoints(url, disk).begin_run(-1)
    assert steps(url) == []


def test_a_run_that_goes_back_leaves_no_later_copy(memory_url, disk):
    copy(RemoteCheckpoints(memory_url, disk), disk, 1, 2)
    copy(RemoteCheckpoints(memory_url, disk), disk, 1)
    assert steps(memory_url) == [1]


# ---- settings


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("save_copies_to", "nosuch://bucket/run", "knows no protocol `nosuch`"),
        ("save_copies_to", "s3://key:secret@bucket/run", "credentials are read from the environment"),
        ("save_copies_to", "file://OUT/copies", "in the run's own folder"),
        ("save_copies_to", "file://OUT/..", "in the run's own folder or holds it"),
        ("resume", "memory://bucket/run", "expected the URL of a checkpoint"),
    ],
)
def test_a_place_that_cannot_be(tmp_path, key, given, message):
    config = settings(tmp_path, "sft", **{key: given.replace("OUT", str(tmp_path / "run"))})
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(load_config(config))
    assert f"runtime.{key}" in str(caught.value) and "secret" not in str(caught.value)


def test_a_protocol_without_its_package_is_refused_with_the_command(tmp_path, monkeypatch):
    from fsspec.registry import known_implementations

    monkeypatch.setitem(known_implementations, "nos3", {"class": "nos3fs.S3FileSystem", "err": "Install it"})
    with pytest.raises(ImportError, match=r"nos3://bucket/run needs .*No module named 'nos3fs'.*: pip install nos3fs"):
        prepare(load_config(settings(tmp_path, "sft", save_copies_to="nos3://bucket/run")))


# ---- in a run


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The URL of a bucket on a local server that speaks Google Cloud Storage's protocol."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks by gRPC what kind of bucket it is
    pytest.importorskip("gcsfs")
    from gcp_storage_emulator.server import create_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = create_server(
        "127.0.0.1", port, in_memory=False, data_dir=str(tmp_path / "server"), default_bucket="bucket"
    )
    served.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})  # as FSSPEC_GS_TOKEN=anon before the start
    yield "gs://bucket/runs/one"
    served.stop()


def test_a_run_that_loses_its_folder_goes_on_from_the_server(tmp_path, server, caplog):
    config = settings(tmp_path, "sft", steps=6, save_every=2, eval_at_start=False)
    whole = config | {"output": str(tmp_path / "whole")}
    assert run(whole) == 0
    config["runtime"] = whole["runtime"] | {"save_copies_to": server}
    with stopping_after(4):
        assert run(config) == 0
    assert steps(server) == [2, 4]
    shutil.rmtree(config["output"])
    assert run(config) == 0
    assert f"downloading {server}/step_4" in caplog.text
    assert [line["step"] for line in metrics(config)] == [5, 6]
    assert weights_hash(config, 6) == weights_hash(whole, 6) and steps(server) == [4, 6]
    branch = config | {"output": str(tmp_path / "branch")}
    branch["runtime"] = whole["runtime"] | {"resume": f"{server}/step_4"}
    assert run(branch) == 0
    assert weights_hash(branch, 6) == weights_hash(whole, 6)


def test_a_run_whose_copies_all_fail_ends_well_and_copies_the_last_one_when_started_again(
    tmp_path, memory_url, monkeypatch, caplog
):
    def away(*_, **__):
        raise ConnectionError("no route to host")

    real = MemoryFileSystem.find
    config = settings(tmp_path, "sft", steps=5, save_every=1, eval_at_start=False)
    config["runtime"] |= {"save_copies_to": memory_url, "resume": "never"}
    monkeypatch.setattr(MemoryFileSystem, "find", away)
    assert run(config) == 0
    assert "the last checkpoint (step 5) has NO copy" in caplog.text
    assert caplog.text.count("cannot be written") == 1
    assert sum(line.get("checkpoint/remote_failed", 0) for line in metrics(config)) >= 2
    monkeypatch.setattr(MemoryFileSystem, "find", real)
    config["runtime"] |= {"resume": "auto"}
    assert run(config) == 0
    assert steps(memory_url) == [5]


def test_training_does_not_wait_for_copies(tmp_path, memory_url, monkeypatch):
    monkeypatch.setattr(remote_module, "_PROGRESS_SECONDS", 0.05)
    gate, send, log = threading.Event(), RemoteCheckpoints._send, remote_module.log.info

    def wait(self, source, target):
        assert gate.wait(60), "training waits for a copy"
        send(self, source, target)

    def note(message, *arguments):
        log(message, *arguments)
        if message.startswith("waiting for copies"):  # all steps are made
            gate.set()

    monkeypatch.setattr(RemoteCheckpoints, "_send", wait)
    monkeypatch.setattr(remote_module.log, "info", note)
    config = settings(tmp_path, "sft", steps=6, save_every=1, eval_at_start=False, save_copies_to=memory_url)
    assert run(config) == 0
    assert 6 in steps(memory_url) and len(steps(memory_url)) <= 2
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["step_5", "step_6"]
    assert "waiting for copies" in (tmp_path / "run" / "log.txt").read_text()
