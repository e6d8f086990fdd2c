"""What two ranks compute of a vocabulary that they shard out is what one computes of all of it, gradients too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from coalign.algorithms.logprobs import (
    VocabularyShard,
    candidate_logprobs,
    linear_logprobs,
    log_collision,
    top_logprobs,
)
from tests.conformance.backends import on_ranks

TOKENS, HIDDEN, VOCABULARY, CUT = 12, 8, 21, 15  # the second rank has fewer tokens than are asked for
ROWS = {0: slice(0, CUT), 1: slice(CUT, VOCABULARY)}
SETTINGS = {"temperature": 0.7, "scale": 1.3}


def made() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=draw, dtype=torch.float64),
        "weight": torch.randn(VOCABULARY, HIDDEN, generator=draw, dtype=torch.float64),
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=draw),
        "candidates": torch.randint(VOCABULARY, (TOKENS, 3), generator=draw),
        "weights": torch.randn(TOKENS, 5, generator=draw, dtype=torch.float64),
    }


def computed(rows: slice, shard: VocabularyShard | None, softcap: float | None) -> dict[str, torch.Tensor]:
    given = made()
    hidden, weight = given["hidden"].requires_grad_(), given["weight"][rows].clone().requires_grad_()
    settings = SETTINGS | {"softcap": softcap, "shard": shard}
    logprobs, entropy = linear_logprobs(hidden, weight, given["targets"], entropy=True, tile=64, **settings)
    chosen = candidate_logprobs(hidden, weight, given["candidates"], **settings)
    together = torch.cat([logprobs[:, None], entropy[:, None], chosen], 1)
    (together * given["weights"]).sum().backward()
    ids, top = top_logprobs(hidden.detach(), weight.detach(), 8, **settings)
    return {
        "outputs": together.detach(),
        "collision": log_collision(hidden.detach(), weight.detach(), **settings),
        "ids": ids,
        "top": top,
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def _on_rank(rank: int, port: int) -> list[dict[str, torch.Tensor]]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    shard = VocabularyShard(dist.group.WORLD, (0, CUT)[rank], VOCABULARY)
    found = [computed(ROWS[rank], shard, softcap) for softcap in (None, 2.0)]
    unknown, _ = linear_logprobs(
        made()["hidden"], made()["weight"][ROWS[rank]], torch.full((TOKENS,), VOCABULARY), shard=shard
    )
    found[0]["unknown"] = unknown
    dist.destroy_process_group()
    return found


@pytest.mark.backends
def test_two_ranks_compute_what_one_does(tmp_path):
    told = on_ranks(2, _on_rank, tmp_path)
    for i, softcap in enumerate((None, 2.0)):
        expected, ranks = computed(slice(0, VOCABULARY), None, softcap), [each[i] for each in told]
        for name in ("outputs", "collision", "ids", "top"):
            for rank in ranks:
                torch.testing.assert_close(rank[name].to(expected[name].dtype), expected[name], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ranks[0]["hidden"] + ranks[1]["hidden"], expected["hidden"], atol=1e-5, rtol=1e-5)
        for rank, found in enumerate(ranks):
            torch.testing.assert_close(found["weight"], expected["weight"][ROWS[rank]], atol=1e-5, rtol=1e-5)
    assert all(each[0]["unknown"].isnan().all() for each in told)
