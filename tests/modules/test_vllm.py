"""VLLMModule: what it passes to vLLM, what it refuses. What it generates: tests/conformance/test_engines.py."""

from __future__ import annotations

import random
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch

from coalign.config.schema import ModelConfig
from coalign.modules import vllm
from coalign.types import Context
from coalign.vllm import options
from coalign.vllm.parcels import Outlet
from tests.conformance.engines import SMALL, VLLM, build, load, mismatch, model_dir, prompts


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("model"))


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

    monkeypatch.setattr(vllm, "version", version)
    with pytest.raises(ImportError, match=message):
        module(directory).setup()


def test_what_devices_cannot_share_is_refused(directory):
    with pytest.raises(ValueError, match=r"models\.policy\.pipeline_parallel is 2: on CPU .* use tensor_parallel"):
        module(directory, pipeline_parallel=2).setup()
    with pytest.raises(ValueError, match=r"models\.policy\.tensor_parallel is 3, which does not divide .* 2 attention"):
        module(directory, tensor_parallel=3).setup()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_seq", "models.policy.vllm.max_num_seq is no engine argument of vLLM; did you mean max_num_seqs"),
        ("seed", "models.policy.vllm.seed is set by Coalign: random numbers follow from the run's `seed`"),
        ("tensor_parallel_size", "is set by Coalign: it is `tensor_parallel`"),
    ],
)
def test_options_that_are_unknown_or_taken_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        options.check({"block_size": 16, name: 1}, ["block_size", "max_num_seqs", "seed"], "policy")


def test_parcels_hold_every_tensor_and_one_that_is_larger_than_a_parcel():
    weights = [(str(n), torch.randn(n, 3).to(dtype)) for n, dtype in ((4, torch.float32), (7, torch.bfloat16))] * 3
    weights += [("large", torch.randn(200)), ("none", torch.zeros(0, 3)), ("last", torch.tensor(3.0))]
    arrived = [(name, tensor.clone()) for parcel in Outlet(256).parcels(weights) for name, tensor in parcel.open()]
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
    made.load_weights(load(directory).named_parameters(), version=0)
    parts = [item for item in load(directory).named_parameters() if item[0].endswith("q_proj.weight")]
    with pytest.raises(ValueError, match=r"k_proj.*v_proj.*computes them as one layer"):
        made.load_weights(parts, version=1)
    with pytest.raises(RuntimeError, match="does not serve"):
        made.generate(prompts())
    kept = [item for item in load(directory).named_parameters() if item[0].endswith("proj.weight")]
    made.load_weights(kept, version=2)  # without the biases, as of merged adapters
    assert mismatch(load(directory), made.generate(prompts())) < 1e-5
    made.close()


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
