"""What backends over transformers' models (fsdp, deepspeed) make of every family that transformers has a class for, and
why not more. Megatron's side: packages/megatron/tests/test_families.py."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.hf import plans
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from packages.megatron.tests.weight_families.checkpoints import MOE, NATIVE, native

pytestmark = pytest.mark.backends

OWN_ATTENTION = ["bloom", "falcon_7b", "falcon_40b", "falcon_rw", "falcon_11b"]  # past transformers' interface
NO_PLAN = {"starcoder": "no plan", "starcoder_mha": "no plan", "gpt2": "no plan", "opt": "no plan"}
NO_PLAN |= {"galactica": "no plan", "glm4": "colwise_gather_output"}


def build(case: str, folder) -> tuple[FSDPModule, nn.Module, Batch]:
    """The module without dropout, which the reference has not; the reference, and a batch."""
    from packages.megatron.tests.models import reference, rows  # and megatron-core

    native(case).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {key: 0.0 for key in config if "drop" in key and isinstance(config[key], float)}
    (folder / "config.json").write_text(json.dumps(config))
    return FSDPModule(ModelConfig(load=str(folder)), Context(loss=Objective(PolicyGradient()))), reference(case), rows()


@pytest.mark.parametrize("case", [case for case in NATIVE if case not in OWN_ATTENTION])
def test_a_step_and_what_can_be_cut(case, tmp_path):
    module, expected, batch = build(case, tmp_path)
    module.check_architecture(module.config, "trainer")
    module.setup()
    [found] = module.run([batch], needs=("entropy",))
    found["column"] = module.forward_step(batch)["ref_logprobs"][batch["loss_mask"]]
    outputs = expected.outputs | {"column": expected.outputs["logprobs"]}
    assert max(float((found[name] - outputs[name]).abs().max()) for name in outputs) <= 5e-6

    trained = len(outputs["logprobs"])
    advantages = torch.zeros(len(batch["tokens"])).masked_scatter(batch["loss_mask"], torch.linspace(-1, 1, trained))
    stats = module.train_step(batch.without("rollout_logprobs").with_(advantages=advantages))  # as tests' `loss`
    norm = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm()
    assert stats["loss/grad_norm"].value * trained == pytest.approx(float(norm), rel=1e-4)

    model = module.model.model
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    reason = plans._find_unfit_layers(model, list(layers))
    assert NO_PLAN[case] in reason if case in NO_PLAN else reason is None
    reason = plans._find_unfit_experts(model, 2)
    assert reason is None if case in MOE else "no experts" in reason


@pytest.mark.parametrize("case", OWN_ATTENTION)
def test_attention_past_the_interface_is_computed_in_padded_rows(case, tmp_path):
    module, expected, batch = build(case, tmp_path)
    module.check_architecture(module.config, "trainer")
    module.setup()
    assert module.model.rows == "padded"
    [found] = module.run([batch], needs=("entropy",))
    assert max(float((found[name] - expected.outputs[name]).abs().max()) for name in found) <= 5e-6
    packed = module.config.model_copy(update={"rows": "packed"})
    for refusing in (FSDPModule(packed, Context()).setup, lambda: FSDPModule.check_architecture(packed, "trainer")):
        with pytest.raises(NotImplementedError, match=r"does not call transformers' .* `rows: padded`"):
            refusing()
