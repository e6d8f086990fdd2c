"""Computing activations again in the backward pass changes memory and time, never the gradient."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.hf.plans import decoder_layers
from tests.backends.batches import rollout
from tests.backends.test_fsdp import Watched, module
from tests.tiny import tiny_model_dir


class Frozen(Watched):
    """As with adapters, few parameters learn, deep inside: nothing that the first layers get requires a gradient."""

    def setup(self) -> None:
        super().setup()
        for name, p in self.model.named_parameters():
            p.requires_grad_("o_proj" in name or "up_proj" in name)

    def optimizer_step(self) -> float:
        learning = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        assert all("o_proj" in name or "up_proj" in name for name in learning)
        self.gradient = torch.cat([gradient.flatten() for gradient in learning.values()])
        return FSDPModule.optimizer_step(self)


def gradient(path: str, kind: type, **config) -> tuple[torch.Tensor, int]:
    """(the gradient of one step, how often the first layer came to its MLP)"""
    trainer, calls = module(path, kind=kind, **config), []
    decoder_layers(trainer.model.model)[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    trainer.train_step(rollout())
    return trainer.gradient, len(calls)


@pytest.mark.parametrize(
    ("kind", "micro", "how"), [(Watched, None, "full"), (Frozen, 40, "full"), (Watched, 40, "selective")]
)
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


def test_dropout_is_drawn_alike_the_second_time(tmp_path):
    path = str(tiny_model_dir(tmp_path, family="opt", dropout=0.3, word_embed_proj_dim=32, ffn_dim=64))
    plain, checkpointed = (
        module(path, kind=Watched, activation_checkpointing=c, optimizer={"lr": 1e-2}) for c in (None, "full")
    )
    for trainer in (plain, checkpointed):
        trainer.train_step(rollout())
    torch.testing.assert_close(checkpointed.gradient, plain.gradient, rtol=1e-6, atol=1e-9)
