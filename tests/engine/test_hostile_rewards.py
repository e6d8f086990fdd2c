"""Whole runs whose reward hangs, dies or is away for a while: none ends, and what failed is counted."""

import time
from contextlib import closing

import pytest

from coalign.cluster.future import WorkerError
from packages.graders.tests.service import Service
from tests.runs import run, run_to_end, settings

HERE = "packages.graders.tests.hostile:"


def configure(tmp_path, reward, **runtime):
    config = settings(tmp_path, "grpo", steps=2, **runtime) | {"reward": reward}
    del config["data"]["eval"], config["runtime"]["eval_prompts"]
    return config


def train(tmp_path, reward, **runtime):
    config = configure(tmp_path, reward, **runtime)
    return run_to_end(config)


@pytest.mark.parametrize(
    ("cluster", "fn", "reason"),
    [
        ("local", "exits_on_the_second", "died"),
        pytest.param("local", "backtracks_on_the_second", "timeout", marks=pytest.mark.slow),
        pytest.param("ray", "backtracks_on_the_second", "timeout", marks=pytest.mark.slow),
        pytest.param("ray", "crashes_on_the_second", "died", marks=pytest.mark.slow),
    ],
)
def test_a_function_that_hangs_or_dies_costs_its_samples_alone(tmp_path, cluster, fn, reason):
    if cluster == "ray":
        pytest.importorskip("ray")
    lines = train(tmp_path, {"fn": HERE + fn, "timeout": 1.0, "retries": 0}, cluster=cluster)
    assert [line[f"reward/failed/{reason}"] for line in lines] == [4.0, 4.0]  # one of the four samples of each prompt
    assert all(line["samples/count"] == 12 and line["samples/dropped"] == 4 and "loss/value" in line for line in lines)


def test_a_service_that_is_away_for_a_while_costs_no_sample(tmp_path):
    away = []

    def answer(body):
        away.append(time.monotonic())
        if away[-1] - away[0] < 1.0:
            return 500, {"error": "restarting"}, {}
        return 200, {"rewards": [float(len(query) % 3) for query in body["query"]]}, {}

    with closing(Service(answer)) as service:
        lines = train(tmp_path, {"fn": "remote", "url": service.url, "retries": 0, "pause": 0.1, "open_after": 100})
    assert lines[0]["reward/remote/service_failures"] >= 16 and "reward/remote/service_failures" not in lines[1]
    assert all(line["samples/count"] == 16 and not line.get("samples/dropped") for line in lines)


def test_a_service_that_stays_away_ends_the_run_with_a_checkpoint_and_it_goes_on(tmp_path):
    answers = []

    def answer(body):
        answers.append(1)
        if 1 < len(answers) < 50:
            return 500, {}, {}
        return 200, {"rewards": [float(len(query) % 3) for query in body["query"]]}, {}

    with closing(Service(answer)) as service:
        config = configure(tmp_path, {"fn": "remote", "url": service.url, "retries": 0, "patience": 0.5})
        with pytest.raises(WorkerError, match=r"none of 16 samples has a reward.*service: ServiceError"):
            run(config)
        assert (tmp_path / "run" / "checkpoints" / "step_1" / "manifest.json").exists()
        answers.extend([1] * 50)
        assert [line["step"] for line in run_to_end(config)] == [1, 2]
