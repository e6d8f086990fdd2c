"""What `coalign doctor` makes of facts: each check with a node that is well and with one that is not."""

from dataclasses import replace

import pytest

from coalign_diagnose.doctor.device_facts import AcceleratorFacts, DeviceFacts, read_smi_table, read_xids
from coalign_diagnose.doctor.node_facts import DiskFacts, NodeFacts, ProcessorFacts
from coalign_diagnose.doctor.preflight import GIB, ClusterFacts, NodeLink, examine

H100 = DeviceFacts(0, "NVIDIA H100", 80 * GIB, 79 * GIB, ecc_errors=0)
NODE = NodeFacts(
    "a",
    "10.0.0.1",
    {"python": "3.12.1", "torch": "2.13.0", "ray": "2.60.0", "NCCL": "2.29.3"},
    AcceleratorFacts((H100, replace(H100, index=1)), 2, "580.65"),
    memory=512 * GIB,
    memory_free=400 * GIB,
    disks={"run folder": DiskFacts("/runs", 1000 * GIB, 500 * GIB)},
    shm=DiskFacts("/dev/shm", 256 * GIB, 256 * GIB),
    limits={"-n": (65536, 65536), "-u": (-1, -1), "-l": (-1, -1)},
    ports={0: ""},
    inputs={"models.policy: /m": ""},
    compiler="/usr/bin/g++",
)
FIRST, SECOND, THIRD = NODE, replace(NODE, name="b"), replace(NODE, name="c")
WELL = ClusterFacts(
    [FIRST, SECOND, THIRD],
    clocks={"a": 0.0, "b": 0.002, "c": -0.001},
    links=[NodeLink("a", "b", 3e9), NodeLink("b", "c", 2e9)],
    seen={name: ["a", "b", "c"] for name in "abc"},
    resources=dict.fromkeys("abc", 2),
)


def problems(facts, **needs):
    """(check, node, level, found) of all that is not ok."""
    return [(f.check, f.node, f.level, f.found) for f in examine(facts, **needs) if f.level != "ok"]


def ailing(**changes):
    """The problems of three nodes of which `b` has these facts."""
    nodes = [FIRST, replace(SECOND, **changes), THIRD]
    return problems(replace(WELL, nodes=nodes), compiles=True, requires=["network"])


def test_nodes_that_are_well_have_no_problem():
    found = examine(WELL, compiles=True, requires=["network"])
    assert all(each.level == "ok" and each.node == "all" for each in found)
    said = {each.check: each.found for each in found}
    assert said["devices"] == "6 × NVIDIA H100; at least 79.0 GiB free"
    assert said["clocks"] == "within 3 ms of each other" and said["bandwidth"] == "at least 2.0 GB/s between nodes"
    assert said["inputs"] == "1 models and files of data can be read" and said["nodes"] == "3 answer"


def test_versions_that_differ_are_those_of_the_fewest():
    versions = {**NODE.versions, "torch": "2.12.0"}
    assert ailing(versions=versions) == [("versions", "b", "fail", "torch 2.12.0, and others 2.13.0")]
    assert ailing(versions={**NODE.versions, "vllm": "0.32.0"})[0][2:] == ("warn", "vllm 0.32.0, and others none")
    driver = replace(NODE.accelerators, driver="550.1")
    assert ailing(accelerators=driver) == [("versions", "b", "warn", "driver 550.1, and others 580.65")]


@pytest.mark.parametrize(
    ("changes", "level", "found"),
    [
        ({"devices": (H100,)}, "fail", "nvidia-smi lists 2 devices, and torch can use 1"),
        ({"devices": (H100,), "listed": 1}, "fail", "Ray counts 2 devices, and torch can use 1"),
        ({"devices": (H100, replace(H100, index=1, ecc_errors=3))}, "fail", "device 1: 3 uncorrected memory errors"),
        ({"devices": (H100, replace(H100, index=1, problem="9 of 4 numbers"))}, "fail", "device 1: 9 of 4 numbers"),
        ({"devices": (H100, replace(H100, index=1, free=GIB))}, "warn", "device 1: 1.0 GiB of 80.0 GiB free"),
        ({"devices": (H100, replace(H100, index=1, pages_pending=True))}, "warn", "device 1: memory pages wait"),
        ({"xids": (("0000:3b:00", 79),)}, "fail", "Xid 79 of 0000:3b:00 in dmesg"),
        ({"xids": (("0000:3b:00", 31),)}, "warn", "Xid 31 of 0000:3b:00 in dmesg"),
        ({"problem": "nvidia-smi fails"}, "fail", "nvidia-smi fails"),
    ],
)
def test_a_device_that_is_not_well(changes, level, found):
    first = ailing(accelerators=replace(NODE.accelerators, **changes))[0]
    assert first[:3] == ("devices", "b", level) and first[3].startswith(found)


BUSY = ProcessorFacts(64, 8, 8, 13.0)


@pytest.mark.parametrize(
    ("changes", "check", "level", "found"),
    [
        ({"processors": ProcessorFacts(64, 64, 2)}, "processors", "warn", "2 of 64 by the container's quota"),
        ({"processors": BUSY}, "processors", "warn", "load 13.0 on 8: other processes compute there"),
        ({"memory_free": GIB // 2}, "memory", "fail", "512 MiB of 512.0 GiB free"),
        ({"memory_free": 2 * GIB}, "memory", "warn", "2.0 GiB of 512.0 GiB free"),
        ({"disks": {"hub cache": DiskFacts("/c", 100 * GIB, GIB // 4)}}, "disk", "fail", "hub cache /c: 256 MiB free"),
        ({"disks": {"hub cache": DiskFacts("/c", 900 * GIB, 20 * GIB)}}, "disk", "warn", "hub cache /c: 20.0 GiB free"),
        ({"shm": DiskFacts("/dev/shm", 2**26, 2**26)}, "shared memory", "fail", "64 MiB of 64 MiB free in /dev/shm"),
        ({"shm": DiskFacts("/dev/shm", 2**30, 2**29)}, "shared memory", "warn", "512 MiB of 1.0 GiB free in /dev/shm"),
        ({"shm": None}, "shared memory", "warn", "there is no /dev/shm"),
        ({"limits": {"-n": (1024, 4096)}}, "limits", "warn", "1024 open files (ulimit -n; hard 4096)"),
        ({"limits": {"-n": (256, -1)}}, "limits", "fail", "256 open files (ulimit -n; hard unlimited)"),
        ({"limits": {"-u": (100, 100)}}, "limits", "warn", "100 processes and threads (ulimit -u)"),
        ({"ports": {0: "Permission denied"}}, "ports", "fail", "no port can be opened: Permission denied"),
        ({"ports": {0: "", 6379: "Address already in use"}}, "ports", "warn", "port 6379: Address already in use"),
        ({"host_problem": "the host's name b is 9.9.9.9"}, "ports", "fail", "the host's name b is 9.9.9.9"),
        ({"interfaces": {"NCCL_SOCKET_IFNAME": "is ib9"}}, "ports", "fail", "NCCL_SOCKET_IFNAME is ib9"),
        ({"inputs": {"models.policy: /m": "it is not there"}}, "inputs", "fail", "models.policy: /m: it is not there"),
        ({"write_problem": "Read-only file system"}, "run folder", "fail", "Read-only file system"),
        ({"compiler": ""}, "compiler", "fail", "there is no C++ compiler, and a model has `compile`"),
        ({"shortfalls": {"network": "Landlock"}}, "sandbox", "fail", "the sandbox cannot limit network"),
        ({"shortfalls": {"files": "Landlock"}}, "sandbox", "warn", "the sandbox cannot limit files"),
    ],
)
def test_a_node_that_is_not_well_is_named(changes, check, level, found):
    assert ailing(**changes) == [(check, "b", level, found)]


def test_locked_memory_matters_where_there_is_infiniband():
    assert ailing(limits={"-l": (65536, 65536)}) == []
    assert ailing(limits={"-l": (65536, 65536)}, has_infiniband=True)[0][:3] == ("limits", "b", "warn")


def test_a_clock_is_compared_with_the_one_in_the_middle():
    skewed = replace(WELL, clocks={"a": -7200.0, "b": -7200.1, "c": -7190.0})  # the others differ from this machine's
    assert problems(skewed) == [("clocks", "c", "warn", "its clock is 10.0 s ahead")]
    late = replace(WELL, clocks={"a": 0.0, "b": 0.0, "c": -90.0})
    assert problems(late)[0][2:] == ("fail", "its clock is 90.0 s behind")


def test_links_between_nodes():
    slow = replace(WELL, links=[NodeLink("a", "b", 5e7), NodeLink("b", "a", problem="ConnectionRefusedError: no")])
    expected = [("bandwidth", "a → b", "warn", "50 MB/s"), ("bandwidth", "b → a", "fail", "ConnectionRefusedError: no")]
    assert problems(slow) == expected


def test_a_folder_that_is_not_shared():
    apart = replace(WELL, seen={"a": ["a"], "b": ["a", "b", "c"], "c": ["c"]})
    assert [each[:3] for each in problems(apart)] == [("run folder", "a", "fail"), ("run folder", "c", "fail")]
    assert problems(apart)[0][3] == "does not see what b, c wrote there"


def test_one_row_for_the_same_problem_of_several_nodes():
    small = replace(FIRST, shm=None)
    assert problems(replace(WELL, nodes=[small, replace(small, name="b"), THIRD]))[0][1] == "a, b"


def test_a_node_that_does_not_answer():
    said = "ModuleNotFoundError: coalign"
    assert problems(replace(WELL, errors={"d": said}))[0] == ("nodes", "d", "fail", said)
    assert len(problems(ClusterFacts([], {"d": "no"}))) == 1


def test_what_nvidia_smi_and_the_kernel_print():
    text = "0, 580.65, 0, No\n1, 580.65, 2, Yes\n2, 580.65, [N/A], [N/A]\n"
    rows = read_smi_table(text)
    found = [(row.driver, row.ecc_errors, row.pages_pending) for row in rows.values()]
    assert found == [("580.65", 0, False), ("580.65", 2, True), ("580.65", None, False)]
    log = "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n" * 2
    assert read_xids(log + "[2.0] NVRM: Xid (PCI:0000:86:00): 31, MMU") == (("0000:3b:00", 79), ("0000:86:00", 31))
