"""What is given to `coalign diagnose`: files, folders, standard input, and what is no log at all."""

import gzip
import json
import sys

import pytest

from coalign import cli
from coalign_diagnose.logs import LogFile
from coalign_diagnose.verdict import judge, judge_paths
from packages.diagnose.tests.samples import EXAMPLES, name_cause
from packages.diagnose.tests.test_verdict import OOM, timeout


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["coalign", "diagnose", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_bad_input_is_refused_in_one_line(monkeypatch, capsys, tmp_path):
    bad = {"gone.log": None, "folder": None, "empty.log": b"", "binary.log": bytes(range(256)) * 40}
    bad |= {"apt.log": b"Get:1 http://deb.debian.org bookworm InRelease\nFetched 12 kB\n" * 100}
    bad |= {"one_line.log": b"a" * 5_000_000}
    (tmp_path / "folder").mkdir()
    for name, content in bad.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        code, out, err = run(monkeypatch, capsys, tmp_path / name)
        assert code == 2 and not out and err.startswith("error: ") and len(err.splitlines()) == 1, (name, out, err)
        assert name in err


def test_an_error_at_the_end_of_a_huge_line_is_found():
    text = b"x" * 3_000_000 + b"\rRuntimeError: CUDA error: device-side assert triggered\n"
    verdict = judge([LogFile("one.log", text)])
    assert name_cause(verdict) == "device-assert" and verdict.evidence[0][0] == "one.log:1"


def test_a_directory_of_many_ranks_is_read(tmp_path):
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(OOM if rank == 1 else timeout(rank))
    (tmp_path / "model.bin").write_bytes(b"\0" * 100)
    (tmp_path / "code.py").write_text("raise ValueError('x')\n")
    verdict, logs = judge_paths([str(tmp_path)])
    assert name_cause(verdict) == "device-memory-backward" and verdict.origin.rank == 1 and len(logs) == 3


def test_a_run_folder_gives_its_log_and_its_stacks(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    (tmp_path / "log.txt").write_text("2026-03-10 10:00:00,000 INFO coalign.launch.run: loading trainer\n")
    stalls = tmp_path / "stalls" / "20260310-110000"
    stalls.mkdir(parents=True)
    frame = '  File "/x/{}.py", line 5 in {}\n'
    for rank in range(3):
        inner = frame.format("data", "read") if rank == 1 else frame.format("distributed_c10d", "all_reduce")
        (stalls / f"trainer_rank_{rank}.txt").write_text(
            f"Current thread 0x1 (most recent call first):\n{inner}" + frame.format("train", "step")
        )
    verdict, logs = judge_paths([str(tmp_path)])
    assert name_cause(verdict) == "hang-ranks" and verdict.origin.rank == 1 and len(logs) == 4
    assert "is in read (data.py:5), while 2 of 3 wait in all_reduce" in verdict.evidence[0][1]


def test_files_standard_input_and_json(monkeypatch, capsys, tmp_path):
    (tmp_path / "a.log").write_text("step 1 loss 2\n")
    with gzip.open(tmp_path / "b.log.gz", "wb") as file:
        file.write(OOM.encode())
    code, out, _ = run(monkeypatch, capsys, tmp_path / "a.log", tmp_path / "b.log.gz")
    assert code == 0 and out.startswith("cause: device memory ran out in the backward pass (2.00 GiB asked for)\n")
    assert "b.log.gz:4: torch.OutOfMemoryError" in out and "do: Smaller micro-batches" in out
    code, out, _ = run(monkeypatch, capsys, "--json", tmp_path / "a.log")
    assert code == 1 and json.loads(out) == {"cause": None, "files": 1, "survived_errors": 0}
    code, out, _ = run(monkeypatch, capsys, tmp_path / "a.log")
    assert out.startswith("no failure found in")


def test_what_coalign_sets_is_said_of_a_coalign_run_alone(monkeypatch, capsys, tmp_path):
    (tmp_path / "x.log").write_text(OOM)
    assert "settings:" not in run(monkeypatch, capsys, tmp_path / "x.log")[1]
    (tmp_path / "x.log").write_text("2026-03-10 INFO coalign.launch.run: loading trainer\n" + OOM)
    assert "settings: models.*.max_tokens_per_micro" in run(monkeypatch, capsys, tmp_path / "x.log")[1]


def test_no_text_makes_it_fail():
    """Cut and mixed examples are judged, whatever comes of it."""
    whole = "\n".join(text for example in EXAMPLES.values() for text in example["positive"]).encode()
    for start in range(0, len(whole), 701):
        judge([LogFile("x", whole[start : start + 900][::1]), LogFile("y", whole[start : start + 300] + b"\xff\xfe\r")])


@pytest.mark.parametrize("text", ["\n", "\r", "\r\n\r\n", "x"])
def test_the_smallest_texts_are_read(text):
    log = LogFile("x", text.encode())
    assert [log.number(line) for line in range(len(log))] and judge([log]).cause is None
