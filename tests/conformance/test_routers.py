"""Losses and statistics of routers over ranks: those of one process, whatever is cut."""

from __future__ import annotations

import pytest

from tests.conformance.backends import DEEPSPEED, MEGATRON, Backend, build, on_ranks
from tests.conformance.layouts import MODELS, batch, share
from tests.tiny import tiny_model_dir

COEFFICIENTS = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.1}
FSDP = [
    Backend("fsdp", "fsdp", 2),
    Backend("experts", "fsdp", 2, {"expert_parallel": 2}),
    Backend("layers", "fsdp", 2, {"tensor_parallel": 2}),
    Backend("rows", "fsdp", 2, {"context_parallel": 2}),
]
MEGATRONS = [
    Backend("megatron", "megatron", 2),
    Backend("layers", "megatron", 2, {"tensor_parallel": 2}),
    Backend("stages", "megatron", 2, {"pipeline_parallel": 2, "activation_checkpointing": "full"}),
    Backend("experts", "megatron", 2, {"expert_parallel": 2}),
]
ZERO = [Backend(f"deepspeed-{stage}", "deepspeed", 2, {"deepspeed": {"stage": stage}}) for stage in (2, 3)]


def train(rank, port, backends, path, rows):
    found = []
    for i, backend in enumerate(backends):
        module = build(backend, path, rank=rank, port=port + i, max_tokens_per_micro=60, **COEFFICIENTS)
        stats = [module.train_step(share(rows, module)) for _ in range(2)]
        found.append([{name: s[name].value for name in s if "router" in name or "norm" in name} for s in stats])
        module.close()
    return found


@pytest.mark.parametrize(
    "backends",
    [
        pytest.param(FSDP, id="fsdp"),
        pytest.param(MEGATRONS, id="megatron", marks=[MEGATRON, pytest.mark.backends]),
        pytest.param(ZERO, id="deepspeed", marks=[DEEPSPEED, pytest.mark.backends]),
    ],
)
def test_losses_of_routers_do_not_depend_on_ranks(backends, tmp_path, subtests):
    path = str(tiny_model_dir(tmp_path / "moe", **MODELS["moe"], initializer_range=0.2))
    rows = batch(path)
    [expected] = train(0, 0, [Backend("alone", "fsdp")], path, rows)
    assert expected[0].keys() >= {"router/aux_loss", "router/z_loss", "router/max_load"}
    for told in on_ranks(2, train, tmp_path, backends, path, rows):
        for backend, found in zip(backends, told, strict=True):
            with subtests.test(backend.name):
                for step, want in zip(found, expected, strict=True):
                    assert step == pytest.approx(want, rel=1e-4)
