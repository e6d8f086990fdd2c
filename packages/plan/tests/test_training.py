"""Passes of training: values worked by hand, and what must never make a pass faster or slower."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign_plan.constants import Constants
from coalign_plan.gpus import ClusterSpec
from coalign_plan.network import ClusterNetwork
from coalign_plan.training import TokenBatch, TrainingModel, fill_tiles
from packages.plan.tests.shapes import CLUSTER, model, trainer

PLAIN = Constants(matmul=1, memory=1, attention=1, traffic=0, tile=0, eager_layer=0, overlap=0, link=1, network=1)
BATCH = TokenBatch(tokens=2**20, length=4096, longest=4096)


def train(work, cluster=CLUSTER, constants=PLAIN, batch=BATCH):
    return TrainingModel(work, cluster, constants).train(batch)


def test_products_are_flops_over_the_rate():
    """Three passes over all parameters but the embedding, at the H100's best rate; the weights' bytes add little."""
    size = model("Qwen2.5-7B")
    work = trainer(data=1, micro_batch_tokens=2**20)
    weights = size.parameters - size.embedding
    rate = CLUSTER.gpu.bf16_tflops * 1e12 * CLUSTER.gpu.matmul_share
    assert train(work).matmul == pytest.approx(3 * 2 * weights * 2**20 / rate, rel=1e-3)


def test_attention_is_four_forward_passes_of_half_the_square():
    size = model("Qwen2.5-7B")
    flops = 28 * 2 * (28 * 2 * 128) * 4096 / 2  # of a token: layers, a product, heads x widths, half the context
    assert size.attention_flops(4096) == flops
    seconds = train(trainer(data=1)).attention
    assert seconds == pytest.approx(4 * flops * 2**20 / (CLUSTER.gpu.bf16_tflops * 1e12))


def test_few_tokens_are_bound_by_reading_the_weights():
    work = trainer(data=1)
    seconds = TrainingModel(work, CLUSTER, PLAIN).forward(TokenBatch(1, 1, 1)).matmul
    size = model("Qwen2.5-7B")
    assert seconds == pytest.approx((size.parameters - size.embedding) * 2 / 3350e9, rel=0.01)


def test_a_pipeline_waits_for_its_ends():
    """With p stages and m micro-batches the bubble is (p - 1) / m of the work (1F1B)."""
    work = trainer("Llama-3.1-70B", data=1, tensor=8, pipeline=4, micro_batch_tokens=2**15)
    time = train(work)
    micro_batches = 2**20 / 2**15
    once_a_step = TrainingModel(work, CLUSTER, PLAIN)._optimizer().collectives
    step = time.matmul + time.attention + time.collectives - once_a_step
    assert time.bubble == pytest.approx(step / micro_batches * 3, rel=1e-6)
    interleaved = replace(work, layout=replace(work.layout, virtual_pipeline=4))
    assert train(interleaved).bubble == pytest.approx(time.bubble / 4)


def test_sharded_weights_are_gathered_in_every_micro_batch():
    work = trainer(data=8, micro_batch_tokens=2**15)
    size, link = model("Qwen2.5-7B"), 450e9
    bytes_moved = size.parameters * (2 * 2 + 4) * 7 / 8  # twice in bf16, gradients once in float32
    micro_batches = 2**20 / 8 / 2**15
    assert train(work).collectives == pytest.approx(micro_batches * bytes_moved / link, rel=0.15)  # and latencies


def test_recomputation_offload_and_adapters_have_their_price():
    plain = train(trainer())
    assert train(trainer(recompute="full")).matmul > 1.3 * plain.matmul
    assert train(trainer(lora_rank=16)).matmul < 0.7 * plain.matmul
    assert train(trainer(lora_rank=16)).optimizer < plain.optimizer / 50
    assert train(trainer(offload_optimizer=True)).seconds > plain.seconds
    assert train(trainer(precision="fp8")).matmul < plain.matmul


def test_experts_with_few_tokens_are_slow():
    """Each of 128 experts gets a sixteenth of the tokens: in small micro-batches their tiles stay partly empty."""
    few = train(trainer("Qwen3-30B-A3B", micro_batch_tokens=512), constants=replace(PLAIN, tile=100))
    many = train(trainer("Qwen3-30B-A3B", micro_batch_tokens=32768), constants=replace(PLAIN, tile=100))
    assert few.matmul > 2 * many.matmul
    assert fill_tiles(1e9, 1e9, 1e9, tile=100) == pytest.approx(1)
    assert fill_tiles(100, 1e9, 1e9, tile=100) == pytest.approx(0.5)


def test_expert_parallelism_over_the_network_costs_more_than_over_links():
    network = ClusterNetwork(CLUSTER, PLAIN)
    assert network.exchange(4096, 8, 4096.0, 32) > network.exchange(4096, 8, 4096.0, 8)
    assert network.exchange(4096, 8, 4096.0, 1) == 0.0


def test_collectives_by_hand():
    network = ClusterNetwork(CLUSTER, replace(PLAIN, collective_latency=0))
    assert network.gather(8e9, 8) == pytest.approx(8e9 * 7 / 8 / 450e9)
    assert network.reduce(8e9, 8) == pytest.approx(2 * 8e9 * 7 / 8 / 450e9)
    assert network.gather(8e9, 32) == pytest.approx(8e9 * 31 / 32 / 400e9)  # eight cards of 50 GB/s for each node
    assert network.gather(8e9, 4, stride=8) == pytest.approx(8e9 * 3 / 4 / 50e9)  # one member in each node


@settings(max_examples=40, deadline=None)
@given(
    data=st.sampled_from([1, 2, 4, 8, 16]),
    length=st.integers(64, 65536),
    recompute=st.sampled_from(["none", "full"]),
)
def test_more_devices_compute_no_slower_and_longer_sequences_no_faster(data, length, recompute):
    batch = TokenBatch(2**20, length, length)
    constants = Constants()
    once = train(trainer(data=data, recompute=recompute), constants=constants, batch=batch)
    twice = train(trainer(data=2 * data, recompute=recompute), constants=constants, batch=batch)
    assert twice.matmul + twice.attention <= (once.matmul + once.attention) * (1 + 1e-9)
    long_batch = TokenBatch(2**20, 2 * length, length)
    longer = train(trainer(data=data, recompute=recompute), constants=constants, batch=long_batch)
    assert longer.seconds >= once.seconds * (1 - 1e-9)
    assert all(value >= 0 for value in vars(once).values())


def test_faster_devices_are_faster():
    for slow, fast in (("A100", "H100"), ("H20", "H100"), ("H100", "B200")):
        times = [train(trainer(), ClusterSpec.parse(f"1x8:{gpu}"), Constants()).seconds for gpu in (slow, fast)]
        assert times[0] > times[1]
