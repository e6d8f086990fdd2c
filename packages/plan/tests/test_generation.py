"""Decode steps and prefills of an engine: values worked by hand, and their order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coalign_plan.constants import Constants
from coalign_plan.generation import EngineReplica
from coalign_plan.gpus import ClusterSpec
from packages.plan.tests.shapes import CLUSTER, engine, model

PLAIN = Constants(matmul=1, memory=1, tile=0, layer=0, sequence=0, decode_step=0, collective_latency=0, link=1)


def replica(work, constants=PLAIN, cluster=CLUSTER) -> EngineReplica:
    return EngineReplica(work, cluster, constants)


def test_one_sequence_reads_the_weights_once():
    """15.2 GB less the embedding's rows at 3350 GB/s."""
    size = model("Qwen2.5-7B")
    seconds = replica(engine()).decode_seconds(1, 0)
    assert seconds == pytest.approx((size.parameters - size.embedding) * 2 / 3350e9, rel=0.01)


def test_the_cache_is_read_for_every_sequence():
    size = model("Qwen2.5-7B")
    work = replica(engine())
    longer = work.decode_seconds(1, 200_000) - work.decode_seconds(1, 100_000)
    assert longer == pytest.approx(size.kv_bytes(100_000) / 3350e9, rel=0.02)


def test_a_large_batch_is_bound_by_its_products():
    size = model("Qwen2.5-7B")
    seconds = replica(engine()).decode_seconds(100_000, 0)
    flops = 2 * (size.parameters - size.embedding) * 100_000
    assert seconds == pytest.approx(flops / (989e12 * CLUSTER.gpu.matmul_share), rel=0.01)


def test_few_tokens_wake_few_experts():
    size = model("Qwen3-30B-A3B")
    work = replica(engine("Qwen3-30B-A3B"))
    dense = sum(layer.count * layer.dense for layer in size.layers) + size.head
    awake = sum(layer.count * layer.active_experts * layer.expert for layer in size.layers)
    assert work.decode_seconds(1, 0) == pytest.approx((dense + awake) * 2 / 3350e9, rel=0.02)
    assert work.decode_seconds(256, 0) > 5 * work.decode_seconds(1, 0)


def test_tensor_parallelism_divides_the_weights_and_adds_reductions():
    one, four = (replica(engine(tensor=tensor, data=1)) for tensor in (1, 4))
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4)
    assert one.decode_seconds(1, 0) / 4 <= four.decode_seconds(1, 0) < one.decode_seconds(1, 0)
    assert four.cache_bytes > 4 * one.cache_bytes


def test_keys_are_copied_where_there_are_more_devices_than_heads():
    assert replica(engine(tensor=8)).cache_copies == 2  # four key-value heads
    assert replica(engine("DeepSeek-V3", tensor=16)).cache_copies == 16
    assert replica(engine("DeepSeek-V3", tensor=16, expert=16)).cache_copies == 1  # attention is data-parallel


def test_weights_that_leave_no_room_are_refused():
    with pytest.raises(ValueError, match=r"policy: its weights take 131 GiB of each device, and H100 has 80"):
        _ = replica(engine("Llama-3.1-70B")).cache_bytes


def test_eager_engines_and_narrow_weights():
    constants = Constants()
    fast = replica(engine(), constants)
    assert replica(engine(is_eager=True), constants).decode_seconds(8, 100) > 2 * fast.decode_seconds(8, 100)
    narrow = replica(engine(precision="fp8", weight_bytes=1.0), constants)
    assert narrow.decode_seconds(8, 100) < fast.decode_seconds(8, 100)
    gathering = replica(engine(gathers_weights=True), constants)
    assert gathering.decode_seconds(8, 100) > fast.decode_seconds(8, 100)


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-30B-A3B", "Gemma-3-27B", "Nemotron-H-8B", "DeepSeek-V2-Lite"])
def test_more_work_is_never_faster(name):
    work = replica(engine(name), Constants())
    assert work.decode_seconds(64, 1000) >= work.decode_seconds(32, 1000)
    assert work.decode_seconds(64, 2000) >= work.decode_seconds(64, 1000)
    assert work.prefill_seconds(8192, 1024) >= work.prefill_seconds(4096, 1024)
    assert work.prefill_seconds(8192, 2048) >= work.prefill_seconds(8192, 1024)
    assert work.prefill_seconds(0, 0) == 0


def test_a_pipeline_pays_its_host_for_every_stage():
    constants = replace(Constants(), sequence=0)
    cluster = ClusterSpec.parse("1x8:RTXPRO6000")
    settings = dict(data=1, precision="fp4", weight_bytes=0.5625)
    one, eight = (
        replica(engine("Llama-3.1-70B", pipeline=stages, **settings), constants, cluster) for stages in (1, 8)
    )
    assert eight.decode_seconds(8, 100) > one.decode_seconds(1, 100)
    assert eight.decode_seconds(512, 1000) < one.decode_seconds(512, 1000)
