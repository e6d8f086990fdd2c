"""Computing activations again in the backward pass changes memory and time, never the gradient."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.hf.plans import decoder_layers
from tests.backends.batches import rollout
from tests.backends.test_fsdp import Watched, module
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), attention_dropout=0.0))


class Frozen(Watched):
    """As with adapters, few parameters learn, deep inside: nothing that the first layers get requires a gradient."""

    def setup(self) -> None:
        super().setup()
        for name, p in self.model.named_parameters():
            p.requires_grad_("o_proj" in name or "up_proj" in name)

    def optimizer_step(self) -> float:
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        self.learned = [name for name, p in self.model.named_parameters() if p.grad is not None]
        return FSDPModule.optimizer_step(self)


def gradient(path: str, kind: type, **config) -> tuple[torch.Tensor, int]:
    """(the gradient of one step, how often the first layer came to its MLP)"""
    trainer, calls = module(path, kind=kind, **config), []
    decoder_layers(trainer.model.model)[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    trainer.train_step(rollout())
    return trainer.gradient, len(calls)


@pytest.mark.parametrize("kind", [Watched, Frozen])
@pytest.mark.parametrize("micro", [None, 40])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_the_gradient_is_the_same_and_layers_are_computed_twice(path, kind, micro, how):
    plain, once = gradient(path, kind, max_tokens_per_micro=micro)
    checkpointed, twice = gradient(path, kind, max_tokens_per_micro=micro, activation_checkpointing=how)
    torch.testing.assert_close(checkpointed, plain, rtol=1e-6, atol=1e-9)
    assert float(plain.norm()) > 0 and twice == 2 * once


def test_selective_keeps_the_results_of_products_and_attention(path):
    done = {}
    for how in (None, "selective", "full"):
        trainer = module(path, activation_checkpointing=how)
        with FlopCounterMode(display=False) as counter:
            trainer.train_step(rollout())
        done[how] = counter.get_total_flops()
    assert done["selective"] == done[None] < done["full"]


def test_only_what_requires_a_gradient_gets_one(path):
    trainer = module(path, kind=Frozen, activation_checkpointing="full")
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step(rollout())
    assert trainer.learned and all("o_proj" in name or "up_proj" in name for name in trainer.learned)
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]) == (name not in trainer.learned)


def test_dropout_is_drawn_alike_the_second_time(tmp_path):
    path = str(tiny_model_dir(tmp_path, family="opt", dropout=0.3, word_embed_proj_dim=32, ffn_dim=64))
    plain, checkpointed = (
        module(path, kind=Watched, activation_checkpointing=c, optimizer={"lr": 1e-2}) for c in (None, "full")
    )
    for trainer in (plain, checkpointed):
        trainer.train_step(rollout())
    torch.testing.assert_close(checkpointed.gradient, plain.gradient, rtol=1e-6, atol=1e-9)


def test_adapters(path):
    pytest.importorskip("peft")
    gradients = []
    for checkpointing in (None, "full"):
        trainer = module(path, kind=Frozen, lora={"rank": 2}, activation_checkpointing=checkpointing)
        for name, p in trainer.model.named_parameters():
            p.requires_grad_("lora_" in name)
        trainer.train_step(rollout())
        gradients.append(trainer.gradient)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
    assert float(gradients[0].norm()) > 0
