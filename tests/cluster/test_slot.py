"""Which models share which devices, and what can never fit."""

from __future__ import annotations

import threading

import pytest

from coalign.cluster.slot import Footprint, plan, require
from coalign.config.schema import ModelConfig


def gpus(processes: int, each: int = 1) -> Footprint:
    return Footprint(processes, each)


def test_models_in_no_group_own_their_devices():
    slots = plan({"a": gpus(2), "b": gpus(1)}, [])
    assert slots["a"] is not slots["b"]
    require(slots, [3])


def test_a_group_needs_as_much_as_its_largest_member():
    slots = plan({"a": gpus(8), "b": gpus(4), "c": gpus(4), "d": gpus(2)}, [["a", "b", "c"]])
    assert slots["a"] is slots["b"] is slots["c"] is not slots["d"]
    assert slots["a"].size == 8 and slots["a"].sharers == 2
    require(slots, [8, 2])


def test_small_members_lie_side_by_side():
    places = plan({"b": gpus(4), "a": gpus(8), "c": gpus(4)}, [["b", "a", "c"]])["a"].places
    assert places == {"a": tuple(range(8)), "b": (0, 1, 2, 3), "c": (4, 5, 6, 7)}


def test_side_by_side_runs_in_parallel_and_the_large_one_excludes_both():
    slot = plan({"a": gpus(2), "b": gpus(1), "c": gpus(1)}, [["a", "b", "c"]])["a"]
    entered = threading.Event()

    def large():
        with slot.hold("a"):
            entered.set()

    with slot.hold("b"), slot.hold("c"):
        thread = threading.Thread(target=large)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(5.0)
    thread.join()


def test_cpu_models_share_no_gpus():
    slot = plan({"a": gpus(2), "b": gpus(3, each=0)}, [["a", "b"]])["a"]
    assert slot.gpus_of("a") == 1 and slot.gpus_of("b") == 0 and slot.sharers == 1


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["a", "x"]], r"runtime.colocation names 'x'; the models are \['a', 'b'\]"),
        ([["a"], ["a", "b"]], "'a' is in two groups"),
        ([["a", "b"]], r"the processes of a\+b hold \[1, 2\] GPUs each; make them equal"),
    ],
)
def test_groups_that_make_no_sense(groups, message):
    with pytest.raises(ValueError, match=message):
        plan({"a": gpus(2), "b": gpus(2, each=2)}, groups)


def test_too_many_gpus_are_refused_with_what_was_asked_and_what_is_there():
    slots = plan({"a": gpus(2), "b": gpus(2)}, [])
    with pytest.raises(ValueError, match=r"ask for 4 GPUs \(a: 2, b: 2\); there are 3 on 2 node\(s\). .*colocation"):
        require(slots, [1, 2])
    require(plan({"a": gpus(2), "b": gpus(2)}, [["a", "b"]]), [1, 2])
    with pytest.raises(ValueError, match="one process of a asks for 2 GPUs on one node; there are 2 on 2"):
        require(plan({"a": gpus(1, each=2)}, []), [1, 1])


@pytest.mark.parametrize(
    ("config", "spmd", "expected"),
    [
        ({}, False, (1, 0)),
        ({"num_process": 3}, False, (3, 0)),
        ({"num_gpu": 4}, True, (4, 1)),
        ({"num_gpu": 8, "tensor_parallel": 2}, False, (4, 2)),
        ({"num_gpu": 8, "tensor_parallel": 2}, True, (8, 1)),
        ({"num_gpu": 4, "num_process": 2}, False, (2, 2)),
    ],
)
def test_processes_and_their_gpus(config, spmd, expected):
    assert Footprint.of("m", ModelConfig(**config), spmd) == Footprint(*expected)


def test_gpus_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"models.m: num_gpu=3 cannot be divided among 2 processes"):
        Footprint.of("m", ModelConfig(num_gpu=3, num_process=2), False)
