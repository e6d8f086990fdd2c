"""Cut connections, flipped bits, full disks: runs end complete, and with the weights of an undisturbed run.

When and where follows from COALIGN_CHAOS_SEED (default 1).
"""

import copy
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from coalign import load_config
from coalign.launch.run import train as train_here
from coalign.report.display import Display
from packages.graders.tests.service import Service, lengths
from tests.chaos.damage import Proxy, flip_bit
from tests.chaos.driver import Faults, read_lines
from tests.chaos.test_lost_processes import measure, record, train
from tests.runs import exact_settings, metrics, run, weights_hash

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
STEPS = 10
SEED = int(os.environ.get("COALIGN_CHAOS_SEED", "1"))


@pytest.fixture
def chosen(request) -> random.Random:
    return random.Random(f"{SEED} {request.node.name}")


def configure(directory: Path, name: str, **runtime: object) -> dict:
    options = {"save_every": 1, "keep": 4, "journal": True, **runtime}
    return exact_settings(directory, STEPS, **options) | {"output": str(directory / name)}


def check(config: dict, expected: str) -> None:
    """All steps are there, in order; no prompt was trained on twice, none is missing; the weights are the same."""
    assert [line["step"] for line in metrics(config)] == list(range(1, STEPS + 1))
    assert weights_hash(config, STEPS) == expected


def test_cut_connections_of_ranks_and_damaged_weights(undisturbed, chosen):
    pytest.importorskip("ray")
    directory, expected = undisturbed
    config = configure(directory, "cut", cluster="ray", save_in_memory_every=1)
    config["models"]["trainer"] |= {"num_process": 2}
    config["sync"] = {"transport": "disk"}
    steps = chosen.sample(range(2, STEPS), 3)
    ranks = {"process": ":trainer:rank0", "other": ":trainer:rank1"}
    faults = [
        {"step": steps[0], "phase": "train", "delay": chosen.uniform(0, 0.02), **ranks},
        {"step": steps[1], "phase": chosen.choice(["rollout", "hooks"]), "delay": 0.01, **ranks},
        {"step": steps[2], "phase": "train", "how": "flip", "seed": chosen.random()},
    ]
    output, happened = train(config, faults)
    check(config, expected)
    assert {line["fault"] for line in happened if "fault" in line} == {0, 1, 2}, output
    names = ("connections cut in training", "connections cut later", "weights flipped")
    record("damage", {names[number]: seconds for number, seconds in measure(happened).items()})
    assert output.count("is started again") >= 2 and "all are sent again" in output, output


def test_damaged_files_and_a_killed_driver(undisturbed, chosen):
    """Bits of the newest checkpoint and of the journal flip while no driver runs; it goes on from the one before."""
    directory, expected = undisturbed
    config = configure(directory, "flipped")
    step = chosen.randrange(3, STEPS)
    faults = [{"step": step, "phase": "hooks", "process": "driver"}]
    folder = Path(config["output"])

    def flip() -> None:
        newest = max((folder / "checkpoints").glob("step_*/manifest.json"), key=_find_step).parent
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 100)
        flip_bit(chosen.choice(files), chosen)
        flip_bit(folder / "journal.jsonl", chosen)

    output, happened = train(config, faults, between=flip)
    check(config, expected)
    assert [line for line in happened if "fault" in line], output
    assert "trying the one before" in output, output


def _find_step(manifest: Path) -> int:
    return int(manifest.parent.name.removeprefix("step_"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk in memory, which only root can")
def test_a_full_disk(undisturbed, chosen, tmp_path):
    """The disk of the run folder is full for some steps: they are trained, and recorded once there is room."""
    directory, expected = undisturbed
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk]).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        first = chosen.randrange(2, STEPS - 3)
        config = configure(directory, "full", keep=2) | {"output": str(disk / "run")}
        faults = [
            {"step": first, "phase": "train", "how": "fill"},
            {"step": chosen.randrange(first + 1, STEPS - 1), "phase": "train", "how": "free"},
        ]
        hook = Faults(_write(tmp_path / "faults.json", faults))
        assert train_here(load_config(config), Display(quiet=True), [hook]) == 0
        check(config, expected)
        assert sum(line.get("checkpoint/failed", 0) for line in metrics(config)) >= 1
        assert {line["fault"] for line in read_lines(hook.done) if "fault" in line} == {0, 1}
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_cut_connections_to_a_reward_service(tmp_path, chosen):
    service = Service(lengths)
    proxy = Proxy(int(service.url.split(":")[2].split("/")[0]))
    try:
        whole = configure(tmp_path, "whole")
        whole["reward"] = {"fn": "remote", "url": service.url, "timeout": 20}
        assert run(whole) == 0
        config = copy.deepcopy(whole) | {"output": str(tmp_path / "cut")}
        config["reward"]["url"] = service.url.replace(service.url.split(":")[2].split("/")[0], str(proxy.port))
        answer, cuts = service.answer, set(chosen.sample(range(1, STEPS + 1), 4))

        def answer_or_cut(body: dict) -> tuple:
            if len(service.bodies) - before in cuts:
                proxy.cut()
            return answer(body)

        before, service.answer = len(service.bodies), answer_or_cut
        assert run(config) == 0
        check(config, weights_hash(whole, STEPS))
        assert proxy.connections > 0
        assert sum(line.get("reward/remote/service_failures", 0) for line in metrics(config)) > 0
    finally:
        proxy.close()
        service.close()


def _write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path
