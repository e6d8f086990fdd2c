"""Judges in whole runs: as the reward of GRPO and of Online DPO, beside other rewards, and failing."""

from __future__ import annotations

import pytest

from coalign import load_config
from coalign.launch.plan import prepare
from coalign.launch.trace import trace
from tests.runs import metrics, other_model, run, settings

DIGITS = {"fn": "tests.digits:digits", "weight": 0.0}


def configuration(directory, algorithm="rlaif", judge="pointwise", **runtime):
    """A judge with a tokenizer of its own (another end of sequence), and the share of digits beside it, logged."""
    config = settings(directory, algorithm, **{"steps": 2, "eval_at_start": False} | runtime)
    config["data"].pop("eval")
    own = other_model(directory / "judge", seed=3, initializer_range=0.3)
    config["reward"] = [{"model": "judge"}, DIGITS]
    config["models"]["judge"] = {
        "load": str(own),
        "chat_template": "auto",
        "module": "tests.judges:DigitJudge",
        "judge": judge if isinstance(judge, dict) else {"fn": judge},
    }
    return config


def test_the_judge_reads_what_was_sampled(tmp_path):
    config = configuration(tmp_path)
    run(config)
    for line in metrics(config):
        # Its grades are 1 + 9 · share with two decimals, brought back to 0 .. 1.
        assert line["reward/mean"] == pytest.approx(line["reward/digits/mean"], abs=2e-3)
        assert line["reward/judge/verdict"] == pytest.approx(line["reward/judge/mean"], abs=1e-6)
        assert line["time/judge.forward_step"] > 0
        assert line["samples/dropped"] == 0


def test_pairs_of_online_dpo_from_a_judge_that_compares(tmp_path):
    config = configuration(tmp_path, "online_dpo", judge="pairwise", steps=1)
    run(config)
    (line,) = metrics(config)
    assert line["reward/mean"] == pytest.approx(0.5)  # the shares of comparisons won
    assert line["reward/judge/verdict"] == 0.5  # this judge does not mind who comes first
    assert line["pairs/count"] + line["pairs/tied"] == 4 and line["pairs/count"] > 0


def test_a_real_model_judges(tmp_path):
    """With `module: judge` its own words, whatever they are; with `module: preference` its probabilities."""
    config = configuration(tmp_path, steps=1)
    config["models"]["judge"] |= {
        "module": "judge",
        "judge": {"fn": "pointwise", "template": "{response}", "pattern": r"never(\d)"},
        "sampling": {"max_new_tokens": 4},
    }
    with pytest.raises(
        Exception, match=r"none of 16 samples has a reward; .* judge 16; .judge. first on group 0, row 0: unreadable"
    ):
        run(config)
    config["models"]["judge"] |= {
        "module": "preference",
        "judge": {"fn": "pairwise", "template": "{prompt}{first}{second}", "opponents": 1},
    }
    run(config)
    (line,) = metrics(config)
    assert line["reward/mean"] == pytest.approx(0.5, abs=1e-6) and line["reward/std"] > 1e-4


def test_check_asks_the_judge(tmp_path):
    config = configuration(tmp_path)
    config["models"]["judge"]["module"] = "judge"
    checked = load_config(config)
    calls = {call.label: call for call in trace(prepare(checked)).calls}
    assert calls["judge.forward_step"].makes == ("reward/judge", "status")
    config["models"]["judge"]["judge"] = {"fn": "pairwise", "oponents": 1}
    checked = load_config(config)
    with pytest.raises(ValueError, match=r"models.judge.judge.oponents: unknown argument.*did you mean 'opponents'"):
        trace(prepare(checked))


@pytest.mark.parametrize(
    ("algorithm", "judge"),
    [
        ("online_dpo", "pairwise"),
        pytest.param("rlaif", "pointwise", marks=pytest.mark.slow),
        pytest.param("rlaif", "pairwise", marks=pytest.mark.slow),
    ],
)
def test_the_policy_learns_what_the_judge_likes(tmp_path, algorithm, judge):
    config = configuration(tmp_path, algorithm, judge, steps=10, prompts_per_step=8, samples_per_prompt=6)
    config["models"]["trainer"]["optimizer"] = {"lr": 2e-2}
    run(config)
    liked = [line["reward/digits/mean"] for line in metrics(config)]
    assert sum(liked[-3:]) > 2 * sum(liked[:3])
