"""Flows on stand-ins: the columns that real models would give, the graph, and what is refused."""

from __future__ import annotations

import pytest
import torch

from coalign.cluster import dry
from coalign.cluster.dry import DryCluster, draw_graph
from coalign.config.schema import ModelConfig, RolloutConfig, RunConfig
from coalign.environments.conversation import find_environments
from coalign.roles import Context
from coalign.types import Stat


def advantage(reward, group, loss_mask, segment, *, scale=1.0):
    return {"advantages": (reward * scale)[segment] * loss_mask, "reward/mean": Stat.of(reward)}


def needs_values(values, loss_mask):
    return {"returns": values * loss_mask}


@pytest.fixture
def cluster():
    cluster = DryCluster(RunConfig(algorithm="none"))
    context = Context(samples_per_prompt=4)
    models = {
        "policy": ModelConfig(module="native"),
        "reference": ModelConfig(frozen=True),
        "critic": ModelConfig(head="value"),
        "reward": ModelConfig(module="reward", head="reward"),
        "trainer": ModelConfig(),
        "own": ModelConfig(module="tests.cluster.modules:OwnModule"),
    }
    for name, config in models.items():
        cluster.spawn(name, config, context)
    return cluster


def flow(cluster):
    out = cluster.models["policy"].generate(cluster.put(dry.prompts(), "prompts"))
    parts = [cluster.models[name].forward_step(out) for name in ("reference", "reward")]
    return cluster.apply(advantage, out, *parts, scale=2.0)


def test_generate_gives_the_columns_of_the_design(cluster):
    out = cluster.models["policy"].generate(dry.prompts()).result().fetch()
    assert len(out) == 8 and out["group"].tolist() == [0] * 4 + [1] * 4 and out["index"].tolist() == [0, 1, 2, 3] * 2
    assert set(out.token) == {"tokens", "loss_mask", "rollout_logprobs", "versions"}
    assert set(out.sequence) == {"group", "index", "prompt_length", "status", "rows"}
    first = next(out.rows())
    assert first["loss_mask"].tolist() == [False, False, True, True, True]
    assert first["versions"].tolist() == [-1, -1, 0, 0, 0]
    assert len(cluster.models["policy"].generate(dry.prompts(), samples=1).result()) == 2


def test_episodes_have_rewards_of_their_turns(cluster):
    context = Context(
        samples_per_prompt=2, environments=find_environments(RolloutConfig(fn="tool_use", tools=["calculator"]))
    )
    cluster.spawn("player", ModelConfig(module="native"), context)
    out = cluster.models["player"].generate(dry.prompts()).result().fetch()
    assert len(out["turn_rewards"]) == out.tokens_total and len(out["messages"]) == len(out)


def test_scorers_add_the_column_of_their_head(cluster):
    given = dry.conversations()
    columns = {name: cluster.models[name].forward_step(given).result() for name in ("reference", "critic", "reward")}
    assert [ref.columns for ref in columns.values()] == [("ref_logprobs",), ("values",), ("reward",)]
    assert cluster.models["critic"].forward_step(given, into="old_values").result().columns == ("old_values",)


def test_the_graph_knows_who_made_what(cluster):
    cluster.models["trainer"].train_step(flow(cluster))
    edges = {(a, b): set(names) for a, b, names in cluster.graph.edges}
    assert edges["prompts", "policy.generate"] == {"tokens", "group", "rows"}
    assert edges["policy.generate", "reference.forward_step"] == {"tokens"}
    assert edges["policy.generate", "advantage"] == {"group", "loss_mask"}
    assert edges["reward.forward_step", "advantage"] == {"reward"}
    assert edges["advantage", "trainer.train_step"] == {"advantages"}
    assert edges["reference.forward_step", "trainer.train_step"] == {"ref_logprobs"}
    assert cluster.graph.calls[-1].batch["advantages"].shape == (44,)


def test_the_drawing(cluster):
    flow(cluster)
    assert draw_graph(cluster.graph).splitlines()[-7:] == [
        "reward.forward_step",
        "  ├─◀ policy.generate      tokens",
        "  └─▶ reward",
        "advantage",
        "  ├─◀ reward.forward_step  reward",
        "  ├─◀ policy.generate      group, loss_mask",
        "  └─▶ advantages",
    ]


def test_a_column_that_nobody_produced_is_refused_where_it_is_asked_for(cluster):
    out = flow(cluster)
    with pytest.raises(
        ValueError, match="needs_values needs the column 'values', which nobody produced; there are: adv"
    ):
        cluster.apply(needs_values, out)


def test_metrics_and_announcements(cluster):
    seen = []
    cluster.on_call = seen.append
    assert flow(cluster).stats["reward/mean"].value == 0.0
    assert [str(future.call) for future in seen] == [
        "policy.generate",
        "reference.forward_step",
        "reward.forward_step",
        "advantage",
    ]


def test_calls_of_one_name_are_told_apart(cluster):
    first = cluster.models["policy"].generate(dry.prompts())
    cluster.models["reference"].forward_step(first)
    cluster.models["reference"].forward_step(first)
    assert [call.label for call in cluster.graph.calls][-2:] == ["reference.forward_step", "reference.forward_step#2"]


def test_own_modules_say_what_they_add(cluster):
    own = cluster.models["own"]
    assert own.forward_step(dry.conversations()).result().columns == ("quality", "style")
    assert own.judge(dry.conversations()).result().columns == ("verdict",)
    with pytest.raises(AttributeError, match="no attribute 'jugde'"):
        own.jugde(dry.conversations())


def test_what_is_no_batch_is_refused(cluster):
    trained = cluster.models["trainer"].train_step(dry.conversations())
    with pytest.raises(TypeError, match=r"policy.generate: expected a batch, got a dict"):
        cluster.models["policy"].generate(trained)


def test_zeros_have_the_declared_types(cluster):
    batch = flow(cluster).result().fetch()
    assert batch["tokens"].dtype == torch.int32 and batch["status"].dtype == torch.uint8
    assert batch["loss_mask"].dtype == torch.bool and batch["reward"].dtype == torch.float32
