"""Atomic writes and hashes of files."""

from __future__ import annotations

import json
import os
import socket

import pytest

from coalign.files import (
    delete_path,
    hash_file,
    list_weight_files,
    move_aside,
    open_regular,
    read_bounded,
    read_json_object,
    write_atomically,
    write_text_atomically,
)
from coalign.hub import fetch


def test_a_file_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with write_atomically(file, flush=True) as aside:
        aside.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]
    write_text_atomically(file, "nëw")
    assert file.read_bytes() == "nëw".encode()


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), write_atomically(file) as aside:
        aside.mkdir()
        (aside / "half").write_text("ne")
        raise KeyboardInterrupt
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("flush", [False, True])
def test_a_directory_replaces_an_empty_one_only(tmp_path, flush):
    folder = tmp_path / "folder"
    (tmp_path / ".writing-folder" / "left").mkdir(parents=True)  # by a process that was killed
    folder.mkdir()
    with write_atomically(folder, flush=flush) as aside:
        (aside / "nested").mkdir(parents=True)
        (aside / "nested" / "file").write_text("text")
    assert list(folder.rglob("*")) == [folder / "nested", folder / "nested" / "file"]
    with pytest.raises(OSError, match="not empty"), write_atomically(folder, flush=flush) as aside:
        aside.mkdir()
    assert list(tmp_path.iterdir()) == [folder] and (folder / "nested" / "file").read_text() == "text"


def test_a_link_is_replaced_and_what_it_pointed_to_stays(tmp_path):
    link = tmp_path / "link"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with write_atomically(link) as aside:
            aside.symlink_to(name)
        assert os.readlink(link) == name
    delete_path(link)
    assert (tmp_path / "one").is_dir() and (tmp_path / "two").is_dir() and not link.is_symlink()


def test_what_is_moved_aside_has_the_first_free_name(tmp_path):
    for number in (1, 2):
        (tmp_path / "name").write_text(str(number))
        assert move_aside(tmp_path / "name") == tmp_path / f"name.before-{number}"


@pytest.mark.parametrize("put", ["FIFO", "directory", "device", "socket"])
def test_only_regular_files_are_opened(put, tmp_path):
    path = tmp_path / "a"
    match put:
        case "FIFO":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(path))
    for read in (open_regular, hash_file, lambda path: read_bounded(path, 10), read_json_object):
        with pytest.raises((OSError, ValueError), match=r"not a regular file|No such device"):
            read(path)


def test_a_file_is_read_up_to_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bounded(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="a has more than 4 bytes"):
        read_bounded(tmp_path / "a", 4)


OUTSIDE = ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors"]
OUTSIDE += ["..", "", "a\0b", None, 7, ["a"], "x" * 300]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_files_of_its_folder_alone(name, tmp_path):
    (tmp_path / "x.safetensors").touch()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for read in (list_weight_files, lambda folder: fetch(str(folder))):
        with pytest.raises(ValueError, match=r"which is no file of its folder|names files that do not exist"):
            read(folder)


def test_shards_may_be_links_as_in_the_cache_of_the_hub(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots/1").mkdir(parents=True)
    (tmp_path / "blobs/abc").touch()
    shard = tmp_path / "snapshots/1/model-1.safetensors"
    shard.symlink_to("../../blobs/abc")
    index = {"weight_map": {"a": shard.name}}
    shard.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    assert list_weight_files(shard.parent) == [shard] and fetch(str(shard.parent)) == shard.parent
