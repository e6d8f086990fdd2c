"""Whole runs in this process: what they write, how they go on, what they refuse."""

import json
import logging
from pathlib import Path

import pytest
import torch

from coalign import load_config
from coalign.engine.hooks import checkpoint
from coalign.launch.check import check as examine
from coalign.recipes.grpo import GRPO
from coalign.report.display import Display
from coalign.run_files.checkpoints import CorruptCheckpoint
from coalign.types import Stat
from tests.runs import metrics, run, settings, stopping_after, weights_hash


@pytest.mark.parametrize("algorithm", ["sft", "ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_run_folder(tmp_path, algorithm):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plots = algorithm == "ppo"  # which has the most curves
    config = settings(tmp_path, algorithm, eval_every=2, timeline_every=2, plots=plots)
    assert run(config) == 0
    folder = Path(config["output"])
    lines = metrics(config)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines[1:]:
        assert {"time/step", "loss/value", "loss/grad_norm", "tokens/trained", "throughput/trained"} <= set(line)
    assert [line["step"] for line in lines if any(k.startswith("eval/") for k in line)] == [0, 2, 4]
    for name in ("config.yaml", "log.txt", *(f"plots/{name}.png" for name in ("goodput", "timeline") if plots)):
        assert (folder / name).exists()
    hf = folder / "checkpoints" / "step_4" / "hf"
    model = AutoModelForCausalLM.from_pretrained(hf)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    AutoTokenizer.from_pretrained(hf)
    if algorithm != "sft":
        samples = [json.loads(line) for line in (folder / "samples.jsonl").read_bytes().splitlines()]
        sample = next(s for s in samples if s["phase"] == "train" and s["step"] == 3)
        assert sample["prompt"] and isinstance(sample["reward"], float)
        assert sample["versions"] == [[2, sum(n for _, n in sample["versions"])]]


@pytest.mark.parametrize("algorithm", ["sft", "grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_stopped_run_ends_with_the_same_weights(tmp_path, algorithm):
    whole = settings(tmp_path, algorithm, eval_at_start=False, save_every=2)
    run(whole)
    resumed = whole | {"output": str(tmp_path / "resumed")}
    # The first half of a run of four steps: schedules must not see the difference.
    stopped = resumed | {"runtime": resumed["runtime"]}
    with stopping_after(2):
        run(stopped)
    assert [line["step"] for line in metrics(resumed)] == [1, 2]
    run(resumed)
    assert [line["step"] for line in metrics(resumed)] == [1, 2, 3, 4]
    assert weights_hash(resumed, 4) == weights_hash(whole, 4)
    for key in ("loss/value", "loss/grad_norm"):
        assert [line[key] for line in metrics(resumed)] == [line[key] for line in metrics(whole)]


def test_a_run_that_resumes_never_keeps_what_an_earlier_run_made(tmp_path):
    config = settings(tmp_path, "sft", save_every=1, keep=2, eval_at_start=False)
    run(config)
    folder = Path(config["output"])
    before = weights_hash(config, 4)
    with stopping_after(1):
        run(config, "runtime.resume=never")
    assert [line["step"] for line in metrics(config)] == [1]
    assert (folder / "model").resolve() == (folder / "checkpoints" / "step_1" / "hf").resolve()
    (folder / "checkpoints").rename(folder / "checkpoints.second")
    (folder / "checkpoints.before-1").rename(folder / "checkpoints")
    assert weights_hash(config, 4) == before
    kept = [json.loads(line)["step"] for line in (folder / "metrics.jsonl.before-1").read_bytes().splitlines()]
    assert kept == [1, 2, 3, 4]


@pytest.mark.parametrize("kv", ["recompute", pytest.param("keep", marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_an_asynchronous_run_trains_on_each_group_once_also_when_it_is_stopped(tmp_path, algorithm, kv):
    config = settings(tmp_path, algorithm, steps=6, max_staleness=2, save_every=3, log_samples=99, eval_at_start=False)
    config["rollout"] = {"kv": kv}
    with stopping_after(3):
        run(config)
    assert run(config) == 0
    lines, groups = metrics(config), {}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    ages = [line["samples/staleness_max"] for line in lines]
    assert all(age <= min(step, 2) for step, age in enumerate(ages)) and max(ages) > 0
    for line in (Path(config["output"]) / "samples.jsonl").read_bytes().splitlines():
        sample = json.loads(line)
        if sample["phase"] == "train":
            groups.setdefault(sample["group"], set()).add(sample["step"])
    drawn = config["runtime"]["prompts_per_step"] * 6
    assert sorted(groups) == list(range(drawn)) and all(len(steps) == 1 for steps in groups.values())


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    config = settings(tmp_path, "grpo", save_every=2, eval_at_start=False)
    run(config)
    before = weights_hash(config, 4)
    state = Path(config["output"]) / "checkpoints" / "step_4" / "state.json"
    state.write_text(state.read_text().replace('"step": 4', '"step": 3'))
    with pytest.raises(CorruptCheckpoint, match=r"state.json have changed"):
        run(config, f"runtime.resume={state.parent}")
    with caplog.at_level(logging.WARNING):
        assert run(config) == 0
    assert "trying the one before" in caplog.text
    assert weights_hash(config, 4) == before


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = settings(tmp_path, "sft", save_every=2, steps=2)
    run(config)
    from tests.tiny import tiny_model_dir

    tiny_model_dir(tmp_path / "other", hidden=48, layers=1)
    config["models"]["trainer"]["load"] = str(tmp_path / "other")
    config["runtime"]["steps"] = 4
    with pytest.raises(
        Exception, match=r"step_2/models/trainer is of another model or optimizer: .* is \(320, 32\) there"
    ):
        run(config, "runtime.allow_changed=models")


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    config = settings(tmp_path, "sft", steps=1)
    run(config)
    other = settings(tmp_path, "grpo", steps=2)
    with pytest.raises(ValueError, match="is of a `sft` run; this one is `grpo`"):
        run(other)


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    real, calls = checkpoint.write_engine_state, []

    def full(engine, directory):
        calls.append(engine.step)
        files = real(engine, directory)
        if engine.step == 2:
            files.finish()  # the directory is deleted next
            raise OSError(28, "No space left on device")
        return files

    monkeypatch.setattr(checkpoint, "write_engine_state", full)
    config = settings(tmp_path, "grpo", save_every=1, steps=3, eval_at_start=False)
    with caplog.at_level(logging.WARNING):
        assert run(config) == 0
    assert calls == [1, 2, 3]
    assert "the last good one is step 1" in caplog.text
    assert [line.get("checkpoint/failed") for line in metrics(config)] == [None, None, 1.0]
    folder = Path(config["output"]) / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step_1", "step_3"]


def test_the_best_checkpoint_is_kept(tmp_path):
    config = settings(tmp_path, "grpo", steps=4, save_every=1, keep=1, best="reward/mean", eval_at_start=False)
    run(config)
    rewards = [line["reward/mean"] for line in metrics(config)]
    best = rewards.index(max(rewards)) + 1
    kept = {p.name for p in (Path(config["output"]) / "checkpoints").iterdir()}
    assert kept == {"step_4", f"step_{best}"}
    model = Path(config["output"]) / "model"
    assert model.resolve() == (Path(config["output"]) / "checkpoints" / f"step_{best}" / "hf").resolve()


def test_the_model_of_a_run_is_that_of_its_newest_checkpoint(tmp_path):
    config = settings(tmp_path, "sft", steps=3, save_every=1)
    run(config)
    model = Path(config["output"]) / "model"
    assert model.is_symlink() and model.resolve().parent.name == "step_3"
    assert (model / "model.safetensors").is_file()


def test_one_sample_has_no_group_baseline(tmp_path):
    config = settings(tmp_path, "grpo", samples_per_prompt=1)
    with pytest.raises(ValueError, match=r"samples_per_prompt is 1.*use 2 or more"):
        run(config)
    assert not Path(config["output"]).exists()


def test_a_kl_charged_twice_is_refused(tmp_path):
    config = settings(tmp_path, "ppo") | {"loss": {"fn": "policy_gradient", "kl_coef": 0.1}}
    with pytest.raises(ValueError, match="charged twice"):
        run(config)


def test_a_reward_that_always_raises_stops_the_run(tmp_path, capfd):
    config = settings(tmp_path, "grpo") | {"reward": {"fn": "tests.functions:raises", "retries": 0}}
    with pytest.raises(Exception, match="divides by zero"):
        run(config)
    assert "ZeroDivisionError" in (tmp_path / "run" / "log.txt").read_text()
    assert "the run ended with an error" not in "".join(capfd.readouterr())  # whoever catches it says it


def test_a_reward_that_fails_for_some_drops_those_and_counts_them(tmp_path):
    config = settings(tmp_path, "grpo", steps=2, eval_at_start=False, eval_every=0)
    config |= {"reward": {"fn": "tests.functions:fails_for_some", "retries": 0}}
    config["data"].pop("eval")
    run(config)
    for line in metrics(config):
        assert line["samples/dropped"] == 4  # one of the four samples of each of four prompts
        assert line["samples/count"] == 12
        assert line["reward/mean"] == pytest.approx((0 + 1.0 + 1.5) / 3)  # NaN never became a number


def test_a_missing_column_is_named(tmp_path):
    config = settings(tmp_path, "grpo") | {"advantage": {"fn": "gae"}}
    with pytest.raises(Exception, match=r"gae needs the column '(token_rewards|values)', which nobody produced"):
        run(config)


class Bonus(GRPO):
    """A flow of one's own: GRPO with something added to its advantages."""

    def train_flow(self, batch):
        return self.trainer.train_step(self.apply(add_reward, self.apply(self.advantage, batch), bonus=0.5))


def add_reward(advantages, reward, segment, *, bonus: float):
    return {"advantages": advantages + bonus * reward[segment], "bonus": Stat(bonus)}


def test_a_flow_of_ones_own(tmp_path):
    config = settings(tmp_path, "grpo", steps=2, eval_at_start=False)
    run(config)
    mine = config | {"algorithm": "tests.engine.test_runs:Bonus", "output": str(tmp_path / "mine")}
    mine |= {"advantage": {"fn": "group"}, "loss": {"fn": "policy_gradient"}}
    run(mine)
    assert [line["bonus"] for line in metrics(mine)] == [0.5, 0.5]
    assert metrics(mine)[0]["reward/mean"] == metrics(config)[0]["reward/mean"]
    assert weights_hash(mine, 2) != weights_hash(config, 2)


def test_a_reward_model_instead_of_a_function(tmp_path):
    config = settings(tmp_path, "ppo", steps=2, eval_at_start=False)
    config.pop("reward")
    reward = {"module": "fsdp", "load": str(tmp_path / "model"), "head": "reward", "frozen": True}
    config["models"]["reward"] = reward
    with pytest.raises(Exception, match=r"lacks \['score.weight'\].*was not trained as one"):
        run(config)
    config["models"]["reward"] = reward | {"head_init": "zero"}
    assert run(config) == 0
    assert [line["reward/mean"] for line in metrics(config)] == [0.0, 0.0]  # a head of zeros


def test_check_draws_the_flow_and_loads_nothing(tmp_path, capsys):
    config = settings(tmp_path, "ppo")
    examine(load_config(config), Display())
    shown = capsys.readouterr().out
    for part in (
        "policy.generate",
        "shape_reward",
        "gae",
        "value.train_step",
        "advantages, returns",
        "no problem found",
    ):
        assert part in shown
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # a header, and no weights
    examine(load_config(config), Display())


def test_check_tries_the_losses(tmp_path):
    config = settings(tmp_path, "grpo") | {"loss": {"fn": "value"}}
    with pytest.raises(ValueError, match=r"models.trainer: the loss `value` fails .*: .*returns"):
        examine(load_config(config), Display())


def test_check_tries_the_adapters(tmp_path):
    config = settings(tmp_path, "grpo")
    config["models"]["trainer"]["lora"] = {"target": ["*.q_porj"]}
    with pytest.raises(ValueError, match=r"models.trainer.lora.target: '\*.q_porj' matches none .*q_proj"):
        examine(load_config(config), Display())
