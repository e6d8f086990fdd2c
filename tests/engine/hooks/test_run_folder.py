import errno
import json
import math
import os
from multiprocessing import get_context

import pytest

from coalign.engine.hooks.run_folder import RunFolder, StepLog, flatten_stats
from coalign.run_files.lock import FolderInUse
from coalign.types import Max, Stat, Total, merge_stats


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_a_step_and_no_nan(tmp_path):
    file = StepLog(tmp_path / "metrics.jsonl")
    file.append({"step": 1, "a": math.nan, "b": [math.inf, 2.0], "c": {"d": -math.inf}})
    assert lines(file.path) == [{"step": 1, "a": None, "b": [None, 2.0], "c": {"d": None}}]


def test_cut_keeps_lines_with_unicode_line_separators_and_stops_at_half_a_character(tmp_path):
    file = StepLog(tmp_path / "samples.jsonl")
    file.append({"step": 1, "response": "a\u2028b\x85c"})
    file.append({"step": 2})
    with open(file.path, "ab") as out:
        out.write('{"step": 2, "response": "é'.encode()[:-1])
    file.cut(2)
    kept = [json.loads(line) for line in file.path.read_bytes().split(b"\n")[:-1]]
    assert kept == [{"step": 1, "response": "a\u2028b\x85c"}, {"step": 2}]


def test_a_full_disk_keeps_lines_until_there_is_room(tmp_path, monkeypatch):
    file = StepLog(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    real = open

    class Full:
        def __init__(self, path, mode):
            self.out = real(path, mode)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.out.close()

        def write(self, text):
            self.out.write(text[:4])  # a full disk takes half a line
            self.out.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("builtins.open", Full)
    file.append({"step": 2})
    monkeypatch.undo()
    assert [line["step"] for line in lines(file.path)] == [1]
    file.append({"step": 3})
    assert [line["step"] for line in lines(file.path)] == [1, 2, 3]


def test_lines_after_a_broken_one_are_kept(tmp_path, caplog):
    file = StepLog(tmp_path / "metrics.jsonl")
    for number in (1, 2, 3):
        file.append({"step": number})
        with open(file.path, "ab") as out:
            out.write([b'{"step": \n', b"null\n", b"[" * 100_000 + b"\n"][number - 1])
    file.cut(2)
    assert lines(file.path) == [{"step": 1}, {"step": 2}]
    aside = (tmp_path / "metrics.jsonl.cut").read_bytes().split(b"\n")
    assert aside == [b'{"step": ', b"null", b'{"step":3}'.replace(b":", b": "), b"[" * 100_000, b""]
    assert "3 lines cannot be read" in caplog.text


def test_two_runs_cannot_share_a_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(FolderInUse, match="still going"):
        RunFolder(tmp_path / "run")
    with get_context("fork").Pool(1) as other, pytest.raises(FolderInUse, match="still going"):
        other.apply(RunFolder, (tmp_path / "run",))
    folder.close()
    RunFolder(tmp_path / "run").close()


def test_the_records_of_an_earlier_run_are_moved_aside(tmp_path, caplog):
    folder = RunFolder(tmp_path / "run")
    folder.move_records_aside()  # there are none
    for number in (1, 2):
        folder.metrics.append({"step": number})
        (folder.checkpoints / f"step_{number}").mkdir(parents=True)
        folder.move_records_aside()
        assert lines(tmp_path / "run" / f"metrics.jsonl.before-{number}") == [{"step": number}]
        assert [p.name for p in (tmp_path / "run" / f"checkpoints.before-{number}").iterdir()] == [f"step_{number}"]
        assert f"checkpoints.before-{number}" in caplog.text
    folder.close()


def test_metrics_merge_exactly():
    merged = merge_stats(
        [{"a": Stat(1.0, 2.0), "m": Max(3.0)}, {"a": Stat(5.0, 1.0), "t": Total(2.0)}, {"t": Total(0.5)}]
    )
    assert flatten_stats(merged) == {"a": 2.0, "m": 3.0, "t": 2.5}
    assert math.isnan(Stat(0.0, 0.0).value)
