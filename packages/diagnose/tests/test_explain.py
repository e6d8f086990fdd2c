"""`coalign explain`: what it says of a run, a group and a step, and of what it cannot read."""

import json
import sys

import pytest

from coalign import cli
from coalign.engine.rollouts.journal import encode_line
from coalign_diagnose.explain import explain
from coalign_diagnose.run_history import format_time

LINES = [
    {"event": "run", "at": 0.0, "run": "a", "started": 5.0},
    {"event": "source", "at": 0.0, "number": 0, "name": "sums.jsonl"},
    {"event": "drawn", "at": 1.0, "step": 1, "version": 0, "groups": "0-2", "bundles": [2, 1],
     "rows": [[0, 5], [0, 3], [0, 9]]},
    {"event": "done", "at": 4.0, "groups": "0-1", "samples": [[[8, 1, 0.5, 0], [3, 0, 1.0, 0]], [[2, 0, 0.0, 0]]],
     "dropped": "1"},
    {"event": "taken", "at": 5.0, "step": 1, "groups": "0"},
    {"event": "trained", "at": 6.0, "step": 1, "loss": 0.25, "synced": 1},
    {"event": "done", "at": 7.0, "groups": "2", "samples": [[[5, 0, 1.0, [2, 0, 5, 1]]]]},
    {"event": "taken", "at": 8.0, "step": 2, "groups": "2"},
    {"event": "trained", "at": 150.0, "step": 2, "loss": 0.125, "synced": 2},
    {"event": "resumed", "at": 200.0, "step": 1, "drawn": 3, "waiting": "2"},
    {"event": "drawn", "at": 201.0, "step": 2, "version": 1, "groups": "3", "bundles": [1], "rows": [[0, 1]]},
    {"event": "taken", "at": 202.0, "step": 2, "groups": "2"},
    {"event": "trained", "at": 203.0, "step": 2, "loss": 0.5},
    {"event": "restarted", "at": 203.0, "step": 2, "processes": 1},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "journal.jsonl").write_bytes(b"".join(map(encode_line, LINES)))
    return tmp_path


def damage(folder, number):
    lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(b'"at":', b'"at":1')
    (folder / "journal.jsonl").write_bytes(b"".join(lines))


def test_the_summary_accounts_for_every_group(folder):
    assert explain(folder).splitlines() == [
        f"run               {folder}: 2 steps, and the loop has not ended",
        "groups            4 drawn = 2 trained + 1 dropped + 1 waiting",
        "dropped           filter 1",
        "drawn to trained  median 0:01:44, longest 0:03:22 (group 2)",
        "staleness         mean 0.12, greatest 1 weight versions",
        "restarts          1 process lost and started again",
        "                  the run was started again at 0:03:20, and went on after step 1",
        "discarded         1 step, and what became of 1 group until then",
    ]


def test_the_life_of_a_group_has_its_weights_and_what_was_discarded(folder):
    assert explain(folder, group=2).splitlines() == [
        "group 2: row 9 of sums.jsonl",
        "  discarded: the run was started again at 0:03:20, and went on after step 1",
        "     1.00 s  drawn for step 1, begun at weight version 0",
        "     7.00 s  complete and scored: 1 sample, 5 tokens; kept",
        "               sample  tokens  status     reward      written by",
        "               0       5       ok         1           version 0 (2 tokens), version 1 (3 tokens)",
        "     8.00 s  taken by step 2",
        "    0:02:30  trained on by step 2 (loss 0.125)",
        "",
        "group 2: row 9 of sums.jsonl",
        "     1.00 s  drawn for step 1, begun at weight version 0",
        "     7.00 s  complete and scored: 1 sample, 5 tokens; kept",
        "               sample  tokens  status     reward      written by",
        "               0       5       ok         1           version 0 (2 tokens), version 1 (3 tokens)",
        "    0:03:22  taken by step 2",
        "    0:03:23  trained on by step 2 (loss 0.5)",
    ]
    assert "4.00 s  complete and scored: 1 sample, 2 tokens; dropped by the filter" in explain(folder, group=1)
    assert explain(folder, group=3).splitlines()[-1].strip() == "waiting: it is not complete"


def test_a_step_names_its_groups(folder):
    assert explain(folder, step=1).splitlines() == [
        "step 1: ended at 6.00 s, loss 0.25",
        "  group 0: row 5 of sums.jsonl, mean reward 0.75, written by version 0",
    ]


def test_json_has_the_same(folder):
    summary = json.loads(explain(folder, as_json=True))
    assert (summary["drawn"], summary["trained"], summary["waiting"], summary["dropped"]) == (4, 2, 1, {"filter": 1})
    group = json.loads(explain(folder, group=0, as_json=True))["group"]
    assert (group["trained_by"], group["row"], group["samples"][1]) == (1, 5, [3, 0, 1.0, 0])
    assert json.loads(explain(folder, step=2, as_json=True))["discarded"][0]["loss"] == 0.125


def test_damaged_lines_are_counted_named_and_left_out(folder):
    damage(folder, 8)
    damage(folder, 5)
    said = explain(folder).splitlines()
    assert said[0] == "2 damaged lines left out, with what they said: 5, 8"
    assert json.loads(explain(folder, as_json=True))["damaged_lines"] == [5, 8]
    damage(folder, 3)  # who was drawn
    assert "the journal does not say when it was drawn" in explain(folder, group=0)


def test_no_damaged_line_makes_it_fail(folder):
    whole = (folder / "journal.jsonl").read_bytes()
    for number in range(1, len(LINES) + 1):
        damage(folder, number)
        for options in ({}, {"group": 2}, {"step": 2}):
            assert explain(folder, **options).startswith(f"1 damaged line left out, with what they said: {number}\n")
        (folder / "journal.jsonl").write_bytes(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group", "99"], "has no group 99; the nearest are 0, 1, 2, 3"),
        (["--step", "7"], "has no step 7; the nearest are 1, 2"),
        (["--group", "1", "--step", "1"], "give --group or --step, not both"),
    ],
)
def test_what_is_not_there_is_one_line(folder, monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["coalign", "explain", str(folder), *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_folder_without_a_readable_journal_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run folder"):
        explain(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"has no journal.jsonl"):
        explain(tmp_path)
    (tmp_path / "journal.jsonl").write_text('{"step": 1}\nnoise\n')
    with pytest.raises(ValueError, match="2 lines, and none can be read"):
        explain(tmp_path)


def test_times_are_readable():
    assert [format_time(each) for each in (0.126, 100, 7384)] == ["0.13 s", "0:01:40", "2:03:04"]
