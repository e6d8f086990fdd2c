"""Whole runs in this process: what they write, how they go on, what they refuse."""

import json
import logging
from pathlib import Path

import pytest
import torch

from coalign import load_config
from coalign.checkpoint import schedule
from coalign.checkpoint.manifest import CorruptCheckpoint
from coalign.launch.check import check as examine
from coalign.report.display import Display
from tests.runs import metrics, other_model, run, run_to_end, samples, settings, stopping_after, weights_hash


@pytest.mark.parametrize("algorithm", ["sft", "ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_run_folder(tmp_path, algorithm):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plots, rollouts = algorithm == "ppo", algorithm != "sft"  # ppo has the most curves
    config = settings(tmp_path, algorithm, eval_every=2, timeline_every=2, plots=plots, journal=not rollouts)
    assert run(config) == 0
    folder = Path(config["output"])
    lines = metrics(config)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines[1:]:
        assert {"time/step", "loss/value", "loss/grad_norm", "tokens/trained", "throughput/trained"} <= set(line)
        assert {"idle/trainer", "time/trainer.train_step", "memory/trainer"} <= set(line)
        assert not rollouts or {"idle/policy", "idle/reward_functions", "time/policy.generate"} <= set(line)
        assert all(0.0 <= value <= 1.0 for name, value in line.items() if name.startswith("idle/"))
    assert [line["step"] for line in lines if any(k.startswith("eval/") for k in line)] == [0, 2, 4]
    for name in ("config.yaml", "log.txt", *(f"plots/{name}.png" for name in ("goodput", "timeline") if plots)):
        assert (folder / name).exists()
    assert not (folder / "journal.jsonl").exists()  # it is off, or there are no rollouts
    assert sorted(file.name for file in (folder / "timeline").iterdir()) == ["step_2.json", "step_4.json"]
    trace = json.loads((folder / "timeline" / "step_4.json").read_text())["traceEvents"]
    drawn = {event["name"] for event in trace if event["ph"] == "X"}
    assert {"train", "train_step"} <= drawn and (not rollouts or {"rollout", "sync", "generate"} <= drawn)
    hf = folder / "checkpoints" / "step_4" / "hf"
    assert (folder / "model").is_symlink() and (folder / "model").resolve() == hf.resolve()
    model = AutoModelForCausalLM.from_pretrained(hf)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    AutoTokenizer.from_pretrained(hf)
    if rollouts:
        sample = next(s for s in samples(config) if s["phase"] == "train" and s["step"] == 3)
        assert sample["prompt"] and isinstance(sample["reward"], float)
        assert sample["versions"] == [[2, sum(n for _, n in sample["versions"])]]


@pytest.mark.parametrize("kv", ["recompute", pytest.param("keep", marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_an_asynchronous_run_trains_on_each_group_once_also_when_it_is_stopped(tmp_path, algorithm, kv):
    config = settings(tmp_path, algorithm, steps=6, max_staleness=2, save_every=3, log_samples=99, eval_at_start=False)
    config["rollout"] = {"kv": kv}
    with stopping_after(3):
        run(config)
    lines, groups = run_to_end(config), {}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    ages = [line["samples/staleness_max"] for line in lines]
    assert all(age <= min(step, 2) for step, age in enumerate(ages)) and max(ages) > 0
    for sample in samples(config):
        if sample["phase"] == "train":
            groups.setdefault(sample["group"], set()).add(sample["step"])
    drawn = config["runtime"]["prompts_per_step"] * 6
    assert sorted(groups) == list(range(drawn)) and all(len(steps) == 1 for steps in groups.values())


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    config = settings(tmp_path, "sft", save_every=2, eval_at_start=False)
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


def test_a_checkpoint_of_another_model_or_recipe_is_refused(tmp_path):
    config = settings(tmp_path, "sft", save_every=2, steps=2)
    run(config)
    with pytest.raises(ValueError, match="is of a `sft` run; this one is `grpo`"):
        run(settings(tmp_path, "grpo", steps=2))
    config["models"]["trainer"]["load"] = str(other_model(tmp_path / "other", hidden=48, layers=1))
    message = r"step_2/models/trainer is of another model or optimizer: .* is \(320, 32\) there"
    with pytest.raises(Exception, match=message):
        run(config, "runtime.allow_changed=models", "runtime.steps=4")


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    real, calls = schedule._write_engine_state, []

    def full(engine, directory):
        calls.append(engine.step)
        files = real(engine, directory)
        if engine.step == 2:
            files.finish()  # the directory is deleted next
            raise OSError(28, "No space left on device")
        return files

    monkeypatch.setattr(schedule, "_write_engine_state", full)
    config = settings(tmp_path, "sft", save_every=1, steps=3, eval_at_start=False)
    with caplog.at_level(logging.WARNING):
        assert run(config) == 0
    assert calls == [1, 2, 3]
    assert "the last good one is step 1" in caplog.text
    assert [line.get("checkpoint/failed") for line in metrics(config)] == [None, None, 1.0]
    folder = Path(config["output"]) / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step_1", "step_3"]


def test_the_best_checkpoint_is_kept(tmp_path):
    config = settings(tmp_path, "grpo", steps=4, save_every=1, keep=1, best="reward/mean", eval_at_start=False)
    rewards = [line["reward/mean"] for line in run_to_end(config)]
    best = rewards.index(max(rewards)) + 1
    kept = {p.name for p in (Path(config["output"]) / "checkpoints").iterdir()}
    assert kept == {"step_4", f"step_{best}"}
    model = Path(config["output"]) / "model"
    assert model.resolve() == (Path(config["output"]) / "checkpoints" / f"step_{best}" / "hf").resolve()


def test_a_reward_model_instead_of_a_function(tmp_path):
    config = settings(tmp_path, "ppo", steps=2, eval_at_start=False)
    config.pop("reward")
    reward = {"module": "fsdp", "load": str(tmp_path / "model"), "head": "reward", "frozen": True}
    config["models"]["reward"] = reward
    with pytest.raises(Exception, match=r"lacks \['score.weight'\].*was not trained as one"):
        run(config)
    config["models"]["reward"] = reward | {"head_init": "zero"}
    assert [line["reward/mean"] for line in run_to_end(config)] == [0.0, 0.0]  # a head of zeros


def test_check_loads_no_weights(tmp_path, capsys):
    config = settings(tmp_path, "ppo")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # a header, and no weights
    examine(load_config(config), Display())
    assert "no problem found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss={fn: value}", r"models.trainer: the loss `value` fails .*: .*returns"),
        ("models.trainer.lora={target: ['*.q_porj']}", r"lora.target: '\*.q_porj' matches none .*q_proj"),
    ],
)
def test_check_tries_the_losses_and_the_adapters(tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        examine(load_config(settings(tmp_path, "grpo"), [override]), Display())
