"""Compiled layers compute what they compute without, and are compiled a few times, whatever rows come."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch._dynamo import reset
from torch._dynamo.utils import counters

from tests.backends.batches import rollout
from tests.backends.test_fsdp import Watched, module
from tests.tiny import tiny_model_dir

LAYERS = 10  # more than torch.compile would make versions of one function for (8)
PROMPTS = [(5, 9, 12), (4, 4), (7,), (3, 20, 11, 6), (13, 2)]


@pytest.mark.backends
def test_log_probs_and_gradients_are_those_of_plain_layers_and_lengths_compile_nothing(tmp_path):
    path = str(tiny_model_dir(tmp_path, layers=LAYERS))
    reset()
    counters.clear()
    still = {"kind": Watched, "optimizer": {"lr": 0.0}}  # AdamW would make steps of rounding
    plain, compiled = module(path, **still), module(path, **still, compile=True)
    graphs = []
    for seed, prompts in enumerate(PROMPTS):
        batch = rollout(prompts, 3, seed=seed)
        logprobs = [each.forward_step(batch)["ref_logprobs"] for each in (plain, compiled)]
        torch.testing.assert_close(*logprobs, rtol=1e-5, atol=1e-5)
        for each in (plain, compiled):
            each.train_step(batch)
        assert float((compiled.gradient - plain.gradient).norm() / plain.gradient.norm()) < 1e-5
        graphs.append(counters["stats"]["unique_graphs"])
    # Two in the layer and two in its attention, each with gradient and without.
    assert graphs == [8] * len(PROMPTS)


def test_a_compiler_that_is_missing_is_named(tmp_path):
    # monkeypatch would delete the setting in the end: it takes `config.cpp` for a class.
    missing = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with missing, pytest.raises(RuntimeError, match=r"models\.trainer\.compile: .*no-such-compiler"):
        module(str(tiny_model_dir(tmp_path)), compile=True)
