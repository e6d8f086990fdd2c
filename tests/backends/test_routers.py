"""Routers of transformers models in training: their losses, their statistics, and experts that are given."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.backends.batches import rollout
from tests.backends.test_fsdp import Watched, module
from tests.tiny import tiny_model_dir

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "initializer_range": 0.3},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": EXPERTS,
    "deepseek_v3": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
        **{"qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4, "layers": 3},
    },
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    made = {}

    def make(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = str(tiny_model_dir(folder, family=family, tied=False, **FAMILIES[family]))
        return made[family]

    return make


def names(stats) -> set[str]:
    return {name for name in stats if name.startswith("router/")}


@pytest.mark.parametrize(("micro", "share"), [(None, True), (60, False), (21, True)])
def test_gradients_do_not_depend_on_cuts_packing_or_sharing(paths, micro, share):
    batch, results = rollout((5, 9, 12), 4), []
    coefficients = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    for config in (
        {"max_tokens_per_micro": None, "share_prefix": False},
        {"max_tokens_per_micro": micro, "share_prefix": share},
    ):
        trainer = module(paths("qwen3_moe"), kind=Watched, **coefficients, **config)
        stats = trainer.train_step(batch)
        results.append((trainer.gradient.double(), {name: stats[name].value for name in names(stats)}))
    (first, stats), (second, others) = results
    assert float((first - second).norm() / first.norm()) < 1e-6
    assert others == pytest.approx(stats, rel=1e-5)
    assert stats.keys() == {f"router/{n}" for n in ("max_load", "entropy", "dead_experts", "aux_loss", "z_loss")}


def test_the_gradient_is_that_of_transformers_function(paths):
    """A loss of 0, so only the routers' own gradient is left; padded on the right, with a mask."""
    path, batch = paths("qwen3_moe"), rollout((5, 9, 12), 1)
    batch = batch.with_(advantages=torch.zeros(batch.tokens_total))
    trainer = module(path, kind=Watched, router_aux_loss_coef=0.5)
    stats = trainer.train_step(batch)
    model = AutoModelForCausalLM.from_pretrained(path)
    longest = int(batch.lengths.max())
    ids, mask = torch.zeros(len(batch), longest, dtype=torch.long), torch.zeros(len(batch), longest)
    for i, row in enumerate(batch.rows()):
        ids[i, : len(row["tokens"])], mask[i, : len(row["tokens"])] = row["tokens"].long(), 1
    logits = model(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits
    losses = [load_balancing_loss_func((layer,), 6, 2, mask) for layer in logits]  # of one layer at a time
    loss = torch.stack(losses).mean()
    (0.5 * loss).backward()
    loss = loss.detach()
    assert stats["router/aux_loss"].value == pytest.approx(float(loss), rel=1e-5)
    expected = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    assert float((trainer.gradient - expected).norm() / expected.norm()) < 1e-5


def test_recomputed_layers_change_nothing(paths):
    gradients = []
    for how in (None, "full", "selective"):
        settings = {"router_aux_loss_coef": 0.5, "activation_checkpointing": how}
        trainer = module(paths("qwen3_moe"), kind=Watched, **settings)
        trainer.train_step(rollout((5, 9), 2))
        gradients.append(trainer.gradient)
    for gradient in gradients[1:]:
        assert float((gradients[0] - gradient).norm() / gradients[0].norm()) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_found_by_what_transformers_declares(paths, family):
    trainer = module(paths(family), router_aux_loss_coef=0.5)
    stats = trainer.train_step(rollout((5, 9), 2))
    assert "router/aux_loss" in stats and 1 <= stats["router/max_load"].value <= 8


def test_a_model_without_experts_has_no_such_statistics(path):
    assert not names(module(path).train_step(rollout((5, 9), 2)))
