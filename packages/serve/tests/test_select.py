"""What of scored responses is learnt from, worked out by hand."""

import pytest

from coalign_serve.config.stages import SelectConfig
from coalign_serve.select import select
from packages.serve.tests.interruption import read_rows, write_rows


def said(group, response, score, **more):
    return {"prompt": f"q{group}", "group": group, "response": response, "score": score, **more}


def selected(path, tmp_path, **changes):
    counts = select(SelectConfig(data=str(path), **changes), tmp_path / "selected.jsonl")
    return read_rows(tmp_path / "selected.jsonl"), counts


@pytest.fixture
def path(tmp_path):
    scores = [(0, "a", 0.0), (0, "b", 1.0), (0, "c", 1.0), (0, "d", -1.0), (1, "a", 0.5), (1, "b", 0.5), (2, "a", 0.25)]
    rows = [said(*row) for row in [*scores, (3, "a", None)]]
    rows += [said(4, "a", 3.0, status="truncated"), said(4, "b", 1.0), said(4, "b", 1.0), said(4, "c", 0.75)]
    return write_rows(tmp_path / "scored.jsonl", *rows)


def conversation(group, response, score):
    messages = [{"role": "user", "content": f"q{group}"}, {"role": "assistant", "content": response}]
    return {"messages": messages, "score": score, "group": group}


def test_the_best_of_each_prompt(path, tmp_path):
    rows, counts = selected(path, tmp_path, keep="best")
    assert rows == [conversation(*x) for x in [(0, "b", 1.0), (1, "a", 0.5), (2, "a", 0.25), (4, "b", 1.0)]]
    assert counts == {"prompts": 5, "rows": 4, "unscored": 1, "truncated": 1, "dropped/no_response": 1}
    rows, counts = selected(path, tmp_path, keep="best", threshold=0.5)
    assert [row["group"] for row in rows] == [0, 1, 4] and counts["dropped/below_threshold"] == 1


def test_every_response_that_is_good_enough_once(path, tmp_path):
    rows, counts = selected(path, tmp_path, keep="threshold", threshold=1.0)
    assert rows == [conversation(*x) for x in [(0, "b", 1.0), (0, "c", 1.0), (4, "b", 1.0)]]
    assert counts["dropped/below_threshold"] == 2
    rows, _ = selected(path, tmp_path, keep="threshold", threshold=1.0, truncated="keep")
    assert rows[2] == conversation(4, "a", 3.0)


def test_every_response_once(path, tmp_path):
    rows, _ = selected(path, tmp_path, keep="all")
    found = [f"{row['group']}{row['messages'][-1]['content']}" for row in rows]
    assert found == ["0a", "0b", "0c", "0d", "1a", "1b", "2a", "4b", "4c"]


def test_every_response_with_a_label(path, tmp_path):
    rows, _ = selected(path, tmp_path, keep="labelled", threshold=1.0)
    assert rows[0] == {"prompt": [{"role": "user", "content": "q0"}], "answer": "a", "label": False, "group": 0}
    assert [row["label"] for row in rows] == [False, True, True, False, False, False, False, True, False]


def test_the_best_against_the_worst(path, tmp_path):
    rows, counts = selected(path, tmp_path, keep="best_worst")
    scores = {"margin": 2.0, "chosen_score": 1.0, "rejected_score": -1.0}
    assert rows[0].pop("prompt") == [{"role": "user", "content": "q0"}]
    assert rows[0] == {"chosen": "b", "rejected": "d", **scores, "group": 0}
    assert [row["group"] for row in rows] == [0, 4]
    assert counts["dropped/tie"] == 1 and counts["dropped/single_response"] == 1
    rows, counts = selected(path, tmp_path, keep="best_worst", min_margin=0.5)
    assert [row["group"] for row in rows] == [0] and counts["dropped/below_margin"] == 1


def test_without_groups_equal_prompts_belong_together(tmp_path):
    rows = [{"prompt": p, "response": r, "score": s} for p, r, s in [("p", "a", 0), ("q", "b", 1), ("p", "c", 2)]]
    found, counts = selected(write_rows(tmp_path / "s.jsonl", *rows), tmp_path, keep="best_worst")
    assert [(row["chosen"], row["rejected"]) for row in found] == [("c", "a")] and counts["prompts"] == 2


def test_the_groups_of_two_files_are_not_mixed(tmp_path):
    files = [str(write_rows(tmp_path / f"{i}.jsonl", said(0, "a", i), said(0, "b", i + 1))) for i in (0, 10)]
    counts = select(SelectConfig(data=files, keep="best_worst"), tmp_path / "out.jsonl")
    assert counts["prompts"] == counts["rows"] == 2


def test_conversations_and_tools_are_kept(tmp_path):
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    row = {"prompt": "q", "messages": asked, "tools": [{"name": "f"}], "response": "r", "score": 1.0}
    ((found,), _) = selected(write_rows(tmp_path / "t.jsonl", row), tmp_path, keep="best")
    assert found["messages"] == [*asked, {"role": "assistant", "content": "r"}] and found["tools"] == [{"name": "f"}]


def test_rows_that_leave_nothing_or_have_no_score(path, tmp_path):
    message = r"nothing is left to learn from of .*scored.jsonl: .*4 dropped/below_threshold"
    with pytest.raises(ValueError, match=message):
        selected(path, tmp_path, keep="threshold", threshold=9.0, truncated="keep")
    assert not (tmp_path / "selected.jsonl").exists()
    with pytest.raises(ValueError, match=r"u\.jsonl:1: no `score` and `response`; the row has prompt, response"):
        selected(write_rows(tmp_path / "u.jsonl", {"prompt": "q", "response": "r"}), tmp_path, keep="best")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": "threshold"}, "keep `threshold` needs it"),
        ({"keep": "labelled"}, "keep `labelled` needs it"),
        ({"keep": "all", "threshold": 1.0}, "has no effect with keep `all`"),
        ({"keep": "best", "min_margin": 1.0}, "has no effect with keep `best`"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        SelectConfig(**settings)
