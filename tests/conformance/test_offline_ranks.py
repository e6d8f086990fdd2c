"""Losses that compare rows or distributions: two ranks take the step that one process takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coalign.data.batch import Batch
from coalign.types import merge_stats
from tests.backends.batches import rollout
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"loss": {"fn": "dpo", "nll_coef": 0.3}},
    "bradley_terry": {"loss": {"fn": "bradley_terry"}, "config": {"head": "reward", "head_init": "zero"}},
    "kto": {"loss": {"fn": "kto"}},
    "distillation": {"loss": {"fn": "distillation", "kd_coef": 0.7}},
    "process_reward": {"loss": {"fn": "process_reward"}},
}
CONFIG = {"max_tokens_per_micro": 40}


def comparisons() -> Batch:
    """Three prompts with two responses each, with every column that one of the losses reads."""
    batch = rollout((5, 9, 7), 2)
    total, n = batch.tokens_total, len(batch)
    generator = torch.Generator().manual_seed(3)
    return batch.without("advantages", "returns", "rollout_logprobs").with_(
        preference=torch.tensor([1.0, 0.0] * 3),
        ref_logprobs=-torch.rand(total, generator=generator),
        reference_point=torch.full((n,), 0.2),
        candidates=torch.randint(0, 259, (total, 2), generator=generator, dtype=torch.int32),
        teacher_logprobs=torch.tensor([[-1.0, -2.0]]).expand(total, 2).clone(),
        label=torch.rand(total, generator=generator),
    )


def step(trainer: Any, batch: Batch) -> tuple[dict, dict]:
    stats = trainer.train_step(batch)
    return stats, exported(trainer)


def both(rank: int, port: int, path: str, cases: dict[str, dict[str, Any]]) -> dict:
    results = {}
    for i, (name, case) in enumerate(cases.items()):
        backend = Backend("two", "fsdp", ranks=2, config=CONFIG | case.get("config", {}))
        trainer = build(backend, path, rank=rank, port=port + i, loss=case["loss"])
        # The second rank has one pair of three: other micro-batches than the first.
        results[name] = step(trainer, comparisons().split(2, keep="group")[rank])
        trainer.close()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline_ranks")
    path = str(tiny_model_dir(folder / "model"))
    return path, on_ranks(2, both, folder, path, CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_the_step_of_one_process(results, name):
    path, ranks = results
    backend = Backend("one", "fsdp", config=CONFIG | CASES[name].get("config", {}))
    alone, weights = step(build(backend, path, loss=CASES[name]["loss"]), comparisons())
    merged = merge_stats([ranks[rank][name][0] for rank in (0, 1)])
    for key in ("loss/value", "loss/grad_norm"):
        assert merged[key].value == pytest.approx(alone[key].value, rel=1e-4)
    for key, tensor in ranks[0][name][1].items():
        torch.testing.assert_close(tensor, weights[key], rtol=1e-3, atol=1e-4)
