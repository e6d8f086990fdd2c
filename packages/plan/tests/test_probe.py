"""What the probe makes of its measurements: constants at which the predictions are what was measured."""

from dataclasses import replace

import pytest

from coalign_plan.constants import Constants
from coalign_plan.generation import EngineReplica
from coalign_plan.gpus import GPUS, ClusterSpec
from coalign_plan.hf_config import read_directory
from coalign_plan.job import ModelWork, Parallelism
from coalign_plan.report import probe
from coalign_plan.training import TokenBatch, TrainingModel, fill_tiles

HOST = replace(GPUS["L40S"], name="cpu", bf16_tflops=1.0, fp32_tflops=0.3, memory_gb_s=20.0, matmul_share=1.0)
CONSTANTS = replace(Constants(), matmul=1.0, memory=1.0, tile=30.0, eager_layer=0.0)


def test_the_tile_explains_both_products():
    large, thin = (1e12 * fill_tiles(*shape, tile=40) for shape in ((1536, 1536, 1536), (1024, 384, 384)))
    assert probe.solve_tile(large, thin) == pytest.approx(40)
    assert probe.solve_tile(1.0, 1.2) == 0.0  # thin ones are faster: noise


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_training_rate_is_the_one_at_which_the_step_takes_that_long(tmp_path, precision):
    seconds = 3.0
    gpu = probe.calibrate_training(HOST, CONSTANTS, tmp_path, precision, seconds)
    work = ModelWork(
        "trainer", "trainer", read_directory(tmp_path), Parallelism(), precision=precision, micro_batch_tokens=16384,
        recomputes_head=True,
    )  # fmt: skip
    # 8 groups: a prompt of 64 tokens and answers of 768; a token's own sequence has 172 on average
    tokens, length, longest = 8 * (64 + 768), 220160 / 1280, 224
    assert probe.describe_batch() == TokenBatch(tokens, length, longest, 768 / 832)
    attention = CONSTANTS.attention * HOST.bf16_tflops / gpu.bf16_tflops
    model = TrainingModel(work, ClusterSpec(1, 1, gpu, 1.0), replace(CONSTANTS, attention=attention))
    predicted = model.train(probe.describe_batch())
    assert predicted.seconds == pytest.approx(seconds, rel=1e-3)


def test_decode_constants_are_found_again(tmp_path):
    known = replace(CONSTANTS, layer=1e-3, decode_step=4e-3, sequence=1e-4)
    points = {}
    for layers, sequences in ((probe.LAYERS, 8), (probe.LAYERS, 64), (probe.LAYERS // 2, 64)):
        probe.save_shape(tmp_path, layers)
        work = ModelWork(
            "policy", "rollout", read_directory(tmp_path), Parallelism(), precision="fp32", weight_bytes=4.0,
            kv_bytes=4.0,
        )  # fmt: skip
        replica = EngineReplica(work, ClusterSpec(1, 1, HOST, 1.0), known)
        context = probe.PROMPT + probe.DECODED / 2
        points[layers, sequences] = 1e3 * replica.decode_seconds(sequences, context)
    found = probe.calibrate_decoding(HOST, CONSTANTS, tmp_path, points)
    assert (found.layer, found.decode_step, found.sequence) == pytest.approx((1e-3, 4e-3, 1e-4))
