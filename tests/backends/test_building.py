"""Models that are built in threads of one process do not see each other."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import PreTrainedModel, modeling_utils

from coalign.backends import pretrained
from coalign.backends.engines.native.native_model import NativeModel
from coalign.config.schema import ModelConfig
from coalign.devices import keep_generator, seed_generator
from coalign.roles import Context

ROUNDS = 8


def side_by_side(*works):
    """What each function returns, all of them begun at once."""
    together = threading.Barrier(len(works))

    def work(function):
        together.wait()
        return function()

    with ThreadPoolExecutor(len(works)) as pool:
        return [each.result() for each in [pool.submit(work, function) for function in works]]


def test_loading_side_by_side_keeps_embeddings_tied(path):
    config, tie = ModelConfig(load=path), PreTrainedModel.tie_weights
    expected = pretrained.load(config, seed=0).lm_head.weight

    def load():
        model = pretrained.load(config, seed=0)
        return model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, expected)

    def build():
        engine = NativeModel(pretrained.read_config(config), dtype=torch.float32, device="cpu")
        return engine._aliases["lm_head.weight"] == ["model.embed_tokens.weight", "lm_head.weight"]

    for _ in range(ROUNDS):
        assert all(side_by_side(load, load, build))
        assert PreTrainedModel.tie_weights is tie and torch.get_default_dtype() == torch.float32


def test_saving_beside_loading(path, tmp_path):
    config = ModelConfig(load=path)
    model = pretrained.load(config, seed=0)
    unwrap = modeling_utils.unwrap_model

    def save(name):
        pretrained.build_writer(model, config, Context(), tmp_path / name)(dict(model.named_parameters()))

    for _ in range(3):
        side_by_side(lambda: save("a"), lambda: save("b"), lambda: pretrained.load(config, seed=0))
        assert modeling_utils.unwrap_model is unwrap


@pytest.mark.parametrize("more", [{"init": "random"}, {"lora": {"rank": 2}}], ids=["random", "lora"])
def test_what_is_drawn_is_drawn_from_the_seed_and_disturbs_nobody(path, more):
    config = ModelConfig(load=path, **more)
    alone = pretrained.load(config, seed=7).state_dict()
    state = torch.get_rng_state()
    for model in side_by_side(*[lambda: pretrained.load(config, seed=7)] * 3):
        assert all(torch.equal(tensor, alone[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_that_is_kept_is_not_touched_by_another_thread():
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with seed_generator("cpu", 3):
            entered.set()
            leave.wait(10)
            return torch.rand(4)

    def build():
        entered.wait(10)
        leave.set()
        with seed_generator("cpu", 4):
            return torch.rand(4)

    state = torch.get_rng_state()
    first, second = side_by_side(hold, build)
    assert torch.equal(first, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(second, torch.rand(4, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(torch.get_rng_state(), state)
    with keep_generator("cpu"):
        torch.rand(4)
    assert torch.equal(torch.get_rng_state(), state)
