"""A thousand steps while processes are killed every twenty seconds: it ends, and nothing grows."""

import json
import os
import random
import subprocess
import sys
import time
from statistics import median

import psutil
import pytest

from tests.chaos.driver import find_process
from tests.runs import MARK, ROOT, metrics, processes_of, settings

pytest.importorskip("ray")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

STEPS, EVERY = 1000, 20.0
VICTIMS = (":policy:", ":trainer:", ":functions", ":reward_func")


def measure(process: psutil.Process) -> tuple[float, int]:
    """MiB that belong to the process alone, and its open files."""
    return process.memory_full_info().uss / 2**20, process.num_fds()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_thousand_steps(tmp_path, staleness):
    options = {"save_in_memory_every": 1, "save_every": 100, "restarts": 999, "max_staleness": staleness}
    config = settings(tmp_path, "grpo", steps=STEPS, epochs=400, cluster="ray", eval_at_start=False, **options)
    config["data"].pop("eval")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    os.environ[MARK] = config["output"]  # find_process looks for it
    run = subprocess.Popen([sys.executable, "-m", "coalign.cli", "train", str(path), "--quiet"], cwd=ROOT)
    chosen, struck, found, last = random.Random(1), 0, [], time.monotonic()
    try:
        while run.poll() is None:
            time.sleep(0.5)
            step = len(metrics(config))
            if step and time.monotonic() - last > EVERY:
                if victim := find_process(chosen.choice(VICTIMS)):
                    psutil.Process(victim).kill()
                    struck += 1
                last = time.monotonic()
            if step >= STEPS // 2:
                found.append((step, *measure(psutil.Process(run.pid))))
    finally:
        del os.environ[MARK]
        for left in processes_of(config):
            left.kill()
    assert run.returncode == 0
    lines = metrics(config)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line.get("faults/restarts", 0) for line in lines) >= struck - 1 > 0
    early, late = ([each for each in found if low <= each[0] < low + 100] for low in (STEPS // 2, STEPS - 100))
    memory, files = ([median(each[i] for each in part) for part in (early, late)] for i in (1, 2))
    assert memory[1] < memory[0] + 30, f"MiB of the driver: {memory}"
    assert files[1] <= files[0] + 5, f"open files of the driver: {files}"
    if table := os.environ.get("COALIGN_CHAOS_TABLE"):
        with open(table, "a") as file:
            file.write(f"{STEPS} steps, staleness {staleness}: {struck} faults, MiB {memory}, open files {files}\n")
