"""Following files that another process writes, by offset."""

import json
import os

from coalign.files import write_atomically
from coalign.run_files.records import read_records, select_numbers
from coalign_board.following import START, follow_records, follow_text, read_growth


def lines(*records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def test_reading_goes_on_where_it_ended_and_leaves_half_a_line(tmp_path):
    path = tmp_path / "log.txt"
    assert read_growth(path, START) == read_growth(path, START)
    assert read_growth(path, START).lines == []
    append(path, "one\ntwo \u2028 é".encode())
    first = read_growth(path, START)
    assert (first.lines, first.position.offset, first.replaced) == ([b"one"], 4, False)
    assert read_growth(path, first.position).lines == []
    append(path, b"\n\nfour\n")
    second = read_growth(path, first.position)
    assert second.lines == ["two \u2028 é".encode(), b"", b"four"] and not second.replaced
    assert second.position.offset == path.stat().st_size


def test_chunks_hold_whole_lines(tmp_path):
    path = tmp_path / "log.txt"
    append(path, b"a\nbb\n" + b"c" * 30 + b"\nd\n")
    found, position = [], START
    while (growth := read_growth(path, position, chunk=4)).lines:
        found.append(growth.lines)
        position = growth.position
    assert found == [[b"a"], [b"bb"], [b"c" * 30], [b"d"]]


def test_records_that_were_cut_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    followed = follow_records(path)
    assert not followed.update()
    append(path, lines({"step": 1}, {"step": 2}, {"step": 3}))
    assert followed.update() and [record["step"] for record in followed.values] == [1, 2, 3]
    assert not followed.update()
    with write_atomically(path) as aside:  # a run that goes on after step 1
        aside.write_bytes(lines({"step": 1}, {"step": 2, "again": True}, {"step": 3, "again": True}))
    assert followed.update()
    assert list(followed.values) == [{"step": 1}, {"step": 2, "again": True}, {"step": 3, "again": True}]
    path.unlink()
    assert followed.update() and not followed.values


def test_another_file_with_the_same_inode_is_noticed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, lines({"step": 1, "loss": 1.0}))
    followed = follow_records(path)
    followed.update()
    os.truncate(path, 0)
    append(path, lines({"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}))
    assert followed.update() and [record["loss"] for record in followed.values] == [2.0, 2.0]


def test_only_the_newest_are_kept_if_wanted_and_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "samples.jsonl"
    append(path, lines({"step": 1}, {"step": 2}) + b'null\n{"step": "x"}\n{"ste\n' + b"[" * 100_000 + b"\n")
    append(path, lines({"step": 3}) + b'{"step": 4')
    followed = follow_records(path, limit=2)
    followed.update()
    assert list(followed.values) == [{"step": 2}, {"step": 3}]
    assert [record["step"] for record in read_records(path)] == [1, 2, 3]


def test_numbers_of_a_record_are_finite():
    record = {"step": 3, "a": None, "b": "text", "c": 0.5, "d": 10**400, "e": float("inf")}
    assert select_numbers(record) == {"step": 3.0, "c": 0.5}


def test_a_log_is_followed_as_text(tmp_path):
    path = tmp_path / "log.txt"
    append(path, "one\nzwölf\n".encode() + b"\xff\nhalf")
    followed = follow_text(path, limit=2)
    assert followed.update() and list(followed.values) == ["zwölf", "\ufffd"]
