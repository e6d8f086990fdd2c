"""VLLMModule: what it passes to vLLM, what it refuses. What it generates: tests/conformance/test_engines.py."""

from __future__ import annotations

import json
import random
import shutil
from importlib import metadata
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from coalign.backends import lora, refuse_owned, refuse_unknown
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from coalign_vllm import module as vllm
from tests.conformance.engines import SMALL, VLLM, build, load, mismatch, model_dir, prompts
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("model"))


def trainer(directory, context=None, **lora) -> FSDPModule:
    """Of adapters that have moved a little."""
    made = FSDPModule(
        ModelConfig(load=str(directory), lora={"rank": 4, "alpha": 6.0} | lora), context or Context(model="trainer")
    )
    made.setup()
    move(made, 0)
    return made


def move(trainer: FSDPModule, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)


def merged(trainer: FSDPModule, directory) -> PreTrainedModel:
    """An ordinary model of what the trainer is now."""
    model = load(directory)
    model.load_state_dict(dict(lora.export_merged(trainer.model.model)), strict=False)
    return model


def module(directory, **config) -> vllm.VLLMModule:
    return vllm.VLLMModule(ModelConfig(module="vllm", load=str(directory), **config), Context(model="policy"))


# ---- without vLLM


@pytest.mark.parametrize(
    ("installed", "message"),
    [({}, r"module `vllm` needs vLLM: pip install 'coalign\[vllm\]'"), ({"vllm": "0.31.2"}, r"0\.31\.2 is installed")],
)
def test_a_vllm_that_is_missing_or_unknown_is_named_with_what_to_do(directory, monkeypatch, installed, message):
    def version(package):
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError, match=message):
        module(directory).setup()


def test_what_devices_cannot_share_is_refused(directory, tmp_path):
    with pytest.raises(ValueError, match=r"models\.policy\.pipeline_parallel is 2: on CPU .* use tensor_parallel"):
        module(directory, pipeline_parallel=2).setup()
    with pytest.raises(ValueError, match=r"models\.policy\.tensor_parallel is 3, which does not divide .* 2 attention"):
        module(directory, tensor_parallel=3).setup()
    uneven = tiny_model_dir(tmp_path, hidden=48, heads=6, kv_heads=2)
    message = r"tensor_parallel is 3, which neither divides nor is a multiple of the model's 2 heads"
    with pytest.raises(ValueError, match=message):
        module(uneven, tensor_parallel=3).setup()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_seq", "models.policy.vllm.max_num_seq is no engine argument of vLLM; did you mean 'max_num_seqs'"),
        ("seed", "models.policy.vllm.seed is set by Coalign: random numbers follow from the run's `seed`"),
        ("tensor_parallel_size", "is set by Coalign: it is `tensor_parallel`"),
    ],
)
def test_options_that_are_unknown_or_taken_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        options, owned, section = {"block_size": 16, name: 1}, vllm.OWNED_ARGUMENTS, "models.policy.vllm"
        refuse_owned(options, owned, section)
        refuse_unknown(options, ["block_size", "max_num_seqs", "seed"], owned, section, "engine argument of vLLM")


@VLLM
def test_parcels_hold_every_tensor_and_one_that_is_larger_than_a_parcel():
    from coalign_vllm.weight_loader import WeightOutlet

    weights = [(str(n), torch.randn(n, 3).to(dtype)) for n, dtype in ((4, torch.float32), (7, torch.bfloat16))] * 3
    weights += [("large", torch.randn(200)), ("none", torch.zeros(0, 3)), ("last", torch.tensor(3.0))]
    arrived = [
        (name, tensor.clone()) for parcel in WeightOutlet(256).parcels(weights) for name, tensor in parcel.open()
    ]
    assert [name for name, _ in arrived] == [name for name, _ in weights]
    for (_, sent), (_, met) in zip(weights, arrived, strict=True):
        assert torch.equal(sent, met) and sent.dtype == met.dtype


# ---- with vLLM


@VLLM
@pytest.mark.timeout(600)
def test_the_process_stays_as_it_was_and_what_the_user_says_reaches_vllm(directory):
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.set_num_threads
    made = build("vllm", directory, vllm={**SMALL, "max_num_seqs": 5, "max_model_len": 96})
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist() and before[3] is torch.set_num_threads
    assert made.engine.llm.vllm_config.scheduler_config.max_num_seqs == 5 and made.engine.context == 96
    with pytest.raises(ValueError, match=r"missing \['model\.embed_tokens\.weight'"):
        made.load_weights([item for item in load(directory).named_parameters() if "layers" in item[0]], version=0)
    assert made.weights_dtype == torch.float32
    made.load_weights(load(directory).named_parameters(), version=0)
    parts = [item for item in load(directory).named_parameters() if item[0].endswith("q_proj.weight")]
    with pytest.raises(ValueError, match=r"k_proj.*v_proj.*computes them as one layer"):
        made.load_weights(parts, version=1)
    with pytest.raises(RuntimeError, match="does not serve"):
        made.generate(prompts())
    kept = [item for item in load(directory).named_parameters() if item[0].endswith("proj.weight")]
    made.load_weights(kept, version=2)  # without the biases, as of merged adapters
    assert mismatch(load(directory), made.generate(prompts())) < 1e-5
    some = trainer(directory, target=["*.q_proj", "*.up_proj"])  # parts of what vLLM computes as one
    made.load_weights(some.export_weights(changing=True), version=3)
    assert mismatch(merged(some, directory), made.generate(prompts())) < 1e-5
    made.close()


@VLLM
@pytest.mark.timeout(600)
def test_adapters_beside_the_weights_compute_what_merged_ones_do(directory):
    told = Context(model="policy", samples_per_prompt=3, seed=5, adapter_rank=4)
    learner = trainer(directory, told, target=["*.q_proj", "*.mlp.*"], rslora=True)
    policy = build("vllm", directory, told)
    policy.load_weights(learner.export_weights(), version=0)
    first = policy.generate(prompts())
    assert mismatch(merged(learner, directory), first) < 1e-5
    assert mismatch(load(directory), first) > 1e-2

    move(learner, 1)
    sent = dict(learner.export_weights(changing=True))
    assert len(sent) == 2 * 2 * 4 and all("lora_" in name for name in sent)
    policy.load_weights(sent.items(), version=1)
    second = policy.generate(prompts())
    assert mismatch(merged(learner, directory), second) < 1e-5
    assert set(second["versions"][second["loss_mask"]].tolist()) == {1}

    half = {name: tensor for name, tensor in sent.items() if "layers.1.self_attn.q_proj.lora_B" not in name}
    other = {name.replace("layers.1", "layers.7"): tensor for name, tensor in sent.items()}
    small = {name: tensor[..., :-1] for name, tensor in sent.items()}
    for wrong, message in (
        (half, r"missing \['base_model.*q_proj\.lora_B\.weight'\], the other half"),
        (other, r"layers\.7.* is no adapter of a weight of the model"),
        (small, r"has shape \[4, 63\]; the model needs \[4, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.load_weights(wrong.items(), version=2)
        with pytest.raises(RuntimeError, match="does not serve"):
            policy.generate(prompts())
    policy.load_weights(load(directory).named_parameters(), version=3)  # and no adapters
    assert mismatch(load(directory), policy.generate(prompts())) < 1e-5
    policy.close()


@VLLM
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, {}, r"architectures \['FooForCausalLM'\] are not supported"),
        ({"head_dim": 8}, {}, "kernels for CPUs know heads of 32, .* numbers, and the model's have 8"),
        ({}, {"max_model_len": 4096}, r"max_model_len \(4096\)"),
    ],
)
def test_what_vllm_cannot_run_is_named_before_weights_are_read(directory, tmp_path, change, settings, message):
    written = json.loads((directory / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(written))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path)
    with pytest.raises(ValueError, match=rf"(?s)^models\.policy\.load: vLLM 0\.\d+\.\d+ cannot run .*{message}"):
        module(tmp_path, vllm=SMALL | settings).setup()


@VLLM
def test_ranks_beyond_what_vllm_has_room_for_are_refused():
    from coalign_vllm import weight_loader as worker

    assert [worker.adapter_capacity(rank, "policy") for rank in (1, 4, 9, 512)] == [1, 8, 16, 512]
    with pytest.raises(ValueError, match=r"rank up to 512; the trainer's `lora\.rank` is 513: use `merged`"):
        worker.adapter_capacity(513, "policy")


@VLLM
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_in_other_processes_compute_the_same(tmp_path):
    shape = {"heads": 4, "kv_heads": 2, "hidden": 128, "tied": False}
    paths = [model_dir(tmp_path / str(seed), seed, **shape) for seed in range(2)]
    alone, shared = build("native", paths[0]), build("vllm", paths[0], tensor_parallel=2)
    for version, path in enumerate(paths):
        for each in (alone, shared):
            each.load_weights(load(path).named_parameters(), version=version)
        out, expected = shared.generate(prompts()), alone.generate(prompts())
        assert mismatch(load(path), out) < 1e-5
        assert torch.equal(out["tokens"], expected["tokens"]) and torch.equal(out["versions"], expected["versions"])
    shared.close()


@VLLM
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_reach_workers_in_other_processes(tmp_path):
    path = model_dir(tmp_path, heads=4, kv_heads=2, hidden=128, tied=False)
    told = Context(model="policy", samples_per_prompt=3, seed=5, adapter_rank=4)
    learner, policy = trainer(path, told), build("vllm", path, told, tensor_parallel=2)
    for version in range(2):
        move(learner, version)
        policy.load_weights(learner.export_weights(changing=version > 0), version=version)
        assert mismatch(merged(learner, path), policy.generate(prompts())) < 1e-5
    policy.close()
