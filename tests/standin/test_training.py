"""Training on the simulated device is training on the CPU: log-probs, gradients, weights after steps, checkpoints."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from coalign.backends import pretrained
from coalign.backends.base import build_objective
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import LossConfig, ModelConfig
from coalign.devices import use_device
from coalign.memory import move_module
from coalign.roles import Context
from tests.backends.batches import rollout
from tests.conformance.backends import BACKENDS, relative, train
from tests.conformance.layouts import EXPERTS
from tests.conformance.test_training import case, check
from tests.standin.device import memory_limit
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.device
quick = pytest.mark.quick
CARD = "standin:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def _current_card():
    """As in a worker: the model's card is the current one."""
    with use_device(CARD):
        yield


def build(path, device, *, loss="policy_gradient", **config):
    context = Context(device=device, loss=build_objective(LossConfig(fn=loss)), samples_per_prompt=3)
    module = FSDPModule(ModelConfig(load=str(path), **{"optimizer": {"lr": 1e-2, "eps": 1e-3}} | config), context)
    module.setup()
    return module


def learn(module, batch, steps=2):
    """Log-probs (or values, scores) before training, gradients of the first step, and the weights after the last."""
    gradients = {}
    step = module.optimizer_step

    def note_gradients():
        for name, parameter in module.model.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(name, parameter.grad.detach().to("cpu", copy=True))
        return step()

    module.optimizer_step = note_gradients
    [before] = module.forward_step(batch).values()
    stats = [module.train_step(batch) for _ in range(steps)]
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in module.export_weights()}
    return before, gradients, weights, stats


def compare(path, batch, tolerance=1e-6, **config):
    own, other = (learn(build(path, device, **config), batch) for device in (CARD, "cpu"))
    assert torch.equal(own[0], other[0]) or relative(own[0], other[0]) < tolerance  # values begin at 0
    assert relative(own[1], other[1]) < tolerance
    assert relative(own[2], other[2]) < tolerance
    for mine, theirs in zip(own[3], other[3], strict=True):
        assert mine["loss/grad_norm"].value == pytest.approx(theirs["loss/grad_norm"].value, rel=tolerance)
        assert mine["loss/value"].value == pytest.approx(theirs["loss/value"].value, rel=tolerance, abs=tolerance)


CONFIGS = {  # micro-batches, unshared prompts, recomputation and half precision: the conformance suite, below
    "adamw": {},
    "several updates": {"updates_per_batch": 2, "epochs_per_batch": 2},
    "selective recomputation": {"activation_checkpointing": "selective"},
    "adapters": {"lora": {"rank": 4}},
    "adapters with dropout": {"lora": {"rank": 4, "dropout": 0.2}},
    "average": {"ema": {"decay": 0.9}},
    "muon": {"optimizer": {"name": "muon", "lr": 1e-2, "eps": 1e-3}},
    "adafactor": {"optimizer": {"name": "adafactor", "lr": 1e-2}},
    "padded rows": {"rows": "padded"},
    "single rows": {"rows": "single"},
    "chosen by the architecture": {"rows": "auto"},
    "value": {"head": "value", "head_init": "zero", "loss": "value"},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=quick) if n == "adamw" else n for n in CONFIGS])
def test_training_is_that_of_the_cpu(folder, name):
    tolerance = 1e-3 if name in ("muon", "adafactor") else 1e-6  # which divide small numbers by small numbers
    compare(tiny_model_dir(folder / "qwen2"), rollout((5, 9, 12), 3), tolerance, **CONFIGS[name])


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "qwen3_moe"])
def test_other_families(folder, family):
    more = EXPERTS if family == "qwen3_moe" else {}
    compare(tiny_model_dir(folder / family, family=family, **more), rollout((5, 9), 2))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", [each for each in BACKENDS if each.module == "fsdp" and each.ranks == 1])
def test_the_conformance_suite(backend, tied, tmp_path_factory):
    path, batch, expected = case(tied, tmp_path_factory.getbasetemp())
    [got] = train([(replace(backend, device=CARD), path, batch)], tmp_path_factory.mktemp(backend.name))
    check(backend, got, expected)


# ---- tied weights


@quick
def test_tied_weights_stay_tied_on_the_device():
    inner = nn.Linear(3, 3, bias=False)
    module = nn.ModuleDict({"a": inner, "b": nn.ModuleDict({"c": nn.Linear(3, 3, bias=False)}), "d": inner})
    module["b"]["c"].weight = inner.weight
    move_module(module, CARD)
    weights = [module["a"].weight, module["b"]["c"].weight, module["d"].weight]
    assert weights[0].device == torch.device(CARD)
    assert all(each is weights[0] for each in weights)
    assert len(list(module.parameters())) == 1


@quick
def test_a_model_that_ties_its_embeddings_has_them_once(folder):
    module = build(tiny_model_dir(folder / "qwen2"), CARD)
    model = module.model.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    module.train_step(rollout())
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ---- several models of one process


def test_models_that_load_side_by_side_on_two_cards_keep_their_ties(folder):
    path = str(tiny_model_dir(folder / "qwen2"))

    def load_trainer():
        model = build(path, "standin:0").model.model
        return model.lm_head.weight is model.model.embed_tokens.weight

    def load_policy():
        context = Context(device="standin:1", samples_per_prompt=1)
        module = NativeModule(ModelConfig(load=path, module="native"), context)
        module.setup()
        return len(module.engine.model._aliases["lm_head.weight"]) == 2

    with ThreadPoolExecutor(2) as pool:
        for _ in range(200):
            assert all(each.result() for each in [pool.submit(load_trainer), pool.submit(load_policy)])


@quick
def test_models_that_train_side_by_side_draw_their_own_dropout(folder):
    path = str(tiny_model_dir(folder / "qwen2", attention_dropout=0.3))
    batch, config = rollout((5, 9), 3), {"rows": "padded", "lora": {"rank": 4, "dropout": 0.3}}

    def train(card):
        module = build(path, card, **config)
        with use_device(card):
            return [module.train_step(batch)["loss/grad_norm"].value for _ in range(5)]

    alone = train("standin:0")
    pretrained.load(ModelConfig(load=path, init="random"), seed=3)
    with ThreadPoolExecutor(4) as pool:
        together = [each.result() for each in [pool.submit(train, f"standin:{card}") for card in range(4)]]
    assert together == [alone] * 4


# ---- checkpoints


@pytest.mark.parametrize("config", [{}, {"ema": {"decay": 0.9}}, {"lora": {"rank": 4}}], ids=["plain", "ema", "lora"])
@pytest.mark.parametrize("there", [CARD, "standin:0", "cpu"])
def test_a_checkpoint_is_continued_bit_for_bit_on_any_device(folder, tmp_path, config, there):
    path, batch = tiny_model_dir(folder / "qwen2"), rollout()
    module = build(path, CARD, **config)
    module.train_step(batch)
    module.save(tmp_path / "state")
    module.save_hf(tmp_path / "hf")
    other = build(path, there, **config)
    with use_device(there):
        other.load(tmp_path / "state")
    same = [torch.equal(a.cpu(), b.cpu()) for a, b in zip(*map(weights_of, (module, other)), strict=True)]
    assert all(same)
    for each in (module, other):
        each.train_step(batch)
    if there == "cpu":
        pairs = zip(*map(weights_of, (module, other)), strict=True)
        assert max(relative(a.cpu(), b.cpu()) for a, b in pairs) < 1e-5
    else:
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*map(weights_of, (module, other)), strict=True))
    exported = build(tmp_path / "hf", there, frozen=True)
    assert exported.forward_step(batch)["ref_logprobs"].isfinite().all()


def weights_of(module):
    return [tensor for _, tensor in module.export_weights()]


@quick
def test_a_card_that_is_too_small_is_said_by_torch(folder):
    with memory_limit(60_000, card=1), pytest.raises(torch.OutOfMemoryError, match="standin:1 has a total capacity"):
        build(tiny_model_dir(folder / "qwen2"), CARD)
