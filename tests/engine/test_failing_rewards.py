"""Runs whose reward function fails on most samples: a bug ends the run, and no mean of survivors stands alone."""

import json
import sys

import pytest

from coalign.cli import main
from coalign.cluster.future import WorkerError
from coalign.report.step_line import format_fields, format_metric
from coalign.rewards.calls import RewardError
from tests.runs import ROOT, run, run_to_end, settings

HERE = "tests.rewards.failing:"


def configure(directory, fn, *, samples=4, **reward):
    config = settings(directory, "grpo", steps=2, eval_samples=samples, eval_sampling={"temperature": 1.0})
    return config | {"reward": [{"fn": HERE + fn, "retries": 0} | reward]}


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("forgets_zero", "reward 'forgets_zero' returned None for 12 of 16 samples: is a `return 0.0` missing?"),
        ("misspells_if_wrong", "reward 'misspells_if_wrong' fails on 12 of 16 samples: KeyError: 'anwser'"),
    ],
)
def test_a_bug_ends_the_run(tmp_path, capfd, fn, message):
    with pytest.raises((RewardError, WorkerError), match=message):
        run(configure(tmp_path, fn))
    assert fn in (tmp_path / "run" / "log.txt").read_text()
    assert "the run ended with an error" not in "".join(capfd.readouterr())  # whoever catches it says it


def test_a_bug_may_be_admitted(tmp_path):
    config = configure(tmp_path, "forgets_zero", max_bugs=0.75)
    last = run_to_end(config)[-1]
    assert last["eval/mean"] == last["eval/mean@4"] == 1.0 and last["eval/pass@1"] == 0.25
    assert (last["eval/samples/count"], last["eval/samples/dropped"]) == (4, 12)


def test_failures_are_wrong_in_pass_at_k_and_no_mean_stands_alone(tmp_path, caplog, capsys):
    config = configure(tmp_path, "is_away_if_wrong")
    last = run_to_end(config)[-1]
    assert last["eval/mean"] == 1.0 and last["eval/pass@1"] == 0.25 and last["eval/pass@4"] == 1.0
    assert format_metric(last, "eval/mean") == "1.000 (4 of 16)"
    assert "reward 1.000 (4 of 16)" in format_fields(last, {})
    warnings = [r.message for r in caplog.records if "failed on" in r.message]
    assert len(warnings) == 2 and "could not reach it" in warnings[0]
    assert "failed on 48 samples in all" in warnings[1]  # 12 of each of two evaluations and two steps
    assert "eval/mean 1.000 (4 of 16)" in " ".join(capsys.readouterr().out.split())


def test_what_is_logged_besides_costs_no_sample(tmp_path):
    config = configure(tmp_path, "says_too_much", samples=1)
    last = run_to_end(config)[-1]
    assert last["samples/count"] == 16 and last["reward/says_too_much/index"] == 1.5
    assert last["reward/says_too_much/ratio/not_logged"] == last["reward/says_too_much/text/not_logged"] > 0


def test_the_last_line_names_the_line_of_ones_own_code(tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(configure(tmp_path, "misspells")))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["coalign", "train", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        "error: reward 'misspells' fails on every sample: KeyError: 'anwser' (tests/rewards/failing.py:10)"
    )
