import pytest
import torch

from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.scorers.cached import CachedModule, hash_model
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from tests.backends.batches import rollout
from tests.tiny import tiny_model_dir


def scorer(path, cache, **keys) -> CachedModule:
    module = CachedModule(ModelConfig(load=str(path), frozen=True, cache=str(cache), **keys), Context())
    module.setup()
    return module


def logprobs(module, batch):
    return module.forward_step(batch)["ref_logprobs"]


def counts(module, batch):
    out = module.forward_step(batch)
    return out["cache/hits"].value, out["cache/misses"].value


def test_the_log_probs_are_those_of_the_model(path, tmp_path):
    batch = rollout()
    plain = FSDPModule(ModelConfig(load=str(path), frozen=True), Context())
    plain.setup()
    cached = scorer(path, tmp_path)
    for _ in range(2):
        torch.testing.assert_close(logprobs(cached, batch), plain.forward_step(batch)["ref_logprobs"], rtol=0, atol=0)
    assert logprobs(cached, batch.slice(0, 0)).shape == (0,)
    assert set(cached.forward_step(batch, into="other")) == {"other", "cache/hits", "cache/misses"}


def test_a_second_run_does_not_load_the_model(path, tmp_path):
    batch = rollout()
    first = scorer(path, tmp_path)
    expected = logprobs(first, batch)
    first.close()
    again = scorer(path, tmp_path)
    torch.testing.assert_close(logprobs(again, batch), expected, rtol=0, atol=0)
    assert again.scorer is None


def test_only_what_is_new_is_computed(path, tmp_path):
    cached, batch = scorer(path, tmp_path), rollout()
    assert counts(cached, batch.select([0, 2])) == (0, 2)
    assert counts(cached, batch) == (2, len(batch) - 2)
    cached.unload()
    reordered = batch.select([3, 1, 0])
    assert counts(cached, reordered) == (3, 0)
    assert cached.scorer is None
    every_second = batch["loss_mask"] & (torch.arange(batch.tokens_total) % 2 == 0)
    assert counts(cached, batch.with_(loss_mask=every_second))[1] > 0


def test_another_model_or_temperature_has_a_file_of_its_own(path, tmp_path):
    other = tiny_model_dir(tmp_path / "other", seed=1)
    configs = [
        ModelConfig(load=str(path)),
        ModelConfig(load=str(other)),
        ModelConfig(load=str(path), dtype="bfloat16"),
        ModelConfig(load=str(path), sampling={"temperature": 0.5}),
        ModelConfig(load=str(path), init="random"),
    ]
    assert len({hash_model(config, 0) for config in configs}) == 5
    assert hash_model(configs[0], 0) == hash_model(ModelConfig(load=str(path), num_process=2), 1)
    assert hash_model(configs[-1], 0) != hash_model(configs[-1], 1)


def test_only_frozen_language_models_can_be_cached(path, tmp_path):
    for keys in ({"frozen": False}, {"frozen": True, "head": "reward"}):
        with pytest.raises(ValueError, match=r"models\.reference\.cache: only a frozen model with head `lm`"):
            CachedModule(ModelConfig(load=str(path), cache=str(tmp_path), **keys), Context(model="reference"))
