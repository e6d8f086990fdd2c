import errno
import logging

import pytest

from coalign.engine.hooks.checkpoint import MANIFEST, Checkpoints, CorruptCheckpoint, verify_checkpoint


def fill(directory):
    (directory / "hf").mkdir()
    (directory / "hf" / "model.bin").write_bytes(bytes(range(256)) * 40)
    (directory / "state.json").write_text('{"step": 1}')


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_a_checkpoint_is_written_whole_and_verifies(checkpoints):
    path = checkpoints.write(1, fill)
    verify_checkpoint(path)
    assert checkpoints.find_newest() == path
    assert not list(checkpoints.directory.glob(".writing*"))


@pytest.mark.parametrize("file", ["state.json", "hf/model.bin"])
def test_a_flipped_bit_is_found_and_the_one_before_is_used(checkpoints, caplog, file):
    first = checkpoints.write(1, fill)
    second = checkpoints.write(2, fill)
    data = bytearray((second / file).read_bytes())
    data[5] ^= 1
    (second / file).write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=f"contents of {file} have changed"):
        verify_checkpoint(second)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.find_newest() == first
    assert file in caplog.text


def test_a_file_cut_in_half_or_missing_is_found(checkpoints):
    path = checkpoints.write(3, fill)
    file = path / "hf" / "model.bin"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CorruptCheckpoint, match=r"model.bin has 100 bytes, 10240 were written"):
        verify_checkpoint(path)
    file.unlink()
    with pytest.raises(CorruptCheckpoint, match=r"model.bin is missing"):
        verify_checkpoint(path)


def test_a_manifest_that_cannot_be_read(checkpoints):
    path = checkpoints.write(3, fill)
    (path / MANIFEST).write_text("{")
    with pytest.raises(CorruptCheckpoint, match=r"no readable manifest\.json"):
        verify_checkpoint(path)
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint in .* is intact .*runtime\.resume=never"):
        checkpoints.find_newest()


def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(checkpoints):
    good = checkpoints.write(1, fill)

    def full(directory):
        fill(directory)
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in (1, 2):
        with pytest.raises(OSError, match="No space"):
            checkpoints.write(step, full)
    assert checkpoints.find_newest() == good
    assert [p.name for p in checkpoints.directory.iterdir()] == ["step_1"]


def test_a_crash_while_writing_is_invisible_and_cleaned_up(checkpoints):
    good = checkpoints.write(1, fill)
    left = checkpoints.directory / ".writing-step_2"
    left.mkdir()
    (left / "state.json").write_text("{}")
    assert checkpoints.find_newest() == good
    checkpoints.write(2, fill)
    assert not left.exists()


def test_the_newest_and_the_best_are_kept(checkpoints):
    for step in range(1, 6):
        checkpoints.write(step, fill)
        checkpoints.prune(best=2 if step >= 2 else None)
    assert checkpoints.steps() == [2, 4, 5]


def test_no_checkpoint_at_all(checkpoints):
    assert checkpoints.find_newest() is None
    assert checkpoints.steps() == []
