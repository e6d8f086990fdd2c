"""`reduction: exact`: trained weights are the same bit for bit for any number of ranks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from coalign.backends.hf.exact import _TreeSum
from coalign.cluster.batch_ref import BatchRef, Meta
from coalign.cluster.batch_shards import _shard_leaves
from coalign.cluster.local import LocalStore
from coalign.data.batch import Batch
from coalign.types import merge_stats
from tests.backends.batches import rollout
from tests.backends.test_ptx import documents
from tests.conformance.backends import Backend, build, exported, on_ranks
from tests.tiny import tiny_model_dir

TOKENS = 60  # of a leaf
# Hidden sizes that fill no vector of the processor, in shards of three ranks.
MODELS: dict[str, dict[str, Any]] = {"plain": {}, "dropout": {"attention_dropout": 0.1}}
STEPS = [rollout((5, 9, 7, 6), 3, seed=0), rollout((5, 9), 3, seed=1), rollout((8, 4, 6, 7, 5), 3, longest=12, seed=2)]
# {case: (model, configuration, data that is mixed in)}. Prompts are shared within a group, sequences packed in a row.
CASES: dict[str, tuple[str, dict[str, Any], Batch | None]] = {
    "full": ("plain", {"updates_per_batch": 2, "ema": {"decay": 0.5}}, documents((11, 6, 14, 9, 5))),
    "dropout": ("dropout", {"activation_checkpointing": "full"}, None),
    "lora": ("plain", {"lora": {"rank": 3, "dropout": 0.2}}, None),
    "bf16": ("plain", {"compute_dtype": "bfloat16", "epochs_per_batch": 2}, None),
}
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad_norm": 0.01}


def deal(batch: Batch, ranks: int, rank: int, updates: int = 1) -> Batch:
    """What the driver gives to this rank."""
    store = LocalStore()
    ref = BatchRef.of(Meta.of(batch), store.put(batch), store)
    return _shard_leaves(ref, ranks, updates, TOKENS).worker_rows[rank].gather(store)


def digest(weights: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in weights.items():
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trainer(case: str, folder: Path, ranks: int, rank: int, port: int):
    model, config, _ = CASES[case]
    settings = {"max_tokens_per_micro": TOKENS, "reduction": "exact", "optimizer": OPTIMIZER, **config}
    backend = Backend("any", "fsdp", ranks=ranks)
    return build(backend, str(folder / model), rank=rank, port=port, **settings)


def step(module, number: int, ptx: Batch | None):
    own = module.context.world_size, module.context.rank, module.config.updates_per_batch
    return module.train_step(deal(STEPS[number], *own), **({} if ptx is None else {"ptx": deal(ptx, *own)}))


def train(rank: int, port: int, ranks: int, folder: Path, cases: list[str]) -> dict[str, Any]:
    found = {}
    for i, case in enumerate(cases):
        module = trainer(case, folder, ranks, rank, port + i)
        before = digest(exported(module))
        stats = [step(module, number, CASES[case][2]) for number in range(3)]
        found[case] = before, digest(exported(module)), stats
        module.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    for name, config in MODELS.items():
        tiny_model_dir(folder / name, hidden=40, **config)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """``run(case, ranks)``: what each rank found, once."""
    return cache(lambda case, ranks: [found[case] for found in on_ranks(ranks, train, folder, ranks, folder, [case])])


PAIRS = [(case, ranks) for case in CASES for ranks in (2, 3, 4)]


@pytest.mark.parametrize(
    ("case", "ranks"), [pytest.param(*pair, marks=[] if pair == ("full", 3) else pytest.mark.slow) for pair in PAIRS]
)
def test_weights_have_the_same_bits_on_any_number_of_ranks(run, case, ranks):
    [(before, after, stats)] = run(case, 1)
    found = run(case, ranks)
    assert {own[1] for own in found} == {after} != {before}
    for number in range(3):
        merged = merge_stats(own[2][number] for own in found)
        assert merged["tokens/trained"].value == stats[number]["tokens/trained"].value
        for key, tolerance in (("loss/grad_norm", 1e-12), ("loss/value", 1e-6)):
            assert merged[key].value == pytest.approx(stats[number][key].value, rel=tolerance, abs=1e-7)


def _continue(rank: int, port: int, ranks: int, folder: Path, number: int) -> str:
    module = trainer("full", folder, ranks, rank, port)
    if number:
        module.load(folder / f"step-{number - 1}")
    step(module, number, CASES["full"][2])
    module.save(folder / f"step-{number}")
    weights = digest(exported(module))
    module.close()
    return weights


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_ranks(folder, run):
    for number, ranks in enumerate((2, 3, 1)):
        weights = on_ranks(ranks, _continue, folder, ranks, folder, number)
    assert weights[0] == run("full", 1)[0][1]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 13])
def test_zeros_at_the_end_change_no_sum(count):
    numbers = torch.randn(count, 50, generator=torch.Generator().manual_seed(count)) * torch.logspace(-5, 5, 50)
    sums = []
    for zeros in range(6):
        tree = _TreeSum()
        for tensor in [*numbers, *torch.zeros(zeros, 50)]:
            tree.add(tensor)
        sums.append(tree.take())
    assert all(torch.equal(total, sums[0]) for total in sums)
    torch.testing.assert_close(sums[0], numbers.double().sum(0).float(), rtol=1e-5, atol=1e-5)


def test_scores_have_the_same_bits_whoever_computes_them(folder):
    def score(shares: int) -> torch.Tensor:
        found = torch.zeros(len(batch), 30)
        for rank in range(shares):
            module.context = replace(module.context, rank=rank)
            share = deal(batch, shares, rank)
            column = module.forward_step(share)["ref_logprobs"]
            for index, own in zip(share["index"].tolist(), column.split(share.lengths.tolist()), strict=True):
                found[index, : len(own)] = own
        return found

    batch = STEPS[2].with_(index=torch.arange(len(STEPS[2]), dtype=torch.int32))
    settings = {"frozen": True, "reduction": "exact", "max_tokens_per_micro": TOKENS}
    module = build(Backend("any", "fsdp"), str(folder / "plain"), **settings)
    assert torch.equal(score(1), score(3))
