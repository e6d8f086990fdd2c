"""Which models share which devices, read from the configuration."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.cluster.placement.slots import Footprint, pack_slots
from coalign.config.errors import ConfigError
from coalign.config.schema import ModelConfig


def ranks(processes: int, together: int = 1) -> Footprint:
    """Of an SPMD model: a device each."""
    return Footprint(processes, 1, together)


def singles(*places: int) -> tuple[tuple[int, ...], ...]:
    return tuple((place,) for place in places)


def test_a_group_needs_as_much_as_its_largest_member():
    slots = pack_slots({"a": ranks(8), "b": ranks(4), "c": ranks(4), "d": ranks(2)}, [["a", "b", "c"]])
    assert slots["a"] is slots["b"] is slots["c"] is not slots["d"]
    assert slots["a"].size == slots["a"].devices == 8


def test_small_members_lie_side_by_side():
    places = pack_slots({"b": ranks(4), "a": ranks(8), "c": ranks(4)}, [["b", "a", "c"]])["a"].positions
    assert places == {"a": singles(*range(8)), "b": singles(0, 1, 2, 3), "c": singles(4, 5, 6, 7)}


def test_processes_of_several_devices_lie_on_those_of_processes_with_one():
    slot = pack_slots({"trainer": ranks(4), "policy": Footprint(2, 2)}, [["trainer", "policy"]])["policy"]
    assert slot.positions == {"trainer": singles(0, 1, 2, 3), "policy": ((0, 1), (2, 3))}
    assert slot.units == ((0, 1), (2, 3))


def test_no_process_lies_across_two_that_need_a_node_each():
    members = {"a": ranks(8), "b": Footprint(2, 3), "c": Footprint(1, 2), "d": ranks(1)}
    slot = pack_slots(members, [list(members)])["a"]
    assert slot.positions["b"] == ((0, 1, 2), (3, 4, 5))
    assert slot.positions["c"] == ((6, 7),) and slot.positions["d"] == singles(0)
    assert slot.units == ((0, 1, 2), (3, 4, 5), (6, 7))


def test_tensor_parallel_ranks_need_one_node():
    slot = pack_slots({"a": ranks(8, together=4)}, [])["a"]
    assert slot.positions["a"] == singles(*range(8)) and slot.units == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_side_by_side_runs_in_parallel_and_the_large_one_excludes_both():
    slot = pack_slots({"a": ranks(4), "b": Footprint(1, 2), "c": ranks(2)}, [["a", "b", "c"]])["a"]
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


def test_cpu_models_beside_devices():
    slot = pack_slots({"a": ranks(2), "b": Footprint(3, 0), "c": ranks(1)}, [["a", "b", "c"]])["a"]
    assert (slot.size, slot.devices) == (3, 2)
    assert slot.positions["b"] == singles(0, 1, 2)
    assert slot.positions["c"] == singles(0), "a device model never lies on a place that is no device"


def test_spread():
    wide = Footprint(2, 1, spread=True)
    assert not pack_slots({"a": ranks(2)}, [])["a"].spread
    assert pack_slots({"a": Footprint(2, 0)}, [])["a"].spread
    assert pack_slots({"a": wide, "b": ranks(2)}, [["a", "b"]])["b"].spread
    message = r"runtime.colocation\[0\]: 'a' and 'b' share devices, and only one of them asks for `placement: spread`"
    with pytest.raises(ConfigError, match=message):
        pack_slots({"a": wide, "c": ranks(1), "b": Footprint(2, 1, spread=False)}, [["a", "c", "b"]])


def test_a_model_of_a_group_that_does_not_run_takes_no_place():
    slots = pack_slots({"a": ranks(2)}, [["a", "reference"], ["judge"]])
    assert slots.keys() == {"a"} and slots["a"].name == "a"


@pytest.mark.parametrize(
    ("config", "spmd", "expected"),
    [
        ({}, False, Footprint(1, 0)),
        ({}, True, Footprint(1, 0)),
        ({"num_process": 3}, False, Footprint(3, 0)),
        ({"num_gpu": 4}, True, Footprint(4, 1)),
        ({"num_gpu": 8, "tensor_parallel": 2}, False, Footprint(4, 2)),
        ({"num_gpu": 8, "tensor_parallel": 2}, True, Footprint(8, 1, 2)),
        ({"num_gpu": 8, "tensor_parallel": 2, "pipeline_parallel": 2}, False, Footprint(2, 4)),
        ({"num_gpu": 4, "num_process": 2}, False, Footprint(2, 2)),
        ({"num_gpu": 8, "num_process": 2, "tensor_parallel": 2}, False, Footprint(2, 4)),
        ({"tensor_parallel": 2}, False, Footprint(1, 0)),  # on CPU the engine makes its own processes
        ({"num_process": 4, "tensor_parallel": 2}, True, Footprint(4, 0, 2)),
        ({"num_process": 8, "tensor_parallel": 2, "context_parallel": 2}, True, Footprint(8, 0, 2, alike=2)),
        ({"placement": "spread"}, False, Footprint(1, 0, spread=True)),
    ],
)
def test_processes_and_their_devices(config, spmd, expected):
    assert Footprint.of("m", ModelConfig(**config), spmd) == expected


def test_a_batch_has_as_many_shares_as_groups_of_ranks():
    assert tuple(f.data_parallel_size for f in (ranks(8, together=4), Footprint(4, 2), Footprint(3, 0))) == (2, 4, 3)
    assert Footprint(8, 1, together=2, alike=2).data_parallel_size == 2


@pytest.mark.parametrize(
    ("config", "spmd", "message"),
    [
        ({"num_gpu": 3, "num_process": 2}, False, "is 2; num_gpu=3 does not divide by it"),
        ({"num_gpu": 4, "num_process": 4, "tensor_parallel": 2}, False, "is 4; num_gpu=4 does not divide by it, 2 for"),
        ({"num_process": 3, "tensor_parallel": 2}, True, r"is 3; expected a multiple of tensor_parallel = 2"),
        (
            {"num_gpu": 4, "num_process": 2, "tensor_parallel": 4},
            True,
            r"is 2; expected a multiple of tensor_parallel = 4",
        ),
        ({"num_process": 6, "context_parallel": 4}, True, r"is 6; expected a multiple of context_parallel = 4"),
        (
            {"num_process": 6, "dp_replicate": 2, "expert_parallel": 2},
            True,
            r"is 6; expected a multiple of expert_parallel × dp_replicate = 2 × 2",
        ),
    ],
)
def test_numbers_that_do_not_divide_are_refused(config, spmd, message):
    with pytest.raises(ConfigError, match=rf"^models\.m\.num_process: {message}"):
        Footprint.of("m", ModelConfig(**config), spmd)


members = st.one_of(
    st.builds(ranks, st.integers(1, 8)),
    st.builds(lambda groups, wide: ranks(groups * wide, wide), st.integers(1, 3), st.integers(2, 4)),
    st.builds(Footprint, st.integers(1, 4), st.integers(1, 4)),
    st.builds(Footprint, st.integers(1, 8), st.just(0)),
)


@settings(deadline=None)
@given(st.lists(members, min_size=1, max_size=5))
def test_every_process_has_its_own_places_and_every_group_one_unit(given_members):
    footprints = {f"m{i}": footprint for i, footprint in enumerate(given_members)}
    slot = pack_slots(footprints, [list(footprints)])["m0"]
    assert sorted(place for unit in slot.units for place in unit) == list(range(slot.size))
    unit_of = {place: unit for unit in slot.units for place in unit}
    assert slot.devices == max(footprint.total for footprint in given_members)
    for model, footprint in footprints.items():
        mine = slot.positions[model]
        assert [len(places) for places in mine] == [footprint.positions] * footprint.processes
        flat = [place for places in mine for place in places]
        assert len(set(flat)) == len(flat) and max(flat) < (slot.devices if footprint.devices else slot.size)
        for first in range(0, footprint.processes, footprint.together):
            together = {unit_of[p] for places in mine[first : first + footprint.together] for p in places}
            assert len(together) == 1
