"""Run folders of strangers: odd records, files that are no files, bombs. The board answers, and counts them."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from starlette.testclient import TestClient

from coalign.run_files.records import MAX_LINE, parse_record
from coalign_board.following import START, read_growth
from coalign_board.readers import cause
from coalign_board.server import build_board, make_readers
from packages.board.tests.folders import add_samples, add_steps, make_run
from packages.board.tests.test_page_readers import PLACEMENT, TRACE, sample
from tests.fuzzing import CASES, JSON, try_cases

HOST = "http://127.0.0.1"
READERS = sorted({*make_readers(), "state", "answer"} - {"image", "sample", "trace", "verification"})
PATHS = [
    *("/api/runs", '/api/compare?runs=["a","a"]', *(f"/api/runs/a/{name}" for name in READERS)),
    *('/api/runs/a/metrics?names=["reward/mean","x"]', "/api/runs/a/sample?step=1&group=0&index=0"),
    *("/api/runs/a/sample_groups?step=1", "/api/runs/a/sample_page?search=a", "/api/runs/a/trace?step=1"),
    *("/api/runs/a/image?step=1&group=0&index=0&image=0", "/api/runs/a/verification?step=1"),
    *("/api/runs/a/stalls?time=t&file=a.txt", "/api/runs/a/answer?id=x"),
]


@pytest.fixture(autouse=True)
def _no_diagnosis(monkeypatch):
    """Start no process for each odd file: packages/diagnose/tests has odd logs of its own."""
    monkeypatch.setattr(cause, "_diagnose", lambda folder: {"cause": None})


@pytest.fixture
def folder(tmp_path):
    folder = make_run(tmp_path / "runs" / "a")
    add_steps(folder, range(1, 4))
    add_samples(folder, 3)
    return folder


def ask_all(folder: Path) -> dict[str, Any]:
    """Ask for everything; return the answers by path. None is an error of the server."""
    client = TestClient(build_board(folder.parent), base_url=HOST)
    answers = {}
    for path in PATHS:
        answer = client.get(path)
        assert answer.status_code < 500, (path, answer.text)
        if answer.headers["content-type"] == "application/json":
            answers[path] = json.loads(answer.content, parse_constant=pytest.fail)
    return answers


HUGE, DEEP = 10**400, "[" * 900 + "]" * 900
ODD: list[Any] = [None, True, -1, 1.5, HUGE, math.nan, math.inf, "x", "\ud800", [], [[]], {}, {"a": None}]
ODD_LINES = [
    b"null", b"[]", b'"step"', b"{", b"\xff\xfe\x00", b'{"step": "1"}', b'{"step": NaN}', b'{"step": true}',
    b'{"step": -1}', b'{"step": 1e999}', b'{"step": ' + b"9" * 5000 + b"}", b'{"step": 1' + b"0" * 300 + b"}",
    b'{"step": 1, "x": ' + DEEP.encode() + b"}", b'{"step": 1, "\\u0000": "', b'{"x": 1}',
]  # fmt: skip


def write_lines(path: Path, lines: list[bytes]) -> None:
    with open(path, "ab") as file:
        file.writelines(line + b"\n" for line in lines)


def test_lines_that_are_no_records_are_skipped_and_counted(folder):
    before = ask_all(folder)
    for name in ("metrics.jsonl", "samples.jsonl"):
        write_lines(folder / name, ODD_LINES)
    after = ask_all(folder)
    for name in ("metrics", "sample_steps"):
        path = f"/api/runs/a/{name}"
        assert (before[path]["skipped"], after[path]["skipped"]) == (0, len(ODD_LINES))
    assert after["/api/runs/a/metrics"]["newest"] == 3 and after["/api/runs/a/sample_steps"]["total"] == 3
    assert after["/api/runs/a/samples"] == before["/api/runs/a/samples"]


FIELDS = (
    *("phase", "group", "index", "prompt", "response", "reward", "rewards", "status", "versions", "messages"),
    "images",
)


@pytest.mark.parametrize("field", FIELDS)
def test_odd_values_of_samples_are_no_error(field, folder):
    good = sample(1, 0, 0, 1.0)
    odd = [*ODD, [HUGE], [[1, HUGE]], [["a", "b"]], [[1, 2, 3]], [3], [{"content": 5, "role": []}], ["x" * 5000]]
    odd += ["/dev/zero"]
    records = [good | {field: value} for value in odd]
    write_lines(folder / "samples.jsonl", [json.dumps(record).encode() for record in records])
    answers = ask_all(folder)
    shown = answers["/api/runs/a/sample_page?search=a"]["total"], answers["/api/runs/a/sample_steps"]["skipped"]
    assert shown[0] or shown[1]


def test_odd_values_of_metrics_are_no_error(folder):
    records = [{"step": 4 + i, "reward/mean": value, "x": value, "time/run": value} for i, value in enumerate(ODD)]
    records += [{"step": 40 + i, "x": 1.7e308, "time/run": 1.7e308, "tokens/trained": 1.7e308} for i in range(8)]
    records += [{"step": 2**53 - 1, "x": 1}]
    write_lines(folder / "metrics.jsonl", [json.dumps(record).encode() for record in records])
    assert ask_all(folder)["/api/runs/a/metrics"]["newest"] == 2**53 - 1


def write_objects(folder: Path, change) -> None:
    """Write the files of JSON that a run has, each changed."""
    for name in ("timeline", "checkpoints/step_1", "stalls/t"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    calls = [{"label": "a", "model": None, "method": "m", "reads": {"b": ["c"]}, "makes": ["c"]}]
    (folder / "timeline/step_1.json").write_bytes(change({"traceEvents": TRACE}))
    (folder / "placement.json").write_bytes(change(PLACEMENT))
    (folder / "flow.json").write_bytes(change({"algorithm": "grpo", "calls": calls}))
    (folder / "checkpoints/step_1/state.json").write_bytes(change({"hooks": {"Save": {"best": [1.0, 2]}}}))
    files = {"state.json": {"size": 2, "sha256": "x"}}
    (folder / "checkpoints/step_1/manifest.json").write_bytes(change({"files": files}))
    results = [{"do": "save", "done": True, "text": ""}]
    (folder / "control.done.json").write_bytes(change({"answers": [{"id": "x", "results": results}]}))
    (folder / ".lock").write_bytes(change({"pid": 1, "host": "h", "started": 1.0, "epoch": 1}))


def list_changes(value: Any):
    """Yield an object with one of its values replaced by an odd one, for each value and each odd one."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for odd in [*ODD, "../../x", "/dev/zero"]:
                yield {**value, key: odd} if isinstance(value, dict) else [*value[:key], odd, *value[key + 1 :]]
            for inner in list_changes(value[key]):
                yield {**value, key: inner} if isinstance(value, dict) else [*value[:key], inner, *value[key + 1 :]]


@pytest.mark.parametrize("part", range(8))
def test_odd_values_of_objects_are_no_error(part, folder):
    for turn in range(6):
        place = part * 1009 + turn * 97

        def change(good: Any, place: int = place) -> bytes:
            several = list(list_changes(good))
            return json.dumps(several[place % len(several)]).encode()

        write_objects(folder, change)
        ask_all(folder)


@CASES
def test_damaged_objects_are_no_error(cases, folder):
    def check(seed: int) -> None:
        numbers = count(seed)
        write_objects(folder, lambda good: cut(json.dumps(good).encode(), Random(next(numbers))))
        ask_all(folder)

    try_cases(st.integers(0, 2**32), check, cases // 10)


def cut(data: bytes, random: Random) -> bytes:
    """Replace a piece of a file by another."""
    at = random.randrange(len(data))
    piece = random.choice([b"NaN", b"null", b"1e999", b"[[", b"\xff", b"", b'"x"'])
    return data[:at] + piece + data[at + random.randrange(20) :]


@CASES
def test_any_record_is_no_error(cases, folder):
    keys = st.sampled_from([*FIELDS, "step", "x"])
    records = st.dictionaries(keys, JSON, max_size=8).map(lambda record: {"step": 1} | record)

    def check(record: dict[str, Any]) -> None:
        for name in ("metrics.jsonl", "samples.jsonl"):
            (folder / name).write_bytes(json.dumps(record).encode() + b"\n")
        ask_all(folder)

    try_cases(records, check, cases // 5)


FILES = (
    "metrics.jsonl", "samples.jsonl", "log.txt", ".lock", "control.done.json", "flow.json", "placement.json",
    "timeline/step_1.json", "rollouts/step_1.safetensors", "checkpoints/step_1/manifest.json",
    "checkpoints/step_1/state.json", "stalls/t/report.txt", "stalls/t/a.txt", "stalls", "checkpoints", "rollouts",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("put", ["FIFO", "folder", "socket", "device"])
def test_what_is_no_file_is_not_opened(name, put, folder):
    write_objects(folder, lambda good: json.dumps(good).encode())
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rename(path.with_name("away"))
    path.unlink(missing_ok=True)
    if put == "FIFO":
        os.mkfifo(path)
    elif put == "folder":
        path.mkdir()
    elif put == "device":
        path.symlink_to("/dev/zero")
    else:
        here = os.open(path.parent, os.O_RDONLY)  # the names of sockets are short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    thread = threading.Thread(target=lambda: ask_all(folder), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_an_image_that_is_no_file_is_refused(folder, tmp_path):
    os.mkfifo(tmp_path / "fifo.png")
    listed = [str(tmp_path / "fifo.png"), "/dev/zero", "/dev/stdin", "x" * 5000, "a\0b", str(tmp_path)]
    write_lines(folder / "samples.jsonl", [json.dumps(sample(1, 9, 0, 1.0) | {"images": listed}).encode()])
    client = TestClient(build_board(folder.parent), base_url=HOST)
    for number in range(len(listed)):
        answer = client.get(f"/api/runs/a/image?step=1&group=9&index=0&image={number}")
        assert answer.status_code in (400, 404), answer.text


def chain(letters: str, first: str, write) -> str:
    """Lines of YAML, each of which holds the one before nine times."""
    pairs = pairwise(letters)
    return f"{letters[0]}: &{letters[0]} {first}\n" + "".join(write(a, b, ",".join([f"*{a}"] * 9)) for a, b in pairs)


BOMBS = {
    "aliases": chain("abcdefghi", "[x,x,x,x,x,x,x,x,x]", lambda a, b, all: f"{b}: &{b} [{all}]\n"),
    "merges": chain("abcdefghijklmnop", "{x: 1}", lambda a, b, all: f"{b}: &{b} {{<<: [{all}], {b}1: {{<<: *{a}}}}}\n"),
    "itself": "a: &a [*a]\n",
    "deep": "[" * 100_000,
    "long": "a: b\n" * 300_000,
    "digits": "a: " + "9" * 10_000,
    "object": "a: !!python/object/apply:os.system ['true']\n",
    "bytes": "\xff\0",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_configuration_that_is_a_bomb_is_refused(bomb, folder):
    (folder / "config.yaml").write_bytes(BOMBS[bomb].encode("latin-1"))
    client = TestClient(build_board(folder.parent), base_url=HOST)
    for path in ("checkpoints", "placement"):
        answer = client.get(f"/api/runs/a/{path}")
        assert answer.status_code == 400 and "config.yaml" in answer.text
    assert client.get('/api/compare?runs=["a","a"]').status_code == 400
    assert client.get("/api/runs").status_code == 200


def test_a_line_without_end_fills_no_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.truncate(3 * MAX_LINE)
        file.seek(0, 2)
        file.write(b'\n{"step": 1}\n')
    position, lines, sizes = START, [], []
    while (growth := read_growth(path, position)).lines:
        position = growth.position
        lines += growth.lines
        sizes.append(sum(len(line) + 1 for line in growth.lines))
    assert max(sizes) <= MAX_LINE + 2**22 and sum(sizes) == path.stat().st_size == position.offset
    assert [record for line in lines if (record := parse_record(line))] == [{"step": 1}]


def test_nesting_is_measured_outside_of_texts():
    assert parse_record(b'{"step": 1, "x": "' + b"[" * 200 + b'\\""}') is not None
    assert parse_record(b'{"step": 1, "x": ' + b"[" * 99 + b"]" * 99 + b"}") is not None
    assert parse_record(b'{"step": 1, "x": ' + b"[" * 100 + b"]" * 100 + b"}") is None
    assert parse_record(b'{"step": 1, "x": [' + b"[]," * 200 + b"[]]}") is not None
    assert parse_record(b'"\\' + b'"\\' * 10**6 + b"[" * 200) is None  # in linear time


HOSTS = (
    "evil.example", "evil.example:7070", "", "[::1", "a b",
    "[::1].evil.example", "[::1]evil.example", "[::1]:80.evil.example", "[::1]@evil.example", "[::1]:", "[::1]]", "[]",
    "localhost.evil.example", "localhost:80@evil.example", "localhost:80.evil.example", "localhost@evil.example",
    "evil.example:localhost", "localhost.", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "127.0.0.1:80@evil",
    "127.0.0.1:evil.example", "127.0.0.1.", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1: 80", "127.1", "2130706433",
    "0x7f.0.0.1", "[fe80::1%evil.example]", "[evil.example]", "[127.0.0.1]", "localhost,evil.example", "localhost evil",
    "user@localhost", "http://localhost", "localhost/", "::1", "::ffff:127.0.0.1", "localhost#", "me.example.evil",
)  # fmt: skip


OWN_HOSTS = ("localhost", "LocalHost:65535", "[::1]", "[::FFFF:127.0.0.1]:80", "[0:0:0:0:0:0:0:1]:7070", "10.0.0.3")


@pytest.mark.parametrize(
    ("host", "status"), [*((host, 421) for host in HOSTS), *((host, 200) for host in (*OWN_HOSTS, "ME.example:1"))]
)
def test_hosts_that_only_begin_or_end_like_this_machine_are_refused(host, status, folder):
    client = TestClient(build_board(folder.parent, names=("me.example",)), base_url=HOST)
    assert client.get("/api/runs", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("origin", ["http://[::1", "null", "http://127.0.0.1@evil", "http://evil", "127.0.0.1", ""])
def test_odd_origins_of_a_post_are_refused(origin, folder):
    client = TestClient(build_board(folder.parent), base_url=HOST)
    headers = {"Host": "127.0.0.1", "Origin": origin}
    assert client.post("/api/runs/a/control", headers=headers).status_code == 403
