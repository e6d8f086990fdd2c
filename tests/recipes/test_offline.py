"""Every offline recipe from its YAML: it learns, reports what its users look for, and resumes to the same weights."""

from __future__ import annotations

import pytest

from tests.runs import metrics, run, run_to_end, settings, weights_hash

# recipe: (loss falls to this share of its first value, statistics that must be there)
RECIPES = {
    "pretrain": (0.9, {"loss/nll"}),
    "sft": (0.9, {"loss/nll"}),
    "conditional_sft": (0.9, {"loss/nll"}),
    "reward_model": (0.95, {"loss/accuracy", "loss/margin", "loss/rewards/chosen"}),
    "process_reward": (0.95, {"loss/accuracy", "loss/nll"}),
    "dpo": (0.9, {"loss/accuracy", "loss/margin", "loss/rewards/chosen", "loss/logps/rejected"}),
    "orpo": (0.95, {"loss/accuracy", "loss/nll", "loss/log_odds"}),
    "simpo": (0.95, {"loss/accuracy", "loss/margin"}),
    "kto": (0.99, {"loss/accuracy", "loss/kl"}),
    "distill": (0.9, {"loss/kd", "loss/teacher_tail"}),
}


def configuration(directory, algorithm, **runtime):
    config = settings(directory, algorithm, **{"steps": 8, "prompts_per_step": 6} | runtime)
    config["models"]["trainer"]["optimizer"] |= {"schedule": "constant"}
    if algorithm == "pretrain":
        config["runtime"] |= {"tokens_per_step": 200}
    return config


QUICK = ("pretrain", "conditional_sft", "kto", "distill")  # of the others tests/golden has the curve in `make test`


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]
)
def test_it_learns_and_says_what_it_did(tmp_path, algorithm):
    share, expected = RECIPES[algorithm]
    config = configuration(tmp_path, algorithm, eval_every=4)
    lines = run_to_end(config)
    assert lines[-1]["eval/loss/value"] < share * lines[0]["eval/loss/value"]
    held_out = {f"eval/{name}" for name in expected}
    assert expected <= set(lines[-1]) and held_out <= set(lines[-1])


def test_a_reference_is_only_there_where_the_loss_reads_it(tmp_path):
    config = configuration(tmp_path, "dpo", steps=1)
    last = run_to_end(config)[-1]
    assert "time/reference.forward_step" in last and last["loss/value"] == pytest.approx(0.6931, abs=1e-3)  # log 2
    config |= {"loss": {"fn": "simpo"}, "output": str(tmp_path / "free")}
    assert "time/reference.forward_step" not in run_to_end(config)[-1]


def test_cached_reference_log_probs_change_nothing(tmp_path):
    plain = configuration(tmp_path, "dpo", steps=2, eval_every=2)
    run(plain)
    cached = plain | {"output": str(tmp_path / "cached")}
    assert run_to_end(cached, f"models.reference.cache={tmp_path / 'cache'}")[-1]["cache/misses"] == 0
    assert metrics(cached)[-1]["loss/value"] == pytest.approx(metrics(plain)[-1]["loss/value"], abs=1e-5)
    again = plain | {"output": str(tmp_path / "again")}
    run(again, f"models.reference.cache={tmp_path / 'cache'}")
    assert weights_hash(again, 2) == weights_hash(cached, 2)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    from transformers import AutoTokenizer

    config = configuration(tmp_path, "distill", steps=1)
    teacher = config["models"]["teacher"]["load"]
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["<plus>"])
    tokenizer.save_pretrained(teacher)
    with pytest.raises(ValueError, match=r"models\.teacher\.load: .* log-probs of tokens can only be compared"):
        run(config)


@pytest.mark.parametrize("algorithm", ["dpo", pytest.param("reward_model", marks=pytest.mark.slow)])
def test_a_trained_model_is_evaluated_against_the_reference_of_its_run(tmp_path, algorithm):
    from coalign import evaluate, load_config

    config = configuration(tmp_path, algorithm, eval_every=8)
    run(config)
    loaded = load_config(config)
    found = evaluate(loaded, model=tmp_path / "run" / "model", quiet=True)
    assert found["eval/loss/margin"] == pytest.approx(metrics(config)[-1]["eval/loss/margin"], rel=1e-2)
