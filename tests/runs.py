"""Small real runs for tests: a model of a few thousand parameters, sums as data, a configuration, its results."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from tests.tiny import tiny_model_dir

ROOT = Path(__file__).resolve().parents[1]
_started: list[tuple[subprocess.Popen[str], dict[str, Any]]] = []
MARK = "COALIGN_TEST_RUN"  # in the environment of every process of a run that `command` started


def row(i: int) -> dict[str, Any]:
    """A sum, in the shape of every kind of data at once."""
    right, wrong = str(2 * i + 3), str(2 * i + 4)
    prompt = f"{i}+{i + 3}="
    return {
        "prompt": prompt,
        "answer": right if i % 3 else wrong,
        "label": bool(i % 3),
        "score": float(i % 3 > 0),
        "text": f"{prompt}{right}; twice that is {4 * i + 6}.",
        "steps": [f"{i}+{i}={2 * i}", f"{2 * i}+3={right}"],
        "labels": [True, i % 4 / 3],
    } | ({} if i % 3 else {"chosen": right, "rejected": wrong})


def compared(i: int) -> dict[str, Any]:
    return row(i) | {"chosen": str(2 * i + 3), "rejected": str(2 * i + 4)}


COMPARING = ("dpo", "orpo", "simpo", "reward_model")


def write_data(directory: Path, algorithm: str, rows: int = 24) -> Path:
    path = directory / f"{algorithm}.jsonl"
    make = compared if algorithm in COMPARING else row
    path.write_text("".join(json.dumps(make(i)) + "\n" for i in range(rows)))
    return path


def settings(directory: Path, algorithm: str, **runtime: Any) -> dict[str, Any]:
    """The configuration of a run of a few seconds in ``directory`` (made once: model and data stay)."""
    from coalign.launch.plan import find_recipe

    model = directory / "model"
    if not model.exists():
        tiny_model_dir(model, layers=1)
    data = str(write_data(directory, algorithm))
    config: dict[str, Any] = {
        "algorithm": algorithm,
        "seed": 1,
        "output": str(directory / "run"),
        "runtime": {"steps": 4, "prompts_per_step": 4, "threads": 1, "cluster": "local"}
        | {"trackers": [], "plots": False}
        | runtime,
        "data": {"train": data, "eval": data, "chat_template": "none"},
    }
    model_keys = {"load": str(model), "max_tokens_per_micro": 256}
    others = {}
    if "teacher" in find_recipe(algorithm).models:
        others["teacher"] = {"load": str(other_model(directory / "teacher", seed=5)), "candidates": 8}
    if find_recipe(algorithm).source != "prompts":
        config["models"] = {"trainer": model_keys | {"optimizer": {"lr": 3e-3}}, **others}
        return config
    config["reward"] = {"fn": "tests.digits:digits"}
    config["runtime"] |= {"samples_per_prompt": 4, "eval_prompts": 4} | runtime
    config["models"] = {
        "policy": model_keys | {"sampling": {"max_new_tokens": 8}},
        "trainer": {"optimizer": {"lr": 3e-3}},
        **others,
    }
    return config


def exact_settings(directory: Path, steps: int, **runtime: Any) -> dict[str, Any]:
    """The configuration of a run of GRPO that ends with the same bits, however many processes it has."""
    config = settings(directory, "grpo", steps=steps, eval_at_start=False, **runtime)
    config["data"].pop("eval")
    config["models"]["trainer"] |= {"reduction": "exact"}
    return config


def other_model(directory: Path, **settings: Any) -> Path:
    """A model directory, made if it is not there."""
    return directory if directory.exists() else tiny_model_dir(directory, **settings)


def run(config: Any, *overrides: str, hooks: Sequence[Any] = ()) -> int:
    """Train in this process; the exit code. What a recipe of Coalign logs must have an entry in metrics.yaml."""
    from coalign import load_config
    from coalign.launch.run import train
    from coalign.report.display import Display
    from coalign.run_files.metric_table import _find_entry

    loaded = load_config(config, overrides)
    code = train(loaded, Display(quiet=True), hooks)
    names = {name for line in metrics(loaded) for name in line if name != "step"}
    unknown = {name for name in names if _find_entry(name) is None}
    functions = [loaded.algorithm, *(section.fn for section in (loaded.advantage, loaded.loss) if section)]
    assert not unknown or ":" in "".join(functions), unknown  # what a test brings with it may log anything
    return code


def run_to_end(config: Any, *overrides: str, hooks: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Train in this process until the run is complete; the lines of metrics.jsonl."""
    assert run(config, *overrides, hooks=hooks) == 0
    return metrics(config)


@contextmanager
def stopping_after(step: int) -> Iterator[None]:
    """Within this context runs in this process are asked to stop after a step; schedules do not see the difference."""
    from coalign.engine.hooks.recorder import MetricsRecorder

    record = MetricsRecorder.after_step

    def after_step(self: Any, engine: Any, stats: Any, batch: Any) -> None:
        record(self, engine, stats, batch)
        if engine.step == step:
            engine.progress.request_stop("test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsRecorder, "after_step", after_step)
        yield


def run_in_two_parts(whole: dict[str, Any], step: int = 2) -> dict[str, Any]:
    """The run ``whole`` in a folder of its own, stopped after ``step`` and started again; its configuration."""
    config = whole | {"output": f"{whole['output']}_in_two_parts"}
    with stopping_after(step):
        run(config)
    assert [line["step"] for line in metrics(config)][-1] == step
    run(config)
    return config


def command(config: dict[str, Any], *overrides: str) -> subprocess.Popen[str]:
    """`coalign train` in a process of its own."""
    path = Path(config["output"]).parent / "run.yaml"
    path.write_text(json.dumps(config))
    started = subprocess.Popen(
        [sys.executable, "-m", "coalign.cli", "train", str(path), *overrides],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: config["output"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _started.append((started, config))
    return started


def end_started_runs() -> None:
    """Kill what `command` started and a failed test left running."""
    while _started:
        process, config = _started.pop()
        if process.poll() is None:
            for left in processes_of(config):
                with suppress(psutil.NoSuchProcess):
                    left.kill()
            process.communicate()


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 90) -> None:
    """Wait until ``condition()``; fail with what the process wrote if it ends before, or needs longer."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > end:
            process.kill()
            pytest.fail(f"it did not happen within {seconds} s:\n{process.communicate()[0]}")
        time.sleep(0.01)


def processes_of(config: dict[str, Any]) -> list[psutil.Process]:
    """What `command` started and what that started in turn, Ray's daemons and workers included, wherever they hang."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == config["output"]:
                found.append(process)
    return found


def metrics(config: Any) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl: a run may be writing the next one."""
    path = Path(config["output"] if isinstance(config, dict) else config.output) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def samples(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in (Path(config["output"]) / "samples.jsonl").read_bytes().splitlines()]


def show_check(config: Any, *overrides: str) -> str:
    """What `coalign check` says of a configuration, loaded or not, on a wide screen."""
    from coalign import load_config
    from coalign.launch.check import check
    from coalign.report.display import Display

    screen = io.StringIO()
    loaded = load_config(config, overrides) if isinstance(config, dict) else config
    check(loaded, Display(out=Console(file=screen, width=500)))
    return screen.getvalue()


def trace_calls(config: dict[str, Any]) -> dict[str, Any]:
    """The calls of a run's flows on stand-ins, by their labels."""
    from coalign import load_config
    from coalign.launch.plan import prepare
    from coalign.launch.trace import trace

    return {call.label: call for call in trace(prepare(load_config(config))).calls}


def weights_hash(config: dict[str, Any], step: int) -> str:
    """SHA-256 of the weights that a run's checkpoint holds."""
    file = Path(config["output"]) / "checkpoints" / f"step_{step}" / "hf" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()
