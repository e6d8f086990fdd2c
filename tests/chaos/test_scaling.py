"""`coalign scale` in the middle of runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, command, metrics, processes_of, settings, wait_for, weights_hash

pytest.importorskip("ray")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


def configure(directory: Path, name: str, steps: int, **runtime: object) -> dict:
    config = settings(directory, "grpo", steps=steps, cluster="ray", eval_at_start=False, **runtime)
    config["data"].pop("eval")
    config["models"]["trainer"] |= {"num_process": 2}
    return config | {"output": str(directory / name)}


def scale(config: dict, *wanted: str) -> tuple[int, str]:
    arguments = [sys.executable, "-m", "coalign.cli", "scale", config["output"], *wanted]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def count_processes(config: dict, name: str) -> int:
    return sum(any(f":{name}:" in part for part in process.cmdline()) for process in processes_of(config))


def test_the_number_of_trainers_changes_nothing(tmp_path):
    """2, 3 and 1 ranks of a trainer, and 1 to 3 samplers, give the weights of 2 and 1: every bit."""
    steps = 10
    whole = configure(tmp_path, "whole", steps)
    whole["models"]["trainer"] |= {"reduction": "exact"}
    process = command(whole)
    assert process.wait(600) == 0, process.communicate()[0]
    config = whole | {"output": str(tmp_path / "scaled")}
    requests = Path(tmp_path / "requests.json")
    requests.write_text(json.dumps({3: {"trainer": 3}, 5: {"policy": 3}, 6: {"trainer": 1}, 8: {"policy": 2}}))
    path = tmp_path / "scaled.json"
    path.write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.test_scaling", str(path), str(requests)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("trainer: 3 processes since step 3", "policy: 3 processes", "trainer: 1 processes since step 6"):
        assert said in done.stdout + done.stderr
    assert [line["step"] for line in metrics(config)] == list(range(1, steps + 1))
    assert weights_hash(config, steps) == weights_hash(whole, steps)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_is_going_is_scaled(tmp_path, staleness):
    config = configure(tmp_path, "run", 1000, max_staleness=staleness)
    process = command(config)
    wait_for(lambda: len(metrics(config)) >= 2, process, 600)
    code, shown = scale(config, "policy=3", "trainer=1")
    assert code == 0 and "policy: 3 processes since step" in shown
    assert (count_processes(config, "policy"), count_processes(config, "trainer")) == (3, 1)
    code, shown = scale(config, "policy=1")
    assert code == 0, shown
    wait_for(lambda: count_processes(config, "policy") == 1, process, 300)
    for wanted, problem in (
        ("judge=2", "has no model 'judge'; there are policy, trainer"),
        ("policy=0", "expected MODEL=NUMBER"),
        ("reward_functions=2", "has no model 'reward_functions'"),
    ):
        code, shown = scale(config, wanted)
        assert code == 2 and problem in shown, shown
    process.terminate()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    lines = metrics(config)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["samples/staleness_max"] <= staleness for line in lines)
    assert scale(config, "policy=2")[0] == 2, "no run is going"


def test_a_rule_adds_a_replica(tmp_path):
    """The trainer waits for a policy that is always busy by the rule's measure: it gets a second process, no third."""
    config = configure(tmp_path, "ruled", 8)
    config["models"]["trainer"] = {"optimizer": {"lr": 3e-3}}
    config["runtime"]["autoscale"] = {"policy": {"max": 2, "waiting": 0.0, "busy": 0.001, "free": 0.0, "steps": 2}}
    config["runtime"]["timeline_every"] = 1
    process = command(config)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert output.count("policy: 2 processes since step") == 1, output
    lines = metrics(config)
    assert [line["step"] for line in lines] == list(range(1, 9))
    [step] = [line["step"] for line in lines if line.get("processes/policy") == 2]
    trace = json.loads((Path(config["output"]) / "timeline" / f"step_{step}.json").read_text())["traceEvents"]
    assert any(event["name"] == "scale" for event in trace)


if __name__ == "__main__":
    import coalign
    from coalign.run_files.control import ControlRequest, submit

    class Requests(coalign.Hook):
        """Asks for other numbers of processes after given steps."""

        def __init__(self) -> None:
            self.by_step = json.loads(Path(sys.argv[2]).read_text())

        def after_step(self, engine, stats, batch) -> None:
            if wanted := self.by_step.get(str(engine.step)):
                submit(Path(engine.config.output), ControlRequest("scale", wanted))

    coalign.train(json.loads(Path(sys.argv[1]).read_text()), hooks=[Requests()])
