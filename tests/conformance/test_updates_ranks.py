"""Updates of a batch, also by losses that compare rows or distributions: what each of them learns from does not depend
on the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.batch_shards import _shard_updates
from coalign.cluster.local import LocalStore
from coalign.data.batch import Batch
from coalign.types import merge_stats
from tests.backends.batches import rollout
from tests.backends.test_ptx import documents
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow
GROUPS = rollout((5, 9, 7, 3, 8, 6, 4, 9, 5, 7), 3, longest=16)


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


# {case: (batch, loss, configuration, other data)}. Of three pairs in four updates one is empty, of five documents some
# ranks have none, and of three pairs on two ranks the second has one.
SEVERAL = {"updates_per_batch": 4, "epochs_per_batch": 2}
CASES: dict[str, tuple[Batch, dict[str, Any], dict[str, Any], Batch | None]] = {
    "groups": (GROUPS, {"fn": "policy_gradient", "kl_coef": 0.0}, SEVERAL, documents((11, 6, 14, 9, 5))),
    "pairs": (comparisons(), {"fn": "dpo", "nll_coef": 0.3}, SEVERAL, None),
    "scores": (comparisons(), {"fn": "bradley_terry"}, {"head": "reward", "head_init": "zero"}, None),
    "kto": (comparisons(), {"fn": "kto"}, {}, None),
    "distillation": (comparisons(), {"fn": "distillation", "kd_coef": 0.7}, {}, None),
    "steps": (comparisons(), {"fn": "process_reward"}, {}, None),
}


def share(batch: Batch | None, ranks: int, rank: int, updates: int) -> Batch | None:
    """What a driver gives to this rank; one that is alone cuts by itself."""
    if batch is None or ranks == 1:
        return batch
    store = LocalStore()
    ref = BatchRef.of(Meta.of(batch), store.put(batch), store)
    return _shard_updates(ref, ranks, updates).worker_rows[rank].gather(store)


def _train(rank: int, port: int, ranks: int, path: str) -> dict[str, tuple[dict, dict]]:
    found = {}
    for i, (name, (batch, loss, config, ptx)) in enumerate(CASES.items()):
        backend = Backend("any", "fsdp", ranks=ranks, config={"max_tokens_per_micro": 60, **config})
        trainer = build(backend, path, rank=rank, port=port + i, loss=loss, optimizer={"lr": 1e-3})
        own = ranks, rank, config.get("updates_per_batch", 1)
        mixed_in = {} if ptx is None else {"ptx": share(ptx, *own), "ptx_coef": 0.5}
        found[name] = trainer.train_step(share(batch, *own), **mixed_in), exported(trainer)
        trainer.close()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    path = str(tiny_model_dir(folder / "model"))
    return {ranks: on_ranks(ranks, _train, folder, ranks, path) for ranks in (1, 2, 3)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_of_one_rank(runs, name, ranks):
    [(expected, weights)] = [result[name] for result in runs[1]]
    merged = merge_stats([result[name][0] for result in runs[ranks]])
    for key in ("tokens/trained", "loss/skipped_updates"):
        assert merged[key].value == expected[key].value
    for key in {"loss/value", "loss/grad_norm", "loss/ptx"} & expected.keys():
        assert merged[key].value == pytest.approx(expected[key].value, rel=1e-5, abs=1e-7)
    for key, tensor in weights.items():
        torch.testing.assert_close(runs[ranks][0][name][1][key], tensor, rtol=0, atol=1e-6)
