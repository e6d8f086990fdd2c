"""What a call does, the same on both clusters: splitting, order, results, arguments."""

from __future__ import annotations

import torch

from coalign.cluster.batch_ref import BatchRef
from coalign.types import Max, Stat, Total


def test_generate_keeps_order_and_expands_every_prompt(cluster, prompts):
    out = cluster.models["policy"].generate(cluster.put(prompts), samples=3).result()
    assert isinstance(out, BatchRef) and len(out) == 21
    assert out.lengths.tolist() == prompts.lengths.repeat_interleave(3).tolist()
    assert out.group.tolist() == prompts["group"].repeat_interleave(3).tolist()
    batch = out.fetch()
    assert torch.equal(batch["tokens"], prompts.select(torch.arange(7).repeat_interleave(3))["tokens"] + 1)
    assert [row["id"] for row in batch["rows"]] == [i for i in range(7) for _ in range(3)]


def test_calls_take_batches_references_and_futures(cluster, prompts):
    policy, judge = cluster.models["policy"], cluster.models["judge"]
    out = policy.generate(prompts, samples=1)
    expected = [float((row["tokens"] + 1).sum()) for row in prompts.rows()]
    assert judge.forward_step(out).result().fetch()["reward"].tolist() == expected
    assert judge.forward_step(out.result(), into="reward/sum").result().columns == ("reward/sum",)


def test_columns_and_metrics_come_apart(cluster, prompts):
    future = cluster.models["judge"].forward_step(prompts)
    assert future.result().columns == ("reward",)
    assert future.stats == {"handled": Total(7)}
    assert str(future.call) == "judge.forward_step" and future.seconds > 0 and future.peak_memory > 2**20


def test_metrics_alone_are_the_result(cluster, prompts):
    stats = cluster.models["trainer"].train_step(prompts).result()
    assert stats == {
        "tokens": Total(22),
        "ranks": Total(1 if cluster.store.in_process else 2),
        "largest": Max(21.0),
        "mean": Stat(231.0, 22),
    }


def test_own_methods_and_plain_values(cluster, prompts):
    assert cluster.models["judge"].whole(prompts).result() == 22
    assert cluster.models["judge"].call("whole", batch=prompts).result() == 22
    assert cluster.models["judge"].threads().result() == 1  # those of the context


def test_calls_of_one_model_run_in_order(cluster, prompts):
    trainer = cluster.models["trainer"]
    values = [trainer.forward_step(prompts)]
    for _ in range(5):
        trainer.train_step(prompts)
        values.append(trainer.forward_step(prompts))
    factors = [float(value.result().fetch()["values"][1]) for value in values]
    assert factors == [factors[0] + step for step in range(6)]


def test_an_empty_batch_passes_through(cluster, prompts):
    empty = prompts.slice(0, 0)
    assert len(cluster.models["judge"].forward_step(empty).result()) == 0
    assert cluster.models["trainer"].train_step(empty).result()["tokens"] == Total(0)


def test_a_batch_by_keyword_may_hold_other_sequences(cluster, prompts):
    stats = cluster.models["trainer"].beside(prompts, other=prompts.slice(0, 2)).result()
    assert stats.pop("tokens") == Total(22)
    assert sum(total.value for total in stats.values()) == 2


def test_every_call_is_announced_on_the_thread_that_makes_it(cluster, prompts):
    seen = []
    cluster.on_call = seen.append
    future = cluster.models["judge"].forward_step(prompts)
    other = cluster.apply(_nothing, prompts)
    cluster.on_call = None
    assert seen == [future, other] and str(other.call) == "_nothing"


def _nothing(tokens):
    return {}


def test_bfloat16_and_lists_survive(cluster, prompts):
    batch = prompts.with_(half=torch.arange(22).to(torch.bfloat16), flag=prompts["tokens"] > 3)
    ref = cluster.put(batch)
    assert torch.equal(ref.fetch(rows=2)["tokens"], prompts.slice(0, 2)["tokens"]) and len(ref.fetch(rows=100)) == 7
    back = ref.fetch()
    assert back["half"].dtype == torch.bfloat16 and torch.equal(back["half"], batch["half"])
    assert torch.equal(back["flag"], batch["flag"]) and back["rows"] == batch["rows"]
