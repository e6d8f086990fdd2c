"""What backends over transformers' models (fsdp, deepspeed) make of every family that transformers has a class for, and
why not more. Megatron's side: tests/megatron/test_families.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from coalign.modules import attention
from coalign.modules.heads import LanguageModel
from coalign.modules.layout import pack
from coalign.modules.parallel import blocks, experts
from tests.weights.families.checkpoints import MOE, NATIVE, native

pytest.importorskip("megatron.core")

from tests.megatron.models import reference, rows

pytestmark = pytest.mark.backends

OWN_ATTENTION = ["bloom", "falcon_7b", "falcon_40b", "falcon_rw", "falcon_11b"]  # past transformers' interface
NO_PLAN = {"starcoder": "no plan", "starcoder_mha": "no plan", "gpt2": "no plan", "opt": "no plan"}
NO_PLAN |= {"galactica": "no plan", "glm4": "colwise_gather_output"}


def loaded(case: str, folder) -> nn.Module:
    native(case).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.NAME, dtype=torch.float32)


@pytest.mark.parametrize("case", [case for case in NATIVE if case not in OWN_ATTENTION])
def test_packed_rows_and_what_can_be_cut(case, tmp_path):
    model = loaded(case, tmp_path)
    computed = LanguageModel(model)
    computed.check()
    with torch.no_grad():
        found = computed(pack(rows()), needs=("entropy",))
    expected = reference(case).outputs
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 5e-6
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    reason = blocks.unfit(model, list(layers))
    assert NO_PLAN[case] in reason if case in NO_PLAN else reason is None
    reason = experts.unfit(model, 2)
    assert reason is None if case in MOE else "no experts" in reason


@pytest.mark.parametrize("case", OWN_ATTENTION)
def test_attention_past_the_interface_is_refused(case, tmp_path):
    with pytest.raises((NotImplementedError, KeyError), match=r"does not call transformers' interface|coalign_packed"):
        LanguageModel(loaded(case, tmp_path)).check()
