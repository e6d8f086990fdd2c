"""GRPO whose models share one device: what it learns, who moves how often, and what it takes at most."""

import os
import signal

import pytest

from coalign import memory
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.pretrained import build_skeleton
from coalign.cluster.future import WorkerError
from coalign.config.schema import ModelConfig
from tests import runs

PARTS = ["weights", "gradients", "optimizer", "kv"]
TOGETHER = ["policy", "trainer", "reference"]


def settings(directory, name, *, offload="auto", processes=1, **runtime):
    """Policy, trainer and reference on one device (per process)."""
    config = runs.settings(directory, "grpo", **{"steps": 2, "colocation": [TOGETHER], **runtime})
    del config["data"]["eval"], config["runtime"]["eval_prompts"]
    config["models"]["reference"] = {}
    for model in config["models"].values():
        model |= {"offload": offload, "num_process": processes}
    return config | {"output": str(directory / name), "loss": {"fn": "policy_gradient", "kl_coef": 0.1}}


def weight_bytes(config) -> int:
    model = build_skeleton(ModelConfig(load=config["models"]["policy"]["load"]))
    return 4 * sum(p.numel() for p in model.parameters())


def swaps(line) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith("swaps/") and name != "swaps/mib"}


def test_moving_changes_nothing_that_is_learned_and_takes_what_the_largest_phase_takes(tmp_path):
    stays, moves = settings(tmp_path, "stays"), settings(tmp_path, "moves", offload=PARTS)
    assert runs.run(stays) == runs.run(moves) == 0
    assert runs.weights_hash(stays, 2) == runs.weights_hash(moves, 2)
    assert runs.weights_hash(runs.run_in_two_parts(moves, 1), 2) == runs.weights_hash(moves, 2)
    assert not any(name.startswith("swaps/") for name in runs.metrics(stays)[-1])
    size = weight_bytes(moves)
    training = 4 * size  # weights, gradients, two moments
    for line in runs.metrics(moves):
        # The policy computes with the trainer's weights: they leave when it does, and come with the trainer.
        assert swaps(line) == {
            "swaps/trainer/out": 1.0,
            "swaps/policy/out": 1.0,
            "swaps/reference/in": 1.0,
            "swaps/reference/out": 1.0,
            "swaps/trainer/in": 1.0,
        }
        assert training <= line["memory/device"] * 2**20 < 1.001 * training  # 5 without moving
        assert line["swaps/mib"] * 2**20 == pytest.approx((2 * 3 + 2) * size, rel=1e-3)


def test_a_device_of_the_size_of_the_largest_phase_suffices_only_if_models_leave(tmp_path):
    limit = 1.05 * 4 * weight_bytes(settings(tmp_path, "any")) / 2**30
    moves = settings(tmp_path, "moves", offload=PARTS, device_memory=limit)
    assert runs.run(moves) == 0
    with pytest.raises(WorkerError, match=r"not enough device memory for the kv of 'policy'") as error:
        runs.run(settings(tmp_path, "stays", offload=[], device_memory=limit))
    for line in ("trainer: optimizer", "trainer: weights", "reference: weights", "runtime.device_memory"):
        assert line in str(error.value)


def test_with_room_for_all_nobody_leaves(tmp_path):
    config = settings(tmp_path, "room", offload=PARTS, device_memory=0.1, steps=3)
    assert [swaps(line) for line in runs.run_to_end(config)][2:] == [{}]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2])
def test_on_ray_in_processes_of_their_own(tmp_path, processes):
    kind = {"processes": processes, "cluster": "ray"}
    stays, moves = settings(tmp_path, "stays", **kind), settings(tmp_path, "moves", offload=PARTS, **kind)
    assert runs.run(stays) == runs.run(moves) == 0
    assert runs.weights_hash(stays, 2) == runs.weights_hash(moves, 2)
    for line in runs.metrics(moves):
        assert swaps(line) == {f"swaps/{model}/{to}": 1.0 for model in TOGETHER for to in ("in", "out")}
        assert line["memory/device"] * 2**20 < 1.1 * 4 * weight_bytes(moves) / processes + 2**16


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_ray_on_a_device_little_larger_than_the_largest_phase(tmp_path):
    """Arenas of several processes keep to one limit, which the driver deals out."""
    config = settings(tmp_path, "moves", offload=PARTS, steps=3, cluster="ray")
    size = weight_bytes(config)
    config["runtime"]["device_memory"] = 1.1 * 4 * size / 2**30
    for line in runs.run_to_end(config):
        assert 4 * size <= line["memory/device"] * 2**20 <= 1.1 * 4 * size
        assert line["swaps/trainer/out"] >= 1.0 and line["swaps/trainer/in"] >= 1.0


class DiesLeaving(FSDPModule):
    """Is killed after its second step, with some of what it moves on the host and the rest not yet."""

    def move(self, to, parts):
        if (self.version, to) == (2, "host") and "optimizer" in parts:
            left = iter(range(5))
            whole = memory._view_bytes

            def raw(storage):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return whole(storage)

            memory._view_bytes = raw
        super().move(to, parts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_process_killed_in_the_middle_of_a_swap(tmp_path):
    """The run ends and says who was lost; what was saved before is there."""
    config = settings(tmp_path, "killed", offload=PARTS, steps=3, save_every=1, cluster="ray", restarts=0)
    config["models"]["trainer"]["module"] = f"{__name__}:DiesLeaving"
    with pytest.raises(WorkerError, match=r"failed in trainer, rank 0: worker lost"):
        runs.run(config)
    assert [line["step"] for line in runs.metrics(config)] == [1, 2]
