"""Atomic writes and hashes of files."""

from __future__ import annotations

import hashlib
import os

import pytest

from coalign.files import delete_path, hash_file, move_aside, write_atomically, write_text_atomically


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


def test_the_hash_is_that_of_the_contents(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"contents")
    assert hash_file(file) == hashlib.sha256(b"contents").hexdigest()


def test_what_is_moved_aside_has_the_first_free_name(tmp_path):
    for number in (1, 2):
        (tmp_path / "name").write_text(str(number))
        assert move_aside(tmp_path / "name") == tmp_path / f"name.before-{number}"
