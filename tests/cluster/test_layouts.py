"""Every layout on several Ray nodes: the exact devices of each process, and the same result whatever the layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.cluster.layouts import LAYOUTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # one program for all; a loaded machine starts Ray slowly
pytest.importorskip("ray")

A, B = ([f"{node} {device}" for device in range(4)] for node in "ab")
PLACEMENTS = {
    "exclusive": {"policy": ["a 0,1"], "judge": ["a 2", "a 3"], "trainer": B},
    "shared": {"policy": ["a 0,1", "a 2,3"], "judge": A, "trainer": A},
    "partly": {"policy": ["a 0,1,2,3"], "judge": B, "trainer": A + B},
    "single": {"policy": ["a 0"], "judge": ["a 0"], "trainer": ["a 0"]},
    "spread": {"policy": ["a 0,1", "b 0,1"], "trainer": ["a 2", "a 3"]},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "300"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.cluster.layouts"],
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_process_sees_its_devices_alone(found, layout):
    told = found["layouts"][layout]["told"]
    for model, ranks in told.items():
        planned = found["layouts"][layout]["planned"][model]
        assert [[node, *(visible.split(",") if visible else [])] for node, _, visible in ranks] == planned
    expected = PLACEMENTS[layout]
    assert {model: [f"{node} {visible}" for node, _, visible in told[model]] for model in expected} == expected
    device = "cpu" if LAYOUTS[layout][2] else "cuda"
    assert {rank[1] for model in expected for rank in told[model]} == {device}


def test_a_cpu_model_goes_where_no_devices_are(found):
    [[node, device, visible]] = found["layouts"]["spread"]["told"]["judge"]
    assert node not in ("a", "b") and (device, visible) == ("cpu", "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_does_not_depend_on_the_layout(found, layout):
    flow = found["layouts"][layout]["flow"]
    assert flow.pop("ranks") == LAYOUTS[layout][0]["trainer"]["num_gpu"]
    assert flow == {name: value for name, value in found["expected"].items() if name != "ranks"}


def test_what_can_never_fit_is_refused_at_once(found):
    message, seconds = found["refusals"]["total"]
    assert "the models ask for 9 devices (policy: 9); there are 8 on 3 node(s)" in message and seconds < 5
    message, seconds = found["refusals"]["together"]
    assert "(policy: 1 × 8), and the nodes cannot hold them (a: 4, b: 4)" in message and seconds < 5


def test_devices_of_other_jobs_are_not_there(found):
    assert "there are 8 on 3 node(s), of which other jobs leave 3 free" in found["refusals"]["held"]


def test_waiting_for_devices(found):
    assert found["refusals"]["waited"] == 8
