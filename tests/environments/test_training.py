"""GRPO with the calculator's environment: in one process, and on Ray, killed and gone on with."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from coalign.environments.episode import Turn
from coalign_serve.formats import ToolRequest
from tests.engine.test_processes import finish, wait_for_step
from tests.environments.helpers import TOOLS_CHATML
from tests.runs import ROOT, command, metrics, run, run_in_two_parts, samples, settings, weights_hash
from tests.tiny import tiny_model_dir


def calculating(directory: Path, **runtime) -> dict:
    config = settings(directory, "grpo", eval_at_start=False, **runtime)
    config["data"] |= {"chat_template": TOOLS_CHATML}
    config["data"].pop("eval")
    config["rollout"] = {"fn": "tests.environments.test_native:calculates", "turns": 2}
    config["reward"] = [{"fn": "episode"}, {"fn": "tests.digits:digits", "weight": 0.1}]
    config["models"]["policy"] |= {"sampling": {"max_new_tokens": 20}, "max_tokens_per_micro": 2048}
    return config


def test_grpo_learns_from_episodes(tmp_path):
    config = calculating(tmp_path, steps=2, save_every=1)
    assert run(config) == 0
    for line in metrics(config):
        assert line["episode/turns"] == 2.0 and line["episode/tool_calls"] == 2.0
        assert line["samples/count"] == 16 and line["reward/episode/mean"] > 0
        assert line["loss/mismatch"] < 1e-4  # the trainer computes what the sampler saw, tool tokens included
    for sample in samples(config):
        assert [m["role"] for m in sample["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert weights_hash(run_in_two_parts(config, 1), 2) == weights_hash(config, 2)


async def branches(episode):
    """A history that forks, a critic beside it, and a summary in its place; odd samples go straight on."""
    asked = [{"role": "user", "content": "1+2="}]

    async def ask(messages):
        turn = await episode.ask(messages, max_new_tokens=4)
        answer = {"role": "assistant", "content": turn.text}
        episode.remember(turn, answer)
        return [*messages, answer, {"role": "user", "content": "go on"}]

    history = await ask(await ask(asked))
    if episode.index % 2 == 0:
        critic = episode.conversation([{"role": "user", "content": "Judge it"}], label="critic")
        await asyncio.gather(ask(history), ask(history), critic.generate(max_new_tokens=4))
        await ask([{"role": "user", "content": "so far: 1+2="}])
    episode.reward(sum(token % 7 for turn in episode.tree.turns for token in turn.tokens) / 50)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_grpo_learns_from_episodes_of_several_rows(tmp_path, aggregation):
    config = calculating(tmp_path, steps=3, save_every=1)
    config["rollout"], config["reward"] = {"fn": "tests.environments.test_training:branches"}, {"fn": "episode"}
    config["loss"] = {"aggregation": aggregation}
    config["models"]["policy"]["sampling"] = {"max_new_tokens": 60}
    assert run(config) == 0
    for line in metrics(config):
        assert line["samples/count"] == 16 and line["episode/rows"] == 2.5  # four rows, or one
        assert line["loss/mismatch_max"] < 1e-4
    shown = samples(config)
    assert {sample.get("branch", 0) for sample in shown} == {0, 1, 2, 3}
    assert weights_hash(run_in_two_parts(config, 1), 3) == weights_hash(config, 3)


def always_calls(turn: Turn) -> tuple[str, list[ToolRequest]]:
    """A parser for policies of random weights: whatever they say is a sum."""
    return turn.text, [ToolRequest("calculator", {"expression": f"{len(turn.tokens)}+{turn.tokens[0]}"})]


def with_tools(directory: Path, max_new_tokens: int, **runtime) -> dict:
    config = calculating(directory, steps=4, save_every=2, **runtime) | {"reward": {"fn": "tests.digits:digits"}}
    parser = "tests.environments.test_training:always_calls"
    config["rollout"] = {"fn": "tool_use", "tools": ["calculator"], "max_turns": 3, "parser": parser}
    stop = list("abcdefghijklmnopqrstuvwxyz")  # such policies end no turn by themselves
    config["models"]["policy"]["sampling"] = {"max_new_tokens": max_new_tokens, "stop": stop}
    return config


def test_episodes_go_on_while_the_trainer_trains(tmp_path):
    """Stopped while the episodes of a later step are under way, which are then played anew."""
    config = with_tools(tmp_path, max_new_tokens=24, max_staleness=1)
    lines = metrics(run_in_two_parts(config))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["episode/turns"] > 1.5 and line["samples/staleness_max"] <= 1 for line in lines)


async def silent(episode):
    """Asks the policy for nothing."""


async def talkative(episode):
    """One episode of a group hears more than anybody could read."""
    await episode.generate(max_new_tokens=4)
    episode.say({"role": "user", "content": "no " * (400 if episode.index == 2 else 2)})
    await episode.generate(max_new_tokens=4)


def test_a_policy_that_is_never_asked_ends_the_run(tmp_path):
    config = calculating(tmp_path, steps=2)
    config |= {"rollout": {"fn": "tests.environments.test_training:silent"}, "reward": {"fn": "tests.digits:digits"}}
    with pytest.raises(RuntimeError, match=r"step 1: .*test_training:silent` \(rollout.fn\) has asked .* for no turn"):
        run(config)


def test_an_episode_that_hears_too_much_is_cut_and_the_run_goes_on(tmp_path):
    config = calculating(tmp_path, steps=2)
    config |= {"rollout": {"fn": "tests.environments.test_training:talkative"}, "reward": {"fn": "tests.digits:digits"}}
    config["models"]["policy"]["max_tokens_per_micro"] = 300
    assert run(config) == 0
    for line in metrics(config):
        assert line["episode/out_of_room"] == 0.25 and line["samples/count"] == 16
        assert line["tokens/response_max"] <= 8 and line["samples/truncated"] >= 0.25


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_ray_killed_and_gone_on_with_the_weights_are_the_same(tmp_path):
    pytest.importorskip("ray")
    config = calculating(tmp_path, steps=4, save_every=1)
    run(config)
    there = config | {"output": str(tmp_path / "ray")}
    placed = ["runtime.cluster=ray", "models.policy.num_process=2", "models.trainer.num_process=1"]
    process = command(there, *placed)
    wait_for_step(process, there, 2, seconds=300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(command(there, *placed))
    assert weights_hash(there, 4) == weights_hash(config, 4)


def test_the_example_with_a_calculator(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"question": f"{i}+{i}?", "answer": str(2 * i)}) + "\n" for i in range(8))
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        (tmp_path / name).write_text(rows)
    monkeypatch.setenv("GSM8K", str(tmp_path))
    monkeypatch.setenv("MODEL", str(tiny_model_dir(tmp_path / "model")))
    runtime = ["steps=1", "prompts_per_step=2", "samples_per_prompt=2", "threads=1"]
    runtime += ["eval_every=0", "eval_at_start=false"]
    changes = {
        "data.chat_template": json.dumps(TOOLS_CHATML),
        "models.policy.sampling.max_new_tokens": "12",
        "models.policy.compute_dtype": "float32",
        "output": str(tmp_path / "run"),
    }
    overrides = [f"runtime.{key}" for key in runtime] + [f"{key}={value}" for key, value in changes.items()]
    assert run(ROOT / "examples" / "gsm8k_calculator.yaml", *overrides) == 0
    [line] = metrics({"output": tmp_path / "run"})
    assert line["episode/turns"] >= 1.0
