"""Processes of a run are killed or stopped, in every phase of a step. The weights are those of an undisturbed run.

Each case is one run with one fault a step, so that most of its time is that of the recoveries.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from tests.chaos.driver import read_lines
from tests.runs import MARK, ROOT, metrics, processes_of, settings, weights_hash

pytest.importorskip("ray")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

STEPS = 12
PROCESSES = (
    ":policy:replica1",
    ":trainer:rank0",
    ":trainer:rank1",
    ":reference:replica0",
    ":functions",
    ":reward_func",
)
PHASES = ("rollout", "train", "sync", "save", "hooks", "evaluate")


def configure(directory: Path, name: str, **runtime: object) -> dict:
    options = {"save_in_memory_every": 1, "save_every": 5, "eval_every": 4, "restarts": 99, "call_timeout": 60}
    config = settings(directory, "grpo", steps=STEPS, cluster="ray", eval_at_start=False, **{**options, **runtime})
    config["models"]["policy"]["num_process"] = 2
    config["models"]["trainer"]["num_process"] = 2
    config["models"]["reference"] = {"num_process": 1}
    config["loss"] = {"fn": "policy_gradient", "kl_coef": 0.05}
    return config | {"output": str(directory / name)}


def train(config: dict, faults: list[dict], between: Callable[[], None] = lambda: None) -> tuple[str, list[dict]]:
    """Start the run until it is complete; return its output, and what happened when.

    ``between`` is called after each start that ended by a killed driver.
    """
    output = Path(config["output"])
    files = output.with_suffix(".json"), output.with_suffix(".faults.json")
    for file, content in zip(files, (config, faults), strict=True):
        file.write_text(json.dumps(content))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: config["output"], "PYTHONPATH": str(ROOT)}
    command, shown = [sys.executable, "-m", "tests.chaos.driver", *map(str, files)], ""
    for _ in range(1 + sum(fault.get("process") == "driver" for fault in faults)):
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
        shown += done.stdout + done.stderr
        if done.returncode != -9:  # the driver has not killed itself
            assert done.returncode == 0, shown
            break
        between()
    return shown, read_lines(files[1].with_suffix(".done"))


def measure(happened: list[dict]) -> dict[int, float]:
    """Seconds from each fault to the next complete step."""
    seconds = {}
    for place, line in enumerate(happened):
        if "fault" in line:
            after = next(later for later in happened[place:] if "step" in later)
            seconds[line["fault"]] = after["time"] - line["time"]
    return seconds


def record(name: str, seconds: dict[str, float]) -> None:
    """Add a line to the table of recoveries, the file that COALIGN_CHAOS_TABLE names, if it is set."""
    values = sorted(seconds.values())
    p95 = values[min(len(values) - 1, round(0.95 * len(values)))]
    text = f"{name}: p50 {statistics.median(values):.1f} s, p95 {p95:.1f} s; " + ", ".join(
        f"{what} {value:.1f}" for what, value in seconds.items()
    )
    if table := os.environ.get("COALIGN_CHAOS_TABLE"):
        with open(table, "a") as file:
            file.write(text + "\n")


def check_complete(config: dict) -> None:
    lines = [line for line in metrics(config) if "loss/value" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert not processes_of(config), "processes were left behind"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of model and data, and the hash of the weights that every run of this file ends with."""
    directory = tmp_path_factory.mktemp("chaos")
    config = configure(directory, "undisturbed")
    train(config, [])
    return directory, weights_hash(config, STEPS)


@pytest.mark.parametrize("phase", PHASES)
def test_any_process_killed_in_any_phase(undisturbed, phase):
    directory, expected = undisturbed
    config = configure(directory, f"killed-{phase}")
    every = 1
    if phase in ("evaluate", "save"):
        every = 2 if phase == "evaluate" else 1
        config["runtime"][f"{phase.removesuffix('uate')}_every"] = every
    faults = [
        {"step": step, "phase": phase, "process": process, "delay": 0.01 * (step % 3)}
        for step, process in zip(range(every, STEPS, every), PROCESSES, strict=False)
    ]
    output, happened = train(config, faults)
    check_complete(config)
    assert weights_hash(config, STEPS) == expected, output
    seconds = measure(happened)
    record(f"killed in {phase}", {faults[number]["process"]: value for number, value in seconds.items()})
    assert len(seconds) == len(faults), (output, happened)


def test_a_killed_driver(undisturbed):
    """Six drivers are killed, one in each phase; the next one goes on with the processes that live, and with samples
    that were complete."""
    directory, expected = undisturbed
    config = configure(directory, "driver", journal=True)
    moments = [(2, "rollout"), (3, "train"), (5, "sync"), (6, "save"), (7, "hooks"), (8, "evaluate")]
    faults = [{"step": step, "phase": phase, "process": "driver", "delay": 0.01} for step, phase in moments]
    output, happened = train(config, faults)
    check_complete(config)
    assert weights_hash(config, STEPS) == expected
    taken_over = [line for line in output.splitlines() if line.startswith("taking over ")]
    assert len(taken_over) == len(faults), output
    # A call that has reached one of two ranks alone leaves the other one waiting.
    assert all(name in line for line in taken_over for name in ("policy:replica0", "policy:replica1", "functions"))
    assert sum("trainer:rank0, trainer:rank1" in line for line in taken_over) >= len(faults) - 2, taken_over
    assert sum(line.get("rollout/restored", 0) for line in metrics(config)) >= 4, "those of the step in training"
    record("driver killed", {faults[number]["phase"]: value for number, value in measure(happened).items()})
    record("driver killed, from taking over on", measure_takeovers(config, [phase for _, phase in moments]))


def test_a_killed_driver_of_an_asynchronous_run(undisturbed):
    directory, _ = undisturbed
    config = configure(directory, "driver-async", journal=True, max_staleness=1, log_samples=99)
    moments = [(3, "rollout"), (5, "train"), (7, "sync")]
    faults = [{"step": step, "phase": phase, "process": "driver", "delay": 0.01} for step, phase in moments]
    output, _ = train(config, faults)
    check_complete(config)
    assert output.count("taking over ") == len(faults), output
    assert all(line["samples/staleness_max"] <= 1 for line in metrics(config) if "loss/value" in line)
    groups: dict[int, set[int]] = {}
    for sample in map(json.loads, (Path(config["output"]) / "samples.jsonl").read_bytes().splitlines()):
        groups.setdefault(sample["group"], set()).add(sample["step"])
    groups = {group: steps for group, steps in groups.items() if group >= 0}  # others are those of evaluations
    assert sorted(groups) == list(range(STEPS * config["runtime"]["prompts_per_step"]))
    assert all(len(steps) == 1 for steps in groups.values()), "a group was trained on twice"


def measure_takeovers(config: dict, phases: list[str]) -> dict[str, float]:
    """Seconds from when a driver has found the processes to its next complete step, by the log."""
    seconds, found = [], None
    for line in (Path(config["output"]) / "log.txt").read_text().splitlines():
        if " taking over " in line:
            found = line[:23]
        elif found and " step " in line and "/12 " in line:
            begun, ended = (datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f") for text in (found, line[:23]))
            seconds.append((ended - begun).total_seconds())
            found = None
    return dict(zip(phases, seconds, strict=True))


def test_any_process_stopped(undisturbed):
    directory, expected = undisturbed
    config = configure(directory, "stopped", call_timeout=15)
    faults = [
        {"step": step, "phase": "rollout" if step % 2 else "train", "process": process, "how": "stop"}
        for step, process in enumerate(PROCESSES[:4], 2)
    ]
    _, happened = train(config, faults)
    check_complete(config)
    assert weights_hash(config, STEPS) == expected
    record("stopped", {faults[number]["process"]: value for number, value in measure(happened).items()})
