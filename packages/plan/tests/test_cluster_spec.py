"""Clusters and devices by name, and what is said of names that are wrong."""

import pytest

from coalign_plan.gpus import GPUS, ClusterSpec, find_gpu


def test_a_cluster_is_nodes_of_devices():
    cluster = ClusterSpec.parse("64x8:H100")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus) == (64, 8, 512)
    assert cluster.memory_bytes == 80 * 2**30 and str(cluster) == "64x8:H100"
    assert (cluster.domain, ClusterSpec.parse("18x4:GB200").domain) == (8, 72)


@pytest.mark.parametrize("name", [*GPUS, "h100", "NVIDIA H100 80GB HBM3", "A100", "NVIDIA GeForce RTX 4090", "mi300x"])
def test_devices_are_found_in_any_spelling(name):
    assert find_gpu(name).name in GPUS and find_gpu("NVIDIA H100 80GB HBM3").name == "H100"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8:H100", "cluster '8:H100' should be NODESxGPUS:NAME, such as 4x8:H100"),
        ("4x8", "cluster '4x8' should be NODESxGPUS:NAME"),
        ("0x8:H100", "cluster '0x8:H100' should be NODESxGPUS:NAME"),
        ("4x-8:H100", "cluster '4x-8:H100' should be NODESxGPUS:NAME"),
        ("4x8:H10", "GPU 'H10' is not known; the nearest is H100"),
        ("4x8:V100", "GPU 'V100' is not known; the nearest is "),
        ("99999x99:H100", "cluster '99999x99:H100' has 9,899,901 GPUs; at most 100,000 can be planned"),
        ("999999999999x8:H100", "should be NODESxGPUS:NAME"),
        ("", "cluster '' should be NODESxGPUS:NAME"),
    ],
)
def test_what_is_no_cluster_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError) as refused:
        ClusterSpec.parse(text)
    assert message in str(refused.value) and "\n" not in str(refused.value)
