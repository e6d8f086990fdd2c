"""Routing replay: the native engine records the experts of each token, and a trainer chooses them again."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from coalign import load_config
from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.engines.transformers import TransformersModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import ModelConfig
from coalign.data.batch import Batch
from coalign.launch.check import check
from coalign.report.display import Display
from coalign.roles import Context
from tests.backends import batches
from tests.backends.batches import branched, rollout
from tests.backends.test_routers import FAMILIES, paths  # noqa: F401  (a fixture)
from tests.runs import metrics, run, settings
from tests.tiny import tiny_model_dir

LAYERS, CHOSEN = 2, 2  # of the tiny Qwen3-MoE


def trainer(path: str, *, replay: bool = True, kind: type = FSDPModule, **config) -> FSDPModule:
    context = Context(model="trainer", routing_replay=replay, loss=Objective(PolicyGradient()))
    made = kind(ModelConfig(load=path, optimizer={"lr": 1e-2}, **config), context)
    made.setup()
    return made


def policy(path: str, *, kind: type = NativeModule, samples: int = 2, **config) -> NativeModule:
    settings = {"module": "native", "load": path, "sampling": {"max_new_tokens": 8}} | config
    made = kind(ModelConfig(**settings), Context(model="policy", samples_per_prompt=samples, routing_replay=True))
    made.setup()
    return made


def prompts() -> Batch:
    return batches.prompts(5, 3, 9)


def logprobs(module: FSDPModule, batch: Batch) -> torch.Tensor:
    return module.forward_step(batch, into="old_logprobs")["old_logprobs"][batch["loss_mask"]]


def given(batch: Batch, experts: int = 6) -> Batch:
    """With experts of each token drawn at random, the same for equal positions; some are not known."""
    place = torch.arange(batch.tokens_total) - batch.offsets[batch.segment]
    scores = torch.rand(int(batch.lengths.max()), LAYERS, experts, generator=torch.Generator().manual_seed(3))
    chosen = scores.topk(CHOSEN, -1).indices.to(torch.int16)
    chosen[4] = -1
    return batch.with_(routed_experts=chosen[place])


def compute_by_hand(path: str, batch: Batch) -> tuple[torch.Tensor, AutoModelForCausalLM]:
    """Log-probs of each sequence alone, by a model whose routers are written out here: the softmax of the router's own
    logits, at the experts that are given, normalised."""
    model = AutoModelForCausalLM.from_pretrained(path)
    found = []
    for row in batch.rows():
        for layer, block in enumerate(model.model.layers):

            def route(hidden, gate=block.mlp.gate, forced=row["routed_experts"][:, layer].long()):
                probabilities = F.linear(hidden, gate.weight).softmax(-1)
                own = probabilities.topk(CHOSEN, -1).indices
                chosen = torch.where(forced < 0, own, forced)
                weights = torch.stack([probabilities[i, chosen[i]] for i in range(len(hidden))])
                return None, weights / weights.sum(-1, keepdim=True), chosen

            block.mlp.gate.forward = route
        tokens = row["tokens"].long()
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0][row["loss_mask"][1:]])
    return torch.cat(found), model


@pytest.mark.parametrize(
    ("batch", "keys"),
    [
        (rollout((5, 9), 3), {}),
        (rollout((5, 9), 3), {"share_prefix": False}),
        (rollout((5, 9), 3), {"activation_checkpointing": "full"}),
        (branched(), {}),
    ],
)
def test_given_experts_are_used_as_by_hand(paths, batch, keys):  # noqa: F811
    path, batch = paths("qwen3_moe"), given(batch)
    batch = batch.with_(advantages=torch.ones(batch.tokens_total)).without("rollout_logprobs")
    expected, model = compute_by_hand(path, batch)
    own = trainer(path, **keys)
    torch.testing.assert_close(logprobs(own, batch), expected.detach(), rtol=1e-6, atol=1e-6)
    assert float((logprobs(trainer(path, replay=False), batch) - expected.detach()).abs().mean()) > 1e-3
    (-expected.mean()).backward()
    with torch.enable_grad():
        own.run([batch], lambda micro, outputs: -outputs["logprobs"].mean())
    pairs = zip(own.model.model.named_parameters(), model.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        largest = float(theirs.grad.abs().max())  # small gradients are sums of terms that nearly cancel
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_records_what_the_model_chooses(paths, family):  # noqa: F811
    """Two slots for six samples: sequences move, and prompts are computed for several samples."""
    path = paths(family)
    out = policy(path, native={"max_sequences": 2}).generate(prompts())
    own = trainer(path)
    own.model.routers.enabled = True
    for row in out.rows():
        recorded = row["routed_experts"]
        assert (recorded[-1] == -1).all() and (recorded[:-1] >= 0).all()
        alone = Batch(torch.tensor([len(row["tokens"])]), {"tokens": row["tokens"]})
        with torch.no_grad():
            own._forward(own._pack(alone), ())
        chosen = torch.stack(own.model.routers.chosen, 1)
        assert torch.equal(recorded[:-1].sort(-1).values, chosen[:-1].sort(-1).values.to(torch.int16))
    torch.testing.assert_close(logprobs(own, out), out["rollout_logprobs"][out["loss_mask"]], rtol=0, atol=1e-5)


def test_a_sample_that_continues_keeps_its_experts(paths):  # noqa: F811
    path = paths("qwen3_moe")
    whole = policy(path).generate(prompts())
    engine = policy(path)
    part = engine.generate(prompts(), round_tokens=3)
    assert torch.equal(engine.generate(part)["routed_experts"], whole["routed_experts"])


def test_replay_removes_what_another_routing_adds(paths):  # noqa: F811
    """A sampler whose routers differ a little from the trainer's, as rounding makes them."""
    path = paths("qwen3_moe")
    own, engine = trainer(path), policy(path, samples=8)
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: w + 0.03 * torch.randn(w.shape, generator=noise) if name.endswith("mlp.gate.weight") else w
        for name, w in own.export_weights()
    }
    engine.load_weights(weights.items(), version=0)
    out = engine.generate(prompts())
    sampled = out["rollout_logprobs"][out["loss_mask"]]
    with_replay = (logprobs(own, out) - sampled).abs().mean()
    without = (logprobs(own, out.without("routed_experts")) - sampled).abs().mean()
    assert with_replay < 0.5 * without


def test_what_cannot_replay_is_refused(paths, tmp_path):  # noqa: F811
    path, dense = paths("qwen3_moe"), str(tiny_model_dir(tmp_path))
    with pytest.raises(ValueError, match=r"routing_replay is true, and models\.policy\.module, `transformers`"):
        policy(path, kind=TransformersModule, module="transformers")
    with pytest.raises(ValueError, match=r"models.policy cannot record: .* Qwen2ForCausalLM declares no routers"):
        policy(dense)
    with pytest.raises(ValueError, match=r"models.trainer cannot replay: Qwen2ForCausalLM declares no routers"):
        trainer(dense)
    with pytest.raises(ValueError, match=r"cannot replay: layers that are compiled do not show their routers"):
        trainer(path, compile=True)


def test_experts_of_another_model_are_refused(paths):  # noqa: F811
    batch = given(rollout((5, 9), 2))
    own = trainer(paths("qwen3_moe"))
    with pytest.raises(ValueError, match="has 2 routers; experts of 1 were recorded"):
        logprobs(own, batch.with_(routed_experts=batch["routed_experts"][:, :1]))
    with pytest.raises(ValueError, match="a router chooses 2 experts; 1 were recorded"):
        logprobs(own, batch.with_(routed_experts=batch["routed_experts"][:, :, :1]))


async def two_turns(episode):
    await episode.generate(max_new_tokens=4)
    episode.write(" no:")
    await episode.generate(max_new_tokens=4)


@pytest.mark.parametrize(
    "environment",
    ["tests.backends.test_routing_replay:two_turns", pytest.param("single_turn", marks=pytest.mark.slow)],
)
def test_a_run_replays(paths, tmp_path, environment):  # noqa: F811
    """Of experts alike, sampler and trainer differ by rounding, also in the updates that follow the first."""
    config = settings(tmp_path, "grpo", steps=2, max_staleness=1)
    for model in config["models"].values():
        model["load"] = paths("qwen3_moe")
    config["models"]["trainer"] |= {"updates_per_batch": 2, "router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.01}
    config["rollout"] = {"fn": environment, "routing_replay": True}
    assert run(config) == 0
    lines = {line["step"]: line for line in metrics(config)}
    assert lines[1]["loss/mismatch_max"] < 1e-4
    assert lines[2].keys() >= {"router/max_load", "router/entropy", "router/dead_experts", "router/aux_loss"}


def test_check_says_what_cannot_replay(tmp_path):
    config = settings(tmp_path, "grpo")
    config["rollout"] = {"routing_replay": True}
    with pytest.raises(ValueError, match=r"rollout\.routing_replay is true, .* Qwen2ForCausalLM declares no routers"):
        check(load_config(config), Display(quiet=True))
    config = settings(tmp_path, "sft")
    config["rollout"] = {"routing_replay": True}
    with pytest.raises(ValueError, match="rollout: `sft` learns from data"):
        check(load_config(config), Display(quiet=True))
