"""GRPO with vLLM as the rollout engine, a trainer on two ranks and a reference, on Ray."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.engines import SMALL, VLLM, model_dir
from tests.engine.test_processes import wait_for_step
from tests.gsm8k import TRAIN, needs_gsm8k
from tests.runs import command, metrics, processes_of, run

STEPS = 4
pytestmark = [VLLM, pytest.mark.slow, pytest.mark.timeout(1800), needs_gsm8k]


def grpo(directory: Path, name: str, policy: dict[str, Any], trainer: dict[str, Any] | None = None, **more: Any):
    """A run on GSM8K's prompts; dense reward, tiny model."""
    return {
        "algorithm": "grpo",
        "seed": 1,
        "output": str(directory / name),
        "runtime": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 4, "threads": 1, "cluster": "ray"}
        | {"trackers": [], "plots": False, "log_samples": 16},
        "data": {"train": str(TRAIN), "prompt_key": "question", "chat_template": "none", "max_prompt_tokens": 400},
        "reward": {"fn": "tests.digits:digits"},
        "loss": {"fn": "policy_gradient", "kl_coef": 0.01},
        "models": {
            "policy": {"load": str(directory / "model"), "sampling": {"max_new_tokens": 16}}
            | ({"vllm": SMALL} if policy["module"] == "vllm" else {})
            | policy,
            "trainer": {"module": "fsdp", "num_process": 2, "optimizer": {"lr": 3e-3}, "max_tokens_per_micro": 2048}
            | (trainer or {}),
        },
    } | more


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Metrics and samples of a run by its name; each is made once."""
    directory = tmp_path_factory.mktemp("runs")
    model_dir(directory / "model")
    adapters = {"lora": {"rank": 4, "target": ["*.q_proj", "*.mlp.*"]}, "optimizer": {"lr": 3e-2}}
    kinds: dict[str, Any] = {
        "native": ({"module": "native"},),
        "vllm": ({"module": "vllm"},),
        "two replicas": ({"module": "vllm", "num_process": 2},),
        "merged": ({"module": "vllm"}, adapters),
        "apart": ({"module": "vllm"}, adapters),
    }

    @cache
    def made(name: str) -> tuple[list[dict], list[dict]]:
        config = grpo(directory, name, *kinds[name], sync={"adapters": "apart" if name == "apart" else "merged"})
        assert run(config) == 0
        lines = (directory / name / "samples.jsonl").read_bytes().splitlines()
        return metrics(config), [json.loads(line) for line in lines]

    return made


def near(ours: list[dict], theirs: list[dict]) -> None:
    """The engines draw the same tokens, unless a rounding decides one: then noise of a few samples remains."""
    assert len(ours) == len(theirs) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert other["loss/mismatch"] < 1e-4
        for name in ("reward/mean", "loss/value", "loss/kl_ref", "tokens/response"):
            assert other[name] == pytest.approx(one[name], rel=0.1, abs=0.02), (name, one["step"])


def test_the_curve_is_the_native_engines(trained):
    near(trained("native")[0], trained("vllm")[0])


def test_two_replicas_draw_the_samples_of_one(trained):
    (one, ours), (two, theirs) = trained("vllm"), trained("two replicas")
    near(one, two)
    first = [[sample for sample in samples if sample["step"] == 1] for samples in (ours, theirs)]
    assert len(first[0]) == 16 and first[0] == first[1]


def test_adapters_apart_train_as_merged_ones_do(trained):
    merged, apart = trained("merged")[0], trained("apart")[0]
    near(merged, apart)
    # After the first sync 2 layers of q_proj and three of the feed-forward part: 4 · (64 + 64 + 3 · (64 + 128)) numbers
    assert apart[-1]["sync/bytes"] == 2 * 4 * (64 + 64 + 3 * (64 + 128)) * 4 < merged[-1]["sync/bytes"] / 4


@pytest.mark.parametrize(
    ("parts", "victim", "told"),
    [
        pytest.param(1, ":policy:", ("policy",), id="the process of a replica"),
        pytest.param(2, ":policy:", ("policy",), id="the process that has others"),
        pytest.param(2, "VLLM::Worker_TP1", ("policy", "rank 1 of 2", "SIGKILL"), id="one of the others"),
    ],
)
def test_a_process_that_is_killed_ends_the_run_and_leaves_none_behind(tmp_path, parts, victim, told):
    model_dir(tmp_path / "model", heads=4, kv_heads=2, hidden=128)
    policy = {"module": "vllm", "tensor_parallel": parts, "sampling": {"max_new_tokens": 400}}
    config = grpo(tmp_path, "run", policy, {"max_tokens_per_micro": 8192, "tensor_parallel": 1})
    config["runtime"] |= {"steps": 500, "call_timeout": 300, "restarts": 0}
    config["models"]["reference"] = {"tensor_parallel": 1}  # the others take what the policy has
    process = command(config)
    wait_for_step(process, config, 1, seconds=600)
    time.sleep(1)  # most of a step is generation
    next(p for p in processes_of(config) if any(victim in part for part in p.cmdline())).kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    assert all(part in output for part in told), output
    end = time.monotonic() + 60
    while processes_of(config) and time.monotonic() < end:
        time.sleep(0.2)
    assert not processes_of(config), "processes were left behind"
