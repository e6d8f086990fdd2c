"""How often the host copies to the device and waits for it: what a real device would make of it, a count can say."""

import pytest
import torch

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.engines.request import Request
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.devices import move_tensors
from coalign.roles import Context
from tests.backends.batches import rollout
from tests.conformance.engines import build as build_engine
from tests.standin.device import counting
from tests.tiny import tiny_model_dir

pytestmark = [pytest.mark.device, pytest.mark.quick]
CARD = "standin:0"


def build(path, layers):
    path = tiny_model_dir(path / f"{layers} layers", layers=layers)
    context = Context(device=CARD, loss=Objective(PolicyGradient()), samples_per_prompt=3)
    module = FSDPModule(ModelConfig(load=str(path), optimizer={"lr": 1e-2}), context)
    module.setup()
    return module


def test_no_layer_copies_to_the_device(tmp_path):
    found = []
    for layers in (1, 3):
        module = build(tmp_path, layers)
        for prompts in ((5, 9), tuple(range(5, 15))):
            batch = rollout(prompts, 4, longest=12)
            with counting() as forward:
                module.forward_step(batch)
            with counting() as training:
                module.train_step(batch)
            found.append((forward.host_to_device, training.host_to_device))
            assert forward.waits <= 2  # for the copy there, and for that of the log-probs back
    assert len(set(found)) == 1
    assert found[0][0] == 1 and found[0][1] <= 10


def test_tensors_of_one_dtype_travel_together():
    given = {
        "a": torch.arange(6).view(2, 3),
        "b": torch.tensor([], dtype=torch.int64),
        "c": torch.ones(3),
        "d": torch.tensor(7),
        "e": torch.zeros(2, device=CARD),
    }
    with counting() as counts:
        moved = move_tensors(given, CARD)
    assert counts.host_to_device == 2
    assert moved["e"] is given["e"]
    for name, tensor in given.items():
        assert moved[name].device == torch.device(CARD)
        assert torch.equal(moved[name].cpu(), tensor.cpu()) and moved[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    ("settings", "waits", "kernels"),
    [
        ({}, 1, 10),
        ({"temperature": 0.0}, 1, 10),
        ({"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}, 1, 10),
        ({"top_p": 0.9}, 2, 100),  # whether the nucleus was among the likeliest tokens: drawn outside the graph
    ],
)
def test_a_step_of_decoding_waits_once_and_is_one_graph(tmp_path, settings, waits, kernels):
    path = tiny_model_dir(tmp_path, vocab=2048)
    module = build_engine("native", path, Context(model="policy", device=CARD, samples_per_prompt=4))
    sampling = SamplingConfig(max_new_tokens=40, **settings)
    module.generate(rollout((3, 4), 1).with_(rows=[{}, {}]).without("loss_mask"))  # loads the weights
    with module.engine.open(sampling) as session:
        for group in range(4):
            session.submit(Request([1, 2, 3, 4 + group], group, 4), lambda *_: None)
        for _ in range(3):
            with module.engine.stepping():
                session.step()
        with counting() as counts, module.engine.stepping():
            session.step()
    assert (counts.waits, counts.host_to_device) == (waits, 0)
    assert counts.kernels["graph"] == 1 and counts.launched <= kernels, counts.kernels


def test_a_layer_is_a_few_kernels_where_one_call_attends_to_a_row(tmp_path, monkeypatch):
    """All but flash attention itself, which this device does not have: a product of the right shape takes its place."""

    def varlen_attn(query, key, value, *_, **__):
        return query + 0 * value.mean()

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr("coalign.backends.attention.choose_kernel", lambda *_, **__: "varlen")
    batch, kernels = rollout(tuple(range(5, 21)), 8, longest=12), []
    for layers in (1, 3):
        module = build(tmp_path, layers)
        with counting() as counts:
            module.forward_step(batch)
        kernels.append(sum(counts.kernels.values()))
    assert (kernels[1] - kernels[0]) / 2 <= 40
