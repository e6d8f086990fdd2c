"""Every family through megatron-core against transformers, or its written forward pass: log-probs, entropies and
gradients of packed rows with shared prompts, on one rank and on two in three ways."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.megatron.tests.weight_families.checkpoints import MOE
from tests.conformance.backends import on_ranks

pytest.importorskip("megatron.core")

from coalign.roles import Context
from coalign_megatron.backend import build
from coalign_megatron.backend.cpu import on_cpu
from coalign_megatron.backend.partition import ParallelSizes
from packages.megatron.tests.models import EVERY, Megatron, Reference, reference

FEW = ["gemma", "bloom", "deepseek_v2"]
LAYOUTS = {
    # With sequence parallelism; experts dealt out, or each of them cut.
    "tensor": (ParallelSizes(tensor=2, expert=2), EVERY),
    "expert_tensor": (ParallelSizes(tensor=2, expert_tensor=2), [*MOE, "deepseek_v3_yarn"]),
    # Heads change ranks: their slopes too, and groups that are fewer than ranks.
    "context": (ParallelSizes(context=2, expert=2), ["mistral", "gpt2", "starcoder", "bloom", "falcon_rw", *MOE]),
}


def check(outputs: float, gradients: float, whose: str) -> None:
    assert outputs <= 5e-6
    assert gradients <= 1e-5, whose


@pytest.mark.parametrize("case", FEW)
def test_a_few_families_on_one_rank(case, alone):
    check(*Megatron(reference(case), ParallelSizes()).differences())


@pytest.mark.backends
@pytest.mark.parametrize("case", [case for case in EVERY if case not in FEW])
def test_every_family_on_one_rank(case, alone):
    check(*Megatron(reference(case), ParallelSizes()).differences())


@pytest.mark.backends
@pytest.mark.parametrize("case", ["gemma", "falcon_rw", "gpt_neox", "deepseek_v3"])
def test_bf16_is_the_same_up_to_its_rounding(case, alone):
    made = Megatron(reference(case), ParallelSizes(), dtype=torch.bfloat16)
    for parameter in made.model.parameters():
        parameter.data = parameter.data.bfloat16()
    outputs, gradients, whose = made.differences()
    assert 1e-4 < outputs < 6e-2
    assert gradients < 6e-2, whose


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.backends
@pytest.mark.parametrize("again", [FULL, ATTENTION], ids=["full", "attention"])
@pytest.mark.parametrize("case", ["deepseek_v3", "gpt_neox", "bloom"])
def test_layers_of_ours_are_computed_again(case, again, alone):
    check(*Megatron(reference(case), ParallelSizes(), **again).differences())


@pytest.mark.parametrize(
    ("case", "module"), [("falcon_7b", "mlp"), ("gpt_neox", "layernorm"), ("deepseek_v3", "mla_up_proj")]
)
def test_what_layers_of_ours_do_not_compute_again_is_refused(case, module, alone):
    with pytest.raises(ValueError, match=rf"megatron\.recompute_modules.*'{module}'"):
        Megatron(reference(case), ParallelSizes(), recompute_granularity="selective", recompute_modules=[module])


@pytest.mark.backends
@pytest.mark.timeout(900)
def test_every_family_on_two_ranks(tmp_path, subtests):
    """All in one start of the processes."""
    # transformers would save the checkpoints on the first rank only, once they have met.
    torch.save({case: reference(case) for case in EVERY}, tmp_path / "references")
    with socket.socket() as one, socket.socket() as other:  # beside that of `on_ranks`: ranks meet once for each layout
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1], other.getsockname()[1]]
    ranks_found = on_ranks(2, _every, tmp_path, tmp_path / "references", ports)
    for layout, (_, cases) in LAYOUTS.items():
        for case in cases:
            with subtests.test(f"{layout}-{case}"):
                for found in ranks_found:
                    check(*found[layout, case])
    with subtests.test("gate and up are cut each by itself: as one tensor they load as well, into another model"):
        assert min(found["halves", "llama"] for found in ranks_found) > 0.1


def _every(rank: int, port: int, file: Path, ports: list[int]) -> dict[Any, Any]:
    references: dict[str, Reference] = torch.load(file, weights_only=False)
    found: dict[Any, Any] = {}
    with on_cpu():
        for (name, (sizes, cases)), at in zip(LAYOUTS.items(), [port, *ports], strict=True):
            build.join_ranks(sizes, Context(rank=rank, world_size=2, rendezvous=f"127.0.0.1:{at}"))
            for case in cases:
                found[name, case] = Megatron(references[case], sizes).differences()
            if name == "tensor":
                found["halves", "llama"] = _cut_in_halves(Megatron(references["llama"], sizes))
            build.leave_ranks()
    return found


def _cut_in_halves(made: Megatron) -> float:
    """How far off log-probs are where [gate | up] was simply cut in two: the first rank has all of the gate."""
    for layer in range(2):
        at = f"model.layers.{layer}.mlp."
        parts = [made.reference.tensors[f"{at}{name}_proj.weight"] for name in ("gate", "up")]
        made.own()[f"0/decoder.layers.{layer}.mlp.linear_fc1.weight"].copy_(parts[made.rank])
    with torch.no_grad():
        return float((made.outputs()["logprobs"] - made.reference.outputs["logprobs"]).abs().max())
