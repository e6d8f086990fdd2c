"""Losses, statistics and replay of routers over ranks: those of one process, whatever is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conformance.backends import DEEPSPEED, MEGATRON, Backend, build, on_ranks
from tests.conformance.layouts import MODELS, batch, share
from tests.tiny import tiny_model_dir

COEFFICIENTS = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.1}
FSDP = [
    Backend("fsdp", "fsdp", 2),
    Backend("experts", "fsdp", 2, {"expert_parallel": 2}),
    Backend("layers", "fsdp", 2, {"tensor_parallel": 2}),
    Backend("rows", "fsdp", 2, {"context_parallel": 2}),
    Backend("padded", "fsdp", 2, {"rows": "padded"}),
]
MEGATRONS = [
    Backend("megatron", "megatron", 2),
    Backend("layers", "megatron", 2, {"tensor_parallel": 2}),
    Backend("stages", "megatron", 2, {"pipeline_parallel": 2, "activation_checkpointing": "full"}),
    Backend("experts", "megatron", 2, {"expert_parallel": 2}),
]
ZERO = [
    Backend(f"deepspeed-{stage}", "deepspeed", 2, {"deepspeed": {"stage": stage}, **rows})
    for stage, rows in ((2, {"rows": "padded"}), (3, {}), (3, {"rows": "padded"}))
]


def train(rank, port, backends, path, rows):
    found = []
    for i, backend in enumerate(backends):
        module = build(backend, path, rank=rank, port=port + i, max_tokens_per_micro=60, **COEFFICIENTS)
        module.context = replace(module.context, routing_replay=True)
        part = share(rows, module)
        given = module.forward_step(part, into="old_logprobs")["old_logprobs"][part["loss_mask"]]
        stats = [module.train_step(each) for each in (part.without("routed_experts"), part)]
        values = [{name: s[name].value for name in s if "router" in name or "norm" in name} for s in stats]
        found.append((module.config.shares(backend.ranks)[rank], given, values))
        module.close()
    return found


@pytest.mark.parametrize(
    "backends",
    [
        pytest.param(FSDP, id="fsdp", marks=pytest.mark.backends),
        pytest.param(MEGATRONS, id="megatron", marks=[MEGATRON, pytest.mark.backends]),
        pytest.param(ZERO, id="deepspeed", marks=[DEEPSPEED, pytest.mark.backends]),
    ],
)
def test_losses_of_routers_do_not_depend_on_ranks(backends, tmp_path, subtests):
    path = str(tiny_model_dir(tmp_path / "moe", **MODELS["moe"], initializer_range=0.2))
    rows = batch(path)
    place = torch.arange(rows.tokens_total) - rows.offsets[rows.segment]  # a prompt has the same experts in its group
    scores = torch.rand(int(rows.lengths.max()), 2, 4, generator=torch.Generator().manual_seed(0))
    rows = rows.with_(routed_experts=scores.topk(2, -1).indices.to(torch.int16)[place])
    [(_, logprobs, expected)] = train(0, 0, [Backend("alone", "fsdp")], path, rows)
    assert expected[0].keys() >= {"router/aux_loss", "router/z_loss", "router/max_load"}
    told = on_ranks(2, train, tmp_path, backends, path, rows)
    for number, backend in enumerate(backends):
        with subtests.test(backend.name):
            shares = {share: given for share, given, _ in (each[number] for each in told)}
            torch.testing.assert_close(torch.cat([shares[i] for i in sorted(shares)]), logprobs, rtol=0, atol=2e-5)
            for _, _, found in (each[number] for each in told):
                for step, want in zip(found, expected, strict=True):
                    assert step == pytest.approx(want, rel=1e-4)
