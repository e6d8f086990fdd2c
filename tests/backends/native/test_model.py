"""Weights in: adopted without a copy or copied, complete and named, and refreshed in what was derived from them."""

from __future__ import annotations

import pytest
import torch

from coalign.backends.engines.native.native_model import NativeModel
from coalign.backends.engines.session_driver import generate_responses
from tests.backends.native import helpers


def empty(**changes):
    config = helpers.qwen2(**changes)
    return NativeModel(config, dtype=torch.float32, device="cpu")


def test_adopted_weights_are_the_given_tensors():
    source = helpers.reference(helpers.qwen2())
    model = empty()
    assert all(p.is_meta for p in model.module.parameters())
    model.load(source.named_parameters(), adopt=True)
    for name, tensor in source.named_parameters():
        assert model.module.get_parameter(name).data_ptr() == tensor.data_ptr(), name
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    before = {name: tensor.clone() for name, tensor in source.named_parameters()}
    updated = helpers.reference(helpers.qwen2(), seed=1)
    model.load(updated.named_parameters(), adopt=False)  # a copy leaves the lender alone
    for name, tensor in source.named_parameters():
        assert torch.equal(tensor, before[name]), name
        assert torch.equal(model.module.get_parameter(name), updated.get_parameter(name)), name


def test_copied_weights_are_not_and_keep_their_storage():
    source, model = helpers.reference(helpers.qwen2()), empty()
    model.load(source.named_parameters(), adopt=False)
    storage = {name: tensor.data_ptr() for name, tensor in model.module.named_parameters()}
    assert all(storage[name] != tensor.data_ptr() for name, tensor in source.named_parameters())
    changed = {name: tensor.detach() + 1 for name, tensor in source.named_parameters()}
    model.load(changed.items(), adopt=False)
    for name, tensor in model.module.named_parameters():
        assert tensor.data_ptr() == storage[name]
        torch.testing.assert_close(tensor, changed[name], rtol=0, atol=0)


def test_adoption_converts_where_the_dtype_differs():
    source = helpers.reference(helpers.qwen2())
    model = NativeModel(helpers.qwen2(), dtype=torch.bfloat16, device="cpu")
    for step in range(2):
        with torch.no_grad():
            source.model.norm.weight.fill_(step + 0.5)
        model.load(source.named_parameters(), adopt=True)
        assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
        assert model.module.model.norm.weight[0].item() == step + 0.5


def test_either_name_of_tied_weights_will_do():
    source = helpers.reference(helpers.qwen2())
    weights = dict(source.named_parameters())
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    model = empty()
    model.load(weights.items(), adopt=True)
    assert model.module.model.embed_tokens.weight.data_ptr() == source.lm_head.weight.data_ptr()


def test_names_and_shapes_that_do_not_fit_are_refused():
    weights = dict(helpers.reference(helpers.qwen2()).named_parameters())
    weights["model.norm.wieght"] = weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unexpected \['model.norm.wieght'\]"):
        empty().load(weights.items(), adopt=True)
    weights = dict(helpers.reference(helpers.qwen2(hidden_size=96)).named_parameters())
    with pytest.raises(ValueError, match=r"has shape \[160, 96\]; the model needs \[160, 48\]"):
        empty().load(weights.items(), adopt=True)


def test_weights_that_are_not_given_again_stay():
    weights = dict(helpers.reference(helpers.qwen2()).named_parameters())
    model = empty()
    model.load(weights.items(), adopt=True)
    model.load([("model.norm.weight", torch.full_like(weights["model.norm.weight"], 7.0))], adopt=False)
    assert (model.module.model.norm.weight == 7.0).all() and not (weights["model.norm.weight"] == 7.0).any()
    assert model.module.model.embed_tokens.weight.data_ptr() == weights["model.embed_tokens.weight"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_follows_weights_changed_in_place(dtype):
    """As in one process: the trainer steps, the sync only bumps the version. A fresh engine must agree to the bit."""
    live = helpers.reference(helpers.qwen2(tie_word_embeddings=False), dtype=dtype)
    engine = helpers.engine(live)
    asked = helpers.requests(3, samples=2)
    before = helpers.flat(generate_responses(engine, asked, helpers.SAMPLING))
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.mul_(1.1)
    engine.load_weights(live.named_parameters(), version=1, adopt=True)
    after = helpers.flat(generate_responses(engine, asked, helpers.SAMPLING))
    fresh = helpers.flat(generate_responses(helpers.engine(live), asked, helpers.SAMPLING))
    for old, new, expected in zip(before, after, fresh, strict=True):
        assert new.tokens.tolist() == expected.tokens.tolist()
        assert torch.equal(new.logprobs, expected.logprobs)
        assert not torch.equal(old.logprobs, new.logprobs)
        assert set(new.versions.tolist()) == {1}
