"""Judges in whole runs: as the reward of GRPO and of Online DPO, beside other rewards, and failing."""

from __future__ import annotations

import pytest

from tests.runs import other_model, run, run_to_end, settings, trace_calls


def configuration(directory, algorithm="rlaif", judge="pointwise", **runtime):
    """A judge with a tokenizer of its own (another end of sequence), and the share of digits beside it, logged."""
    config = settings(directory, algorithm, **{"steps": 2, "eval_at_start": False} | runtime)
    config["data"].pop("eval")
    own = other_model(directory / "judge", seed=3, initializer_range=0.3)
    config["reward"] = [{"model": "judge"}, {"fn": "tests.digits:digits", "weight": 0.0}]
    config["models"]["judge"] = {"load": str(own), "chat_template": "auto", "judge": {"fn": judge}}
    config["models"]["judge"] |= {"module": "tests.judges:DigitJudge"}
    return config


def test_the_judge_reads_what_was_sampled(tmp_path):
    config = configuration(tmp_path)
    for line in run_to_end(config):
        # Its grades are 1 + 9 · share with two decimals, brought back to 0 .. 1.
        assert line["reward/mean"] == pytest.approx(line["reward/digits/mean"], abs=2e-3)
        assert line["reward/judge/verdict"] == pytest.approx(line["reward/judge/mean"], abs=1e-6)
        assert line["time/judge.forward_step"] > 0
        assert line["samples/dropped"] == 0


def test_pairs_of_online_dpo_from_a_judge_that_compares(tmp_path):
    config = configuration(tmp_path, "online_dpo", judge="pairwise", steps=1)
    (line,) = run_to_end(config)
    assert line["reward/mean"] == pytest.approx(0.5)  # the shares of comparisons won
    assert line["reward/judge/verdict"] == 0.5  # this judge does not mind who comes first
    assert line["pairs/count"] + line["pairs/tied"] == 4 and line["pairs/count"] > 0


def test_a_rubric_is_a_reward(tmp_path):
    config = configuration(tmp_path, "grpo", steps=2)
    rubric = ["Has the digit 1.", {"criterion": "Has the digit 2.", "weight": 3}]
    rubric += [{"criterion": "Has the digit 3.", "weight": -1}]
    config["models"]["judge"]["judge"] = {"fn": "coalign_graders.services.rubric:Rubric", "criteria": rubric}
    config["reward"] = [{"model": "judge"}, {"fn": "tests.digits:rubric", "weight": 0.0}]
    for line in run_to_end(config):
        assert line["reward/mean"] == pytest.approx(line["reward/rubric/mean"], abs=1e-6)
        assert line["reward/judge/criterion_2"] == pytest.approx(line["reward/rubric/two"], abs=1e-6)
        assert line["reward/judge/criterion_2/count"] == 16 and line["samples/dropped"] == 0


def test_a_real_model_judges(tmp_path):
    """With `module: judge` its own words, whatever they are; with `module: preference` its probabilities."""
    config = configuration(tmp_path, steps=1)
    config["models"]["judge"] |= {
        "module": "judge",
        "judge": {"fn": "pointwise", "template": "{response}", "pattern": r"never(\d)"},
        "sampling": {"max_new_tokens": 4},
    }
    message = r"none of 16 samples has a reward; .* judge 16; .judge. first on group 0, row 0: unreadable"
    with pytest.raises(Exception, match=message):
        run(config)
    config["models"]["judge"] |= {
        "module": "preference",
        "judge": {"fn": "pairwise", "template": "{prompt}{first}{second}", "opponents": 1},
    }
    (line,) = run_to_end(config)
    assert line["reward/mean"] == pytest.approx(0.5, abs=1e-6) and line["reward/std"] > 1e-4


def test_check_asks_the_judge(tmp_path):
    config = configuration(tmp_path)
    config["models"]["judge"]["module"] = "judge"
    assert trace_calls(config)["judge.forward_step"].makes == ("reward/judge", "status")
    config["models"]["judge"]["judge"] = {"fn": "pairwise", "oponents": 1}
    with pytest.raises(ValueError, match=r"models.judge.judge.oponents: unknown argument.*did you mean 'opponents'"):
        trace_calls(config)
