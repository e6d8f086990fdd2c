"""Runs with several environments: each row of data names the one that plays it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coalign import load_config
from coalign.cluster.future import WorkerError
from coalign.config.errors import ConfigError
from coalign.config.schema import RolloutConfig
from coalign.environments.conversation import find_environments
from coalign.launch.plan import prepare
from tests.environments.helpers import TOOLS_CHATML
from tests.runs import metrics, run, run_in_two_parts, run_to_end, samples, settings, show_check, weights_hash

HERE = "tests.environments.test_environments"


async def twice(episode, *, fails: bool = False):
    """Two turns."""
    await episode.generate(max_new_tokens=4)
    if fails:
        raise RuntimeError("broken")
    episode.say({"role": "user", "content": "go on"})
    await episode.generate(max_new_tokens=4)
    episode.count("said")


async def duel(group):
    for one in group:
        await one.generate(max_new_tokens=2 + one.index)


def mixed(
    directory: Path, rows: dict[str, dict[str, Any]] | None = None, evaluates: bool = False, **runtime: Any
) -> dict[str, Any]:
    """A run with the environments `plain` and `twice`; ``rows`` by source: what is added to each."""
    config = settings(directory, "grpo", **({"steps": 3, "save_every": 3, "prompts_per_step": 8} | runtime))
    sources = []
    for name, more in (rows or {"plain": {}, "twice": {}}).items():
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"{name} {i}", "answer": "1"} | more) + "\n" for i in range(20)))
        sources.append({"path": str(file)} | ({} if more else {"environment": name}))
    config["data"] |= {"train": sources, "eval": sources if evaluates else [], "chat_template": TOOLS_CHATML}
    config["rollout"] = {"environments": {"plain": "single_turn", "twice": {"fn": f"{HERE}:twice", "timeout": 50}}}
    config["models"]["policy"] |= {"max_tokens_per_micro": 2048}
    return config


def test_each_row_is_played_by_its_environment(tmp_path):
    config = mixed(tmp_path, evaluates=True)
    lines = [line for line in run_to_end(config) if "reward/mean" in line]
    assert len(lines) == 3
    for line in lines:
        assert line["episode/plain/turns"] == 1 and line["episode/twice/turns"] == 2 and line["episode/twice/said"] == 1
        counts = [line[f"episode/{name}/groups"] for name in ("plain", "twice")]
        assert sum(counts) == 8 and min(counts) > 0
        mean = sum(line[f"episode/{name}/reward"] * line[f"episode/{name}/samples"] for name in ("plain", "twice")) / 32
        assert mean == pytest.approx(line["reward/mean"])
        assert line["episode/turns"] == pytest.approx((counts[0] + 2 * counts[1]) / 8)
        assert line["loss/mismatch_max"] < 1e-4
    assert list_played(config) == {("plain", 2), ("twice", 4)}
    evaluated = [line for line in metrics(config) if "eval/mean" in line]
    assert evaluated and all(
        {"eval/episode/plain/reward", "eval/episode/twice/turns"} <= line.keys() for line in evaluated
    )


def list_played(config: dict[str, Any]) -> set[tuple[str, int]]:
    """The sources of samples, and how many messages they have."""
    return {(row["messages"][0]["content"].split()[0], len(row["messages"])) for row in samples(config)}


@pytest.mark.parametrize(
    "more", [{}, {"runtime": {"max_staleness": 1}}, {"filter": {"fn": "varied"}}, {"rollout": {"oversample": 1.5}}]
)
def test_a_run_goes_on_to_the_same_weights(tmp_path, more):
    config = mixed(tmp_path, save_every=1)
    for section, changes in more.items():
        config[section] = config.get(section, {}) | changes
    assert run(config) == 0
    parts = run_in_two_parts(config, 1)
    if not more or "filter" in more:  # the others depend on time
        assert weights_hash(parts, 3) == weights_hash(config, 3)
    assert all(line["samples/count"] == 32 for line in metrics(parts))


def test_a_row_names_its_environment_before_its_source_does(tmp_path):
    config = mixed(tmp_path, {"rows": {"environment": "twice"}})
    config["data"]["train"][0]["environment"] = "plain"
    run(config)
    assert list_played(config) == {("rows", 4)}


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ({"x": 1}, r"row \d+ of rows\.jsonl names no environment, and rollout\.environments has plain, twice"),
        ({"environment": "twic"}, r"row \d+ of rows\.jsonl names the environment 'twic', .*did you mean 'twice'"),
        ({"environment": 3}, r"row \d+ of rows\.jsonl names the environment 3, .*set `environment`"),
    ],
)
def test_a_row_without_an_environment_of_the_run_is_refused(tmp_path, added, told):
    config = mixed(tmp_path, {"rows": added})
    with pytest.raises(WorkerError, match=told):
        run(config)
    with pytest.raises(ConfigError, match=told):
        show_check(config)


def test_an_environment_that_fails_does_not_end_the_others(tmp_path, caplog):
    config = mixed(tmp_path)
    config["rollout"]["environments"]["twice"]["fails"] = True
    lines = run_to_end(config)
    assert all(line["episode/twice/failed/RuntimeError"] == line["episode/failed/RuntimeError"] > 0 for line in lines)
    assert all(line["episode/plain/groups"] > 0 and "episode/twice/groups" not in line for line in lines)
    assert "the environment 'twice' failed in" in caplog.text


def test_an_environment_that_only_fails_ends_the_run(tmp_path):
    config = mixed(tmp_path)
    config["runtime"]["steps"], config["runtime"]["save_every"] = 6, 6
    config["rollout"]["environments"]["twice"]["fails"] = True
    with pytest.raises(RuntimeError, match="the environment 'twice' failed in"):
        run(config)
    assert [line["step"] for line in metrics(config)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("rollout", "source", "told"),
    [
        ({"fn": "tool_use"}, {}, r"rollout\.environments: is set beside fn"),
        ({"tools": ["calculator"]}, {}, r"rollout\.environments: is set beside fn, tools"),
        ({"round_tokens": 4}, {}, r"rollout\.round_tokens: .*`plain, twice` cannot be cut"),
        ({}, {"environment": "twic"}, r"data\.train\[0\]\.environment: .*no 'twic'.*did you mean 'twice'"),
        ({"environments": {}}, {}, r"data\.train\[0\]\.environment: there is no 'plain'"),
        ({"environments": {"plain": "single_trun"}}, {}, r"rollout\.environments\.plain\.fn: .*single_turn"),
        (
            {"environments": {"plain": {"fn": f"{HERE}:twice", "fail": 1}}},
            {},
            r"environments\.plain\.fail: unknown.*fails",
        ),
        ({"environments": {"a.b": "single_turn"}}, {}, r"rollout\.environments"),
    ],
)
def test_refusals(tmp_path, rollout, source, told):
    config = mixed(tmp_path, {"plain": {}})
    config["rollout"] |= rollout
    config["data"]["train"][0] |= source
    with pytest.raises((ConfigError, ValueError), match=told):
        prepare(load_config(config))


def test_one_environment_that_has_a_name_is_a_run_with_environments():
    environments = find_environments(RolloutConfig(environments={"a": {"fn": f"{HERE}:duel"}}, timeout=7.0))
    assert (environments["a"].timeout, environments["a"].grouped, environments["a"].name) == (7.0, True, "a")


def count_groups(line: dict[str, float]) -> list[float]:
    return [line.get(f"episode/{name}/groups", 0) for name in ("plain", "twice")]


def test_a_step_has_each_environment_by_its_share(tmp_path):
    config = mixed(tmp_path, steps=4)
    config["data"]["train"][0]["weight"] = 2.0
    counts = [count_groups(line) for line in run_to_end(config)]
    assert [sum(step) for step in counts] == [8] * 4
    for step in range(1, 5):  # largest remainders over all steps: never a row from the exact share
        assert abs(sum(plain for plain, _ in counts[:step]) - 8 * step * 2 / 3) < 1


def even(rows: list[dict[str, Any]], group: torch.Tensor) -> torch.Tensor:
    """A filter that drops half of the groups of `twice`."""
    return torch.tensor([row["environment"] == "plain" or int(row["prompt"].split()[1]) % 2 == 0 for row in rows])


def test_what_a_filter_drops_is_drawn_again_from_the_same_source(tmp_path):
    config = mixed(tmp_path, steps=6) | {"filter": {"fn": f"{HERE}:even", "max_rounds": 20}}
    counts = [count_groups(line) for line in run_to_end(config)]
    assert all(sum(step) == 8 and min(step) > 0 for step in counts)
    plain, twice = (sum(numbers) for numbers in zip(*counts, strict=True))
    assert abs(plain - twice) <= 8  # without it 32 and 16


async def slow(episode):
    await asyncio.sleep(0.3)
    await episode.generate(max_new_tokens=4)


def test_oversampling_keeps_the_share_of_a_slow_environment(tmp_path):
    config = mixed(tmp_path)
    config["rollout"] = {"environments": {"plain": "single_turn", "twice": f"{HERE}:slow"}, "oversample": 2.0}
    assert [count_groups(line) for line in run_to_end(config)] == [[4, 4]] * 3
