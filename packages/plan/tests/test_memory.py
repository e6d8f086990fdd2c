"""Estimates of memory against what models of the same settings really hold."""

from math import prod
from pathlib import Path

import pytest
import torch

from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig, RunConfig
from coalign.roles import Context
from coalign_plan.checks.memory_table import find_shapes
from coalign_plan.gpus import ClusterSpec
from coalign_plan.hf_config import read_directory
from coalign_plan.layouts.adapter import list_run_loads, pack_models
from coalign_plan.memory import MemoryEstimate, estimate_largest_phase, estimate_memory, read_shapes
from coalign_plan.model_size import LayerSize, ModelSize
from packages.plan.tests.models import describe_grpo, write_config
from tests.tiny import tiny_model_dir
from tests.vision import vision_model_dir


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), hidden=64, family="llama", tied=False))


def estimate(model: ModelConfig, *, exact: bool = True):
    """The estimate of a trainer that has no pipeline."""
    size = read_directory(Path(model.load))
    shapes = find_shapes(model, size) if exact else None
    [found] = estimate_memory(model, "trainer", RunConfig(algorithm="sft"), size, shapes)
    return found


def both(path: str, **config):
    """(the estimate, the module)"""
    model = ModelConfig(load=path, **config)
    module = FSDPModule(model, Context())
    module.setup()
    return estimate(model), module


def held(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def state(module: FSDPModule) -> list[torch.Tensor]:
    """Without step counts and what is shared by all parameters."""
    entries = [item for own in module.optimizer.state.values() for item in own.items()]
    return [value for key, value in entries if key != "step" and not key.startswith("qmap")]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizers_state(path, name, dtype):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    expected, module = both(path, optimizer={"name": name}, dtype=dtype)
    assert expected.optimizer == held(state(module))
    assert expected.weights == expected.gradients == held(module.model.parameters())


@pytest.mark.parametrize(
    "lora", [{"rank": 3}, {"rank": 2, "target": ["*.q_proj", "model.layers.0.mlp.*"]}, {"dora": True}]
)
def test_adapters(path, lora):
    pytest.importorskip("peft")
    expected, module = both(path, lora=lora, ema={"decay": 0.9})
    trained = [p for p in module.model.parameters() if p.requires_grad]
    assert expected.gradients == held(trained)
    assert expected.weights == held(module.model.parameters())
    assert expected.optimizer == held(state(module)) + held(module.average.tensors.values())


def test_random_weights_are_counted_from_the_configuration(path):
    loaded, drawn = (estimate(ModelConfig(load=path, init=init)) for init in ("load", "random"))
    assert loaded == drawn


def test_the_largest_phase_of_models_that_take_turns():
    trainer = MemoryEstimate(1, weights=10, gradients=10, optimizer=20, activations=5)
    policy, reference = MemoryEstimate(1, weights=10, cache=30), MemoryEstimate(1, weights=10, activations=1)
    models = {"policy": policy, "trainer": trainer, "reference": reference}
    assert (
        estimate_largest_phase(models, {}) == 10 + 30 + (10 + 20) + 10
    )  # the policy's turn, beside weights and optimizer
    everything = dict.fromkeys(models, ("weights", "gradients", "optimizer", "kv"))
    assert estimate_largest_phase(models, everything) == 10 + 10 + 20 + 5
    assert estimate_largest_phase(models, everything | {"reference": ()}) == 45 + 10
    assert estimate_largest_phase(models, {"trainer": ("optimizer",)}) == max(40 + 10 + 10, 45 + 20)


# ---- layouts, worked by hand: 10 layers of 1000 numbers and as many in embedding and in head, 12,000 in all


def size_of(**layer) -> ModelSize:
    return ModelSize(
        hidden=10, vocabulary=100, layers=(LayerSize(10, 1000, **layer),), embedding=1000, head=1000, is_tied=False
    )


def on_devices(size: ModelSize | None = None, role="trainer", device_bytes=None, **config):
    model = ModelConfig(**{"load": "here", "compute_dtype": "bfloat16", **config})
    return estimate_memory(model, role, RunConfig(algorithm="sft"), size or size_of(), None, device_bytes)


def test_fsdp_shards_all_of_the_state_over_all_ranks_of_a_copy():
    [whole] = on_devices(num_gpu=8)
    assert (whole.weights, whole.gradients, whole.optimizer) == (12_000 * 4 // 8, 12_000 * 4 // 8, 12_000 * 8 // 8)
    [copies] = on_devices(num_gpu=8, dp_replicate=2)
    [cut] = on_devices(num_gpu=8, tensor_parallel=2)
    assert copies.optimizer == 2 * whole.optimizer and cut.optimizer == whole.optimizer
    assert copies.buffers == whole.buffers > cut.buffers  # layers are gathered to compute: a tensor rank half of them


def test_zero_shards_more_at_each_stage():
    found = [on_devices(num_gpu=4, module="deepspeed", deepspeed={"stage": stage})[0] for stage in (1, 2, 3)]
    assert [(e.weights, e.gradients, e.optimizer) for e in found] == [
        (24_000, 48_000, 36_000),  # 2 bytes a weight, 4 a gradient, 12 of float32 weights and moments on 4 ranks
        (24_000, 12_000, 36_000),
        (6_000, 12_000, 36_000),
    ]
    [offloaded] = on_devices(num_gpu=4, module="deepspeed", deepspeed={"stage": 3, "offload_optimizer": True})
    assert offloaded.optimizer == 0 and offloaded.host == 36_000


def test_stages_of_megatrons_pipeline_have_their_layers_and_the_ends():
    first, middle, last = on_devices(
        num_gpu=12,
        module="megatron",
        tensor_parallel=2,
        pipeline_parallel=3,
        megatron={"first_stage_layers": 3, "last_stage_layers": 3},
    )
    # Layers 3, 4, 3; embedding and head at the ends; each rank has half, in 2 bytes; moments are shared by two copies.
    assert [e.weights for e in (first, middle, last)] == [4000, 4000, 4000]
    assert first.gradients == 8000 and first.optimizer == 12 * 2000 // 2
    [apart] = on_devices(num_gpu=2, module="megatron", megatron={"distributed_optimizer": False})
    assert apart.optimizer == 12 * 12_000


def test_the_first_stage_keeps_a_micro_batch_for_each_later_one():
    first, last = on_devices(
        num_gpu=2, module="megatron", pipeline_parallel=2, activation_checkpointing="full", max_tokens_per_micro=100
    )
    kept, working = 100 * 5 * 10 * 2, 100 * (1000 / 10 + 12 * 10) * 2  # inputs of five layers; one layer again
    assert (first.activations, last.activations) == (2 * kept + working, kept + working)


def test_experts_are_divided_by_expert_parallelism():
    size = size_of(experts=8, expert=500, active_experts=2)
    [whole] = on_devices(size, num_gpu=8, module="megatron")
    [cut] = on_devices(size, num_gpu=8, module="megatron", expert_parallel=8, megatron={"expert_tensor_parallel": 1})
    assert whole.weights == 2 * (12_000 + 40_000) and cut.weights == 2 * (12_000 + 40_000 // 8)
    assert cut.optimizer == 12 * (12_000 // 8 + 40_000 // 8)  # no two ranks have the same expert
    [engine] = on_devices(size, role="rollout", num_gpu=8, module="vllm", tensor_parallel=8)
    assert engine.weights == 2 * (12_000 + 40_000) // 8


def test_a_frozen_model_is_whole_unless_it_is_cut():
    [whole], [cut] = (
        on_devices(role="scorer", frozen=True, num_gpu=8, dtype="bfloat16", tensor_parallel=ways) for ways in (1, 2)
    )
    assert whole.weights == 24_000 and cut.weights == 3_000 and whole.optimizer == cut.gradients == 0


def test_recomputation_and_cuts_of_rows_lower_activations():
    tokens = {"max_tokens_per_micro": 1000, "num_gpu": 8}
    plain, selective, full = (
        on_devices(activation_checkpointing=kind, **tokens)[0].activations for kind in (None, "selective", "full")
    )
    assert plain > selective > full
    [cut] = on_devices(activation_checkpointing="full", context_parallel=2, tensor_parallel=2, **tokens)
    assert cut.activations == full // 4


def test_vllm_takes_its_share_of_a_device_and_the_native_engine_what_its_sequences_need():
    memory = 80 * 2**30
    [vllm] = on_devices(
        role="rollout", module="vllm", num_gpu=1, vllm={"gpu_memory_utilization": 0.5}, device_bytes=memory
    )
    assert vllm.total == memory // 2
    [native] = on_devices(
        size_of(cache=4), role="rollout", module="native", num_gpu=1, native={"kv_tokens": 1000}, device_bytes=memory
    )
    assert native.cache == 1000 * 10 * 4 * 2


def test_offload_leaves_the_device_what_is_gathered():
    [kept], [left] = (on_devices(num_gpu=8, cpu_offload=offload) for offload in (False, True))
    assert left.weights == left.gradients == left.optimizer == 0 and left.buffers == kept.buffers
    assert left.host == kept.weights + kept.gradients + kept.optimizer


def test_sizes_from_the_configuration_come_within_a_thousandth_of_the_tensors(path):
    exact, counted = (estimate(ModelConfig(load=path, num_gpu=0), exact=exact) for exact in (True, False))
    assert counted.total == pytest.approx(exact.total, rel=0.01)  # a tiny model has many norms


def test_each_device_of_a_placement_is_listed_with_its_stage(tmp_path):
    run = describe_grpo(write_config(tmp_path))
    trainer = run.config.models["trainer"].model_copy(update={"module": "megatron", "pipeline_parallel": 2})
    run = run.with_config(run.config.model_copy(update={"models": run.config.models | {"trainer": trainer}}))
    loads = list_run_loads(run, pack_models(run), ClusterSpec.parse("1x8:H100"))
    assert sorted((load.first, load.count, load.stages["trainer"]) for load in loads) == [(0, 4, 0), (4, 4, 1)]
    assert all(load.peak <= load.together for load in loads)


def test_a_model_that_sees_has_its_tower_and_what_the_tower_keeps(tmp_path):
    model = vision_model_dir(tmp_path / "model")
    size, keys = read_directory(model), {"load": str(model), "max_tokens_per_micro": 100}

    def compute(role: str = "trainer", images: dict | None = {}, **config) -> MemoryEstimate:  # noqa: B006
        run = RunConfig(algorithm="sft", data={"images": images})
        [found] = estimate_memory(ModelConfig(**keys | config), role, run, size)
        return found

    text, whole, frozen = compute(images=None), compute(), compute(vision={"tower": "freeze"})
    held = sum(prod(shape) for name, shape in read_shapes(model).items() if name.startswith("visual."))
    assert whole.parameters - text.parameters == pytest.approx(held, rel=0.1)  # norms and biases are left out
    for part, copies in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        assert getattr(whole, part) - getattr(text, part) == 4 * copies * (whole.parameters - text.parameters)
    assert frozen.weights == whole.weights and frozen.optimizer == text.optimizer
    patches = 4 * 100  # of 100 tokens, if all of them are of images
    pixels = 4 * patches * 3 * 2 * 4 * 4
    assert whole.activations - text.activations > pixels + frozen.activations - text.activations - pixels > pixels
    limited = compute(max_patches_per_micro=40)
    assert limited.activations - text.activations == pytest.approx((whole.activations - text.activations) / 10, abs=1)
    assert whole.host == 512 * 2**20 and compute(vision={"cache_mib": 1}).host == 2**20
    assert compute("scorer").weights == whole.weights and compute("scorer").gradients == 0
