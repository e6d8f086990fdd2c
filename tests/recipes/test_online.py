"""Recipes with rollouts from their YAML: where the divergence enters, what is refused, what resumed runs become."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from coalign import load_config
from coalign.config import ConfigError
from coalign.data.batch import Batch
from coalign.launch.check import check
from coalign.launch.plan import prepare
from coalign.recipes.reinforce import _prompts_of, _with_baseline
from coalign.report.display import Display
from coalign.types import Stat, Status, Total
from tests.runs import metrics, run, run_to_end, settings

COMPARING = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov")
IN_LOSS = (*COMPARING, "gpg", "opo", "gigpo", "topr", "reinforce_pp_baseline")
IN_REWARD = {
    "ppo": "shape_reward",
    "reinforce_pp": "shape_reward",
    "rloo": "sequence_kl_reward",
    "remax": "sequence_kl_reward",
}
ADVANTAGES = {
    **dict.fromkeys(COMPARING, "group"),
    "topr": "fixed_baseline",
    "ppo": "gae",
    **{name: name for name in ("reinforce_pp_baseline", "reinforce_pp", "rloo", "remax", "gpg", "opo", "gigpo")},
}
ENDS = [chr(code) for code in range(ord("a"), ord("z") + 1)]  # random bytes then end some responses and not others


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("online")


def ending(directory, algorithm, **runtime):
    config = settings(directory, algorithm, **{"eval_at_start": False} | runtime)
    config["models"]["policy"]["sampling"] |= {"stop": ENDS}
    return config


def drawn(config, capsys, *overrides):
    capsys.readouterr()
    check(load_config(config, overrides), Display())
    return capsys.readouterr().out


@pytest.mark.parametrize("algorithm", (*IN_LOSS, *IN_REWARD))
def test_check_draws_the_flow(home, algorithm, capsys):
    shown = drawn(settings(home, algorithm), capsys)
    assert "policy.generate" in shown and ADVANTAGES[algorithm] in shown and "no problem found" in shown
    for function in ("shape_reward", "sequence_kl_reward"):
        expected = "shape_reward" if algorithm == "gigpo" else IN_REWARD.get(algorithm)
        assert (function in shown) == (expected == function)
    if algorithm in IN_REWARD:
        shown = drawn(settings(home, algorithm), capsys, "kl=null")
        assert "reference" not in shown and "no problem found" in shown


@pytest.mark.parametrize("algorithm", IN_LOSS)
def test_the_divergence_is_charged_in_the_loss_alone(home, algorithm):
    config = settings(home, algorithm)
    with pytest.raises(ValueError, match=rf"kl: in `{algorithm}` the divergence .* set loss\.kl_coef"):
        prepare(load_config(config, ["kl.fn=FixedKL", "kl.coef=0.1"]))
    assert "reference" in prepare(load_config(config, ["loss.kl_coef=0.1"])).models
    assert "reference" not in prepare(load_config(config, ["loss.kl_coef=0"])).models


@pytest.mark.parametrize("algorithm", IN_REWARD)
def test_the_divergence_is_charged_in_the_reward_alone(home, algorithm):
    config = settings(home, algorithm)
    with pytest.raises(ValueError, match=rf"loss\.kl_coef: in `{algorithm}` .* charged twice"):
        prepare(load_config(config, ["loss.kl_coef=0.1"]))
    assert "reference" in prepare(load_config(config)).models
    for none in ("kl.coef=0", "kl.coef=0.0", "kl=null"):
        assert "reference" not in prepare(load_config(config, [none])).models


@pytest.mark.parametrize("algorithm", [name for name in (*IN_LOSS, "rloo") if name != "topr"])
def test_a_group_of_one_is_refused(home, algorithm):
    config = settings(home, algorithm, samples_per_prompt=1)
    with pytest.raises(ValueError, match=rf"samples_per_prompt is 1: `{algorithm}` compares.*use 2 or more"):
        prepare(load_config(config))


def test_the_constant_of_dr_grpo_is_the_longest_response(tmp_path):
    config = settings(tmp_path, "dr_grpo")
    config["models"]["policy"].pop("sampling")
    assert load_config(config).loss.constant_length == 256
    assert load_config(config, ["models.policy.sampling.max_new_tokens=77"]).loss.constant_length == 77
    assert load_config(config, ["loss.constant_length=5"]).loss.constant_length == 5
    with pytest.raises(ConfigError, match=r"constant_length.*has no effect with aggregation `token_mean`"):
        load_config(config, ["loss.aggregation=token_mean"])


def test_responses_that_were_cut_are_not_trained_on_in_dapo(tmp_path):
    config = ending(tmp_path, "dapo", steps=1)
    config["filter"] = None
    (line,) = run_to_end(config)
    cut = line["samples/truncated"] * line["samples/count"]
    assert line["samples/masked"] == pytest.approx(cut) and 0 < cut < line["samples/count"]
    assert line["tokens/trained"] == line["tokens/generated"] - 8 * cut
    config |= {"truncated": {"fn": "scale_truncated", "factor": 0.5}, "output": str(tmp_path / "scaled")}
    assert run_to_end(config)[0]["tokens/trained"] == line["tokens/generated"]


# ---- ReMax


def batch(group, **columns):
    return Batch(torch.ones(len(group), dtype=torch.int64), {}, {"group": torch.tensor(group), **columns})


def test_the_prompts_of_samples_are_each_group_once_without_responses():
    samples = Batch(
        torch.tensor([3, 4, 2]),
        {"tokens": torch.tensor([1, 2, 9, 1, 2, 8, 7, 5, 6], dtype=torch.int32)},
        {"group": torch.tensor([4, 4, 2]), "prompt_length": torch.tensor([2, 2, 1]), "rows": [{"a": 1}, {"a": 1}, {}]},
    )
    prompts = _prompts_of(samples)
    assert prompts["tokens"].tolist() == [1, 2, 5] and prompts.lengths.tolist() == [2, 1]
    assert prompts["group"].tolist() == [4, 2] and prompts["rows"] == [{"a": 1}, {}]


def test_each_sample_gets_the_reward_of_its_prompts_greedy_response():
    ok = torch.zeros(5, dtype=torch.uint8)
    samples = batch([7, 7, 3, 3, 9], status=ok)
    greedy = batch([3, 7], baseline=torch.tensor([0.25, -1.0]))  # that of 9 could not be scored
    out = _with_baseline(samples, greedy)
    assert out["baseline"][:4].tolist() == [-1.0, -1.0, 0.25, 0.25]
    assert out["status"].tolist() == [0, 0, 0, 0, int(Status.ERROR)]
    assert ok.tolist() == [0] * 5


def test_without_any_baseline_nothing_is_left():
    out = _with_baseline(batch([1], status=torch.zeros(1, dtype=torch.uint8)), batch([], baseline=torch.zeros(0)))
    assert out["status"].tolist() == [int(Status.ERROR)]


def test_the_greedy_response_is_scored_and_not_trained_on(tmp_path):
    config = ending(tmp_path, "remax", steps=2, samples_per_prompt=2)
    config["reward"] |= {"normalise": "running"}
    assert run(config) == 0
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_2" / "state.json").read_text())
    assert [moments["count"] for moments in state["rewards"].values()] == [16]  # of samples alone
    for line in metrics(config):
        assert line["samples/count"] == 8  # 4 prompts × 2: the four greedy ones are not among them
        assert line["tokens/trained"] == line["tokens/generated"]
        assert math.isfinite(line["baseline/mean"])


# ---- PPO's value model first


def test_a_policy_that_waits_stays_as_it_is_while_the_value_model_learns(tmp_path):
    config = settings(tmp_path, "ppo", steps=3, save_every=2, keep=3, eval_at_start=False)
    config["models"]["trainer"] |= {"learns_after": 2, "optimizer": {"lr": 3e-3, "schedule": "linear"}}
    config["ptx"] = {"data": config["data"]["train"], "rows_per_step": 2}
    lines = run_to_end(config)
    assert ["loss/value" in line for line in lines] == [False, False, True]
    assert all(line["value/loss/grad_norm"] > 0 for line in lines)
    assert all(line["loss/mismatch_max"] < 1e-4 and line["loss/ess"] > 0.99 for line in lines)
    assert lines[2]["loss/lr"] == pytest.approx(3e-3)  # its schedule begins when it does

    first = load_file(tmp_path / "model" / "model.safetensors")
    saved = tmp_path / "run" / "checkpoints"
    waited, learned = (load_file(saved / f"step_{step}" / "hf" / "model.safetensors") for step in (2, 3))
    assert all(first[name].equal(waited[name]) for name in first)
    assert any(not first[name].equal(learned[name]) for name in first)


# ---- rewards of an environment


async def paid_twice(episode):
    for worth in (0.25, 0.5):
        await episode.generate(max_new_tokens=3)
        episode.reward(worth)
        episode.write(" ")


def as_received(token_rewards, reward, loss_mask, segment):
    totals = torch.zeros_like(reward).index_add(0, segment, token_rewards)
    paid = {"paid": Stat.of(token_rewards, token_rewards != 0), "places": Total(float((token_rewards != 0).sum()))}
    return {"advantages": token_rewards, "total": Stat.of(totals), "reward": reward, **paid}


@pytest.mark.parametrize(("parts", "places", "total"), [(["episode"], 2, 0.75), (["episode", "digits"], 2, None)])
def test_what_an_environment_gives_counts_once_and_where_it_was_given(tmp_path, parts, places, total):
    config = settings(tmp_path, "reinforce_pp", steps=1, samples_per_prompt=2, eval_at_start=False)
    config["rollout"] = "tests.recipes.test_online:paid_twice"
    config["reward"] = [{"fn": {"digits": "tests.digits:digits"}.get(name, name)} for name in parts]
    config["advantage"] = "tests.recipes.test_online:as_received"
    config["kl"] = {"fn": "FixedKL", "coef": 0.0}
    (line,) = run_to_end(config)
    assert line["places"] == places * line["samples/count"] == 16
    assert line["total"] == pytest.approx(line["reward/mean"]) and line["reward/episode/mean"] == 0.75
    assert total is None or line["total"] == total


# ---- going on


def tricks(directory, algorithm):
    config = ending(directory, algorithm, steps=4, save_every=2)
    if algorithm == "ppo":
        config["reward"] |= {"normalise": "running", "clip": 1.0}
        config["kl"] = {"fn": "AdaptiveKL", "coef": 0.05, "target": 0.1, "horizon": 50}
        config["models"]["trainer"]["learns_after"] = 1
    return config
