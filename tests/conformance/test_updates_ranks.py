"""Several updates of a batch: what each of them learns from does not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coalign.cluster.batch_shards import _shard_updates
from coalign.cluster.future import BatchRef, Meta
from coalign.cluster.local import LocalStore
from coalign.data.batch import Batch
from coalign.types import merge_stats
from tests.backends.batches import rollout
from tests.backends.test_ptx import documents
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.conformance.test_offline_ranks import comparisons
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow
UPDATES = 4
GROUPS = rollout((5, 9, 7, 3, 8, 6, 4, 9, 5, 7), 3, longest=16)
# {case: (batch, loss, other data)}; of three pairs in four updates one is empty, and of five documents over the ranks.
CASES: dict[str, tuple[Batch, dict[str, Any], Batch | None]] = {
    "groups": (GROUPS, {"fn": "policy_gradient", "kl_coef": 0.0}, documents((11, 6, 14, 9, 5))),
    "pairs": (comparisons(), {"fn": "dpo"}, None),
}


def share(batch: Batch | None, ranks: int, rank: int) -> Batch | None:
    """What a driver gives to this rank; one that is alone cuts by itself."""
    if batch is None or ranks == 1:
        return batch
    store = LocalStore()
    ref = BatchRef.of(Meta.of(batch), store.put(batch), store)
    return _shard_updates(ref, ranks, UPDATES).worker_rows[rank].gather(store)


def _train(rank: int, port: int, ranks: int, path: str) -> dict[str, tuple[dict, dict]]:
    found = {}
    for i, (name, (batch, loss, ptx)) in enumerate(CASES.items()):
        backend = Backend("any", "fsdp", ranks=ranks, config={"max_tokens_per_micro": 100})
        settings = {"updates_per_batch": UPDATES, "epochs_per_batch": 2, "optimizer": {"lr": 1e-3}}
        trainer = build(backend, path, rank=rank, port=port + i, loss=loss, **settings)
        mixed_in = {} if ptx is None else {"ptx": share(ptx, ranks, rank)}
        stats = trainer.train_step(share(batch, ranks, rank), **mixed_in)
        found[name] = stats, exported(trainer)
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
    assert merged["loss/grad_norm"].value == pytest.approx(expected["loss/grad_norm"].value, rel=1e-5)
    for key, tensor in weights.items():
        torch.testing.assert_close(runs[ranks][0][name][1][key], tensor, rtol=0, atol=1e-6)
