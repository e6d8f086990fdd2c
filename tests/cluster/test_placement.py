"""Nodes and devices of every process: exact lists by hand, properties of any plan, refusals that say what is there."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.cluster.placement.nodes import Node, assign_nodes, place_processes
from coalign.cluster.placement.slots import Footprint, list_slots, pack_slots


def nodes(*free: int, cores: float = 8.0) -> list[Node]:
    return [Node(f"n{i}", number, number, cores) for i, number in enumerate(free)]


def ranks(processes, together=1, spread=None):
    return Footprint(processes, 1, together, spread)


FIRST, SECOND, PAIRS = [f"0:{i}" for i in range(4)], [f"1:{i}" for i in range(4)], ["0:0", "0:1", "1:0", "1:1"]
TWO_SOCKETS = [[["0", "1", "2"], ["3", "4"]]]
# Models, which of them share devices, the devices of each node, and where the processes come.
PLANS = {
    "exclusive": ({"a": ranks(2), "b": ranks(2)}, "", [4], {"a": ["0:0", "0:1"], "b": ["0:2", "0:3"]}),
    "exclusive, on two nodes": ({"a": ranks(1), "b": ranks(3)}, "", [3, 1], {"a": ["1:0"], "b": ["0:0", "0:1", "0:2"]}),
    "shared": ({"a": ranks(4), "b": ranks(4)}, "ab", [2, 2], {"a": PAIRS, "b": PAIRS}),
    "partly shared": (
        {"a": ranks(8), "b": ranks(4), "c": ranks(4)},
        "abc",
        [4, 4],
        {"a": FIRST + SECOND, "b": FIRST, "c": SECOND},
    ),
    "partly shared, beside another": (
        {"a": ranks(8), "b": ranks(4), "c": Footprint(2, 2), "d": ranks(2)},
        "abc",
        [4, 6],
        {
            "a": [*SECOND, "1:4", "1:5", "0:0", "0:1"],
            "b": ["1:4", "1:5", "0:0", "0:1"],
            "c": ["1:0,1", "1:2,3"],
            "d": ["0:2", "0:3"],
        },
    ),
    "a single device": ({"a": ranks(1), "b": Footprint(1, 1)}, "ab", [1], {"a": ["0:0"], "b": ["0:0"]}),
    "one node if one has room": ({"a": ranks(4)}, "", [2, 3, 4, 8], {"a": [f"2:{i}" for i in range(4)]}),
    "spread": ({"a": ranks(4, spread=True)}, "", [8, 8, 8], {"a": ["0:0", "1:0", "2:0", "0:1"]}),
    "spread, in pairs": ({"a": Footprint(2, 2, spread=True)}, "", [4, 4], {"a": ["0:0,1", "1:0,1"]}),
    "tensor parallel groups on one node": ({"a": ranks(4, 2)}, "", [3, 3], {"a": PAIRS}),
    "large units before small ones": (
        {"small": ranks(3), "large": Footprint(1, 4)},
        "",
        [4, 3],
        {"small": ["1:0", "1:1", "1:2"], "large": ["0:0,1,2,3"]},
    ),
    # The 3 looks best beside nothing, in the node of 4; only the other node leaves room for both pairs.
    "a choice that is taken back": (
        {"a": Footprint(1, 3), "b": Footprint(3, 2)},
        "",
        [5, 4],
        {"a": ["0:0,1,2"], "b": ["0:3,4", "1:0,1", "1:2,3"]},
    ),
    "devices that lie close together": (
        {"a": Footprint(2, 2), "b": ranks(1)},
        "",
        TWO_SOCKETS,
        {"a": ["0:3,4", "0:0,1"], "b": ["0:2"]},
    ),
    "across sockets": ({"a": Footprint(1, 4)}, "", TWO_SOCKETS, {"a": ["0:0,1,2,3"]}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_processes_come_to_exactly_these_devices(plan):
    """On nodes that are called 0, 1, 2, …: "node:devices" of each process."""
    footprints, shared, machines, expected = PLANS[plan]
    domains = [[[str(i) for i in range(node)]] if isinstance(node, int) else node for node in machines]
    slots = list_slots(pack_slots(footprints, [[*shared]] if shared else []))
    where = assign_nodes(slots, nodes(*(sum(map(len, node)) for node in domains)))
    placed = place_processes(slots, where, domains)
    assert {
        model: [f"{placement.node}:{','.join(placement.devices)}" for placement in ranks]
        for model, ranks in placed.items()
    } == expected


def test_cpu_processes_go_where_cores_are_free():
    on_cpu = list_slots(pack_slots({"trainer": ranks(4), "reward": Footprint(3, 0)}, []))
    machines = [Node("gpus", 4, 4, cores=4), Node("cpus", 0, 0, cores=4)]
    assert assign_nodes(on_cpu, machines) == {"trainer": (0, 0, 0, 0), "reward": (1, 1, 1)}
    packed = list_slots(pack_slots({"reward": Footprint(3, 0, spread=False)}, []))
    assert assign_nodes(packed, [Node("a", 0, 0, 8), Node("b", 0, 0, 16)]) == {"reward": (1, 1, 1)}
    spread = list_slots(pack_slots({"reward": Footprint(3, 0)}, []))
    assert assign_nodes(spread, [Node("a", 0, 0, 8), Node("b", 0, 0, 16)]) == {"reward": (1, 0, 1)}
    assert assign_nodes(spread, [Node("a", 0, 0, 8, processes=9), Node("b", 0, 0, 8)]) == {"reward": (1, 1, 1)}


def test_a_cpu_model_of_a_group_is_beside_its_devices():
    slots = list_slots(pack_slots({"trainer": ranks(2), "scorer": Footprint(2, 0)}, [["trainer", "scorer"]]))
    assert assign_nodes(slots, [Node("empty", 0, 0, 64), Node("gpus", 2, 2, 2)]) == {"trainer+scorer": (1, 1)}


@pytest.mark.parametrize(
    ("footprints", "machines", "message"),
    [
        (
            {"a": ranks(2), "b": ranks(2)},
            nodes(1, 2),
            r"ask for 4 devices \(a: 2, b: 2\); there are 3 on 2 node\(s\)\. Lower num_gpu, or let .*colocation",
        ),
        (
            {"a": ranks(2)},
            [Node("n0", 1, 8), Node("cpu", 0, 0)],
            r"ask for 2 devices \(a: 2\); there are 8 on 2 node\(s\), of which other jobs leave 1 free \(n0: 1 of 8\)",
        ),
        (
            {"a": Footprint(2, 2), "b": ranks(1)},
            nodes(3, 1, 1),
            r"5 devices \(a: 4, b: 1\), some .* on one node \(a: 2 × 2\), and .* hold them \(n0: 3, n1: 1, n2: 1\)",
        ),
        ({"a": Footprint(1, 8)}, nodes(4, 4), r"a: 1 × 8.*Lower tensor_parallel or pipeline_parallel"),
        ({"a": Footprint(3, 3)}, nodes(5, 5), r"a: 3 × 3"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_is_asked_and_what_is_there(footprints, machines, message):
    with pytest.raises(ValueError, match=message):
        assign_nodes(list_slots(pack_slots(footprints, [])), machines)


models = st.one_of(
    st.builds(ranks, st.integers(1, 6), spread=st.sampled_from([None, True])),
    st.builds(lambda groups, wide: ranks(groups * wide, wide), st.integers(1, 2), st.integers(2, 3)),
    st.builds(Footprint, st.integers(1, 3), st.integers(1, 3)),
    st.builds(Footprint, st.integers(1, 3), st.just(0)),
)


@settings(deadline=None)
@given(st.lists(models, min_size=1, max_size=4), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.booleans())
def test_any_plan_keeps_its_promises_and_any_refusal_is_right(given_models, free, shared):
    footprints = {f"m{i}": footprint for i, footprint in enumerate(given_models)}
    colocation = [[*footprints][:2]] if shared and len({f.spread for f in given_models[:2]} - {None}) < 2 else []
    slots = pack_slots(footprints, colocation)
    try:
        where = assign_nodes(list_slots(slots), nodes(*free))
    except ValueError:
        assert not _possible(tuple(len(u) for s in list_slots(slots) for u in _device_units(s)), tuple(free))
        return
    names = [[[f"{node}.{i}" for i in range(number)]] for node, number in enumerate(free)]
    found = place_processes(list_slots(slots), where, names)
    held = Counter()
    for slot in list_slots(slots):
        used = {device for model in slot.positions for placement in found[model] for device in placement.devices}
        held.update(used)
        assert len(used) == slot.devices
    assert all(count == 1 for count in held.values()), "a device is held by one slot alone"
    for model, footprint in footprints.items():
        assert [len(placement.devices) for placement in found[model]] == [footprint.devices] * footprint.processes
        mine = [device for placement in found[model] for device in placement.devices]
        assert len(set(mine)) == len(mine)
        for placement in found[model]:
            assert all(device.startswith(f"{placement.node}.") for device in placement.devices)
        for first in range(0, footprint.processes, footprint.together):
            assert len({placement.node for placement in found[model][first : first + footprint.together]}) == 1
    for a, b in product(footprints, footprints):
        if a < b and not _take_turns(slots, a, b):
            assert not {d for s in found[a] for d in s.devices} & {d for s in found[b] for d in s.devices}


def _take_turns(slots, a, b):
    """Whether one model's processes wait for the other's."""
    mine, theirs = ({p for places in slots[m].positions[m] for p in places} for m in (a, b))
    return slots[a] is slots[b] and bool(mine & theirs)


def _device_units(slot):
    units = ([place for place in unit if place < slot.devices] for unit in slot.units)
    return [unit for unit in units if unit]


@cache
def _possible(sizes, free):
    """Try everything."""
    if not sizes:
        return True
    tries = ((*free[:i], left - sizes[0], *free[i + 1 :]) for i, left in enumerate(free) if left >= sizes[0])
    return any(_possible(sizes[1:], tuple(sorted(left))) for left in tries)


def test_a_large_cluster_is_planned_at_once():
    footprints = {"policy": Footprint(128, 8), "trainer": ranks(1024), "reference": Footprint(256, 4)}
    slots = list_slots(pack_slots(footprints, [[*footprints]]))
    where = assign_nodes(slots, nodes(*[8] * 128))
    assert where["policy+trainer+reference"] == tuple(i // 8 for i in range(1024))
