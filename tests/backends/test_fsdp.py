import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from coalign.algorithms.losses.policy import PolicyGradient
from coalign.algorithms.objective import Objective
from coalign.backends.base import build_objective
from coalign.backends.hf.fsdp import FSDPModule
from coalign.config.schema import LossConfig, ModelConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign.types import LossInput, LossOutput, Stat
from tests.backends.batches import branched, rollout
from tests.conformance.backends import same
from tests.conformance.engines import expected_logprobs
from tests.tiny import tiny_model_dir


def module(
    path: str, *, loss: dict | None = None, steps: int = 4, seed: int = 0, kind: type = FSDPModule, **config
) -> FSDPModule:
    settings = {"load": path, "optimizer": {"lr": 1e-2}} | config
    objective = Objective(PolicyGradient()) if loss is None else build_objective(LossConfig(**loss)) if loss else None
    context = Context(model="trainer", steps=steps, seed=seed, loss=objective)
    made = kind(ModelConfig(**settings), context)
    made.setup()
    return made


def weights(module: FSDPModule) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.export_weights()}


class Watched(FSDPModule):
    """Keeps the gradient and counts what it ran."""

    forwards = 0

    def optimizer_step(self) -> float:
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        return super().optimizer_step()

    def run(self, micros, loss=None, *, needs=()):
        self.forwards += loss is None
        self.row_counts = sum(len(micro) for micro in micros)
        self.entropy = "entropy" in needs
        return super().run(micros, loss, needs=needs)


# ---- one gradient, however it is cut


@pytest.mark.parametrize(
    ("aggregation", "micro", "share"),
    [
        ("token_mean", None, True),
        ("token_mean", 60, False),
        ("sequence_mean_token_mean", 21, True),
        ("sequence_mean_token_sum", 60, True),
        ("constant", 21, False),
    ],
)
@pytest.mark.parametrize("batch", [rollout((5, 9, 12), 4), branched(longest=5)], ids=["groups", "branches"])
def test_gradients_do_not_depend_on_cuts_packing_or_sharing(path, batch, aggregation, micro, share):
    loss = {"fn": "policy_gradient", "aggregation": aggregation}
    loss |= {"constant_length": 10} if aggregation == "constant" else {}
    gradients = []
    for config in (
        {"max_tokens_per_micro": None, "share_prefix": False},
        {"max_tokens_per_micro": micro, "share_prefix": share},
    ):
        trainer = module(path, loss=loss, kind=Watched, **config)
        trainer.train_step(batch)
        gradients.append(trainer.gradient.double())
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-6


def sequence_loss(x: LossInput) -> LossOutput:
    """One value per sequence: the log-likelihood of what it holds."""
    return LossOutput(torch.zeros(x.sequences).index_add(0, x.segment, x.logprobs).neg())


def short_loss(x: LossInput) -> LossOutput:
    return LossOutput(x.logprobs[:1])


def nan_loss(x: LossInput) -> LossOutput:
    return LossOutput(x.logprobs * float("nan"))


def entropy_loss(x: LossInput) -> LossOutput:
    return LossOutput(-x.entropy, {"entropy": Stat.of(x.entropy)})


def greedy_loss(x: LossInput) -> LossOutput:
    return LossOutput(-x.logprobs, {"value": Stat(0.0)})


sequence_loss.per = "sequence"
entropy_loss.needs = lambda **_: ("entropy",)


def test_a_loss_per_sequence_is_averaged_over_all_sequences(path):
    batch = rollout((5, 9), 3)
    whole, cut = (
        module(path, loss={"fn": f"{__name__}:sequence_loss"}, kind=Watched, max_tokens_per_micro=m) for m in (None, 21)
    )
    stats = whole.train_step(batch), cut.train_step(batch)
    assert stats[0]["loss/value"].value == pytest.approx(stats[1]["loss/value"].value, rel=1e-5)
    torch.testing.assert_close(whole.gradient, cut.gradient, rtol=1e-4, atol=1e-6)
    logprobs = module(path).forward_step(batch)["ref_logprobs"]
    assert stats[0]["loss/value"].value == pytest.approx(-float(logprobs.sum()) / 6, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "batch", "message"),
    [
        ({"loss": {"fn": f"{__name__}:short_loss"}}, {}, r"returned 1 values; expected \d+, one per token"),
        ({"loss": {"fn": f"{__name__}:greedy_loss"}}, {}, r"\['value'\], which the training step itself reports"),
        ({"loss": {"fn": "policy_gradient", "clip_hihg": 0.3}}, {}, "clip_hihg"),
        ({"loss": {}}, {}, r"models\.trainer\.loss"),
        ({"frozen": True}, {}, r"models\.trainer\.frozen"),
        ({"max_tokens_per_micro": 4}, {}, "max_tokens_per_micro=4"),
        ({"head": "value"}, {}, r"score\.weight.*head_init: zero"),
        ({"router_z_loss_coef": 0.1}, {}, r"router_z_loss_coef is 0\.1: Qwen2ForCausalLM declares no"),
        ({"fp8": True, "compute_dtype": "bfloat16"}, {}, r"models\.trainer\.fp8 needs a GPU .* computes on cpu"),
        ({}, {"without": "advantages"}, "advantages"),
    ],
    ids=["length", "names", "argument", "no loss", "frozen", "budget", "no head", "routers", "fp8", "no advantages"],
)
def test_what_cannot_be_trained_is_refused(path, config, batch, message):
    with pytest.raises(ValueError, match=message):
        module(path, **config).train_step(rollout().without(*batch.values()))


def test_entropy_is_computed_only_for_a_loss_that_asks(path):
    trainer = module(path, kind=Watched)
    trainer.train_step(rollout())
    assert not trainer.entropy
    stats = trainer.eval_step(rollout(), loss=f"{__name__}:entropy_loss")
    assert trainer.entropy and 0 < stats["loss/entropy"].value < math.log(320)


# ---- the order of events


def test_statistics_of_a_step(path):
    batch = rollout()
    stats = module(path, updates_per_batch=2, epochs_per_batch=3).train_step(batch)
    assert stats["tokens/trained"].value == 3 * int(batch["loss_mask"].sum())
    assert stats["loss/lr"].value == pytest.approx(1e-2)
    assert stats["loss/grad_norm"].count == 6 and stats["loss/skipped_updates"].value == 0
    assert stats["loss/value"].count == 6


def test_old_logprobs_cost_a_forward_only_where_they_differ(path):
    batch = rollout()
    versions = torch.where(batch["loss_mask"], 0, -1).int()
    trainer = module(path, kind=Watched)
    trainer.train_step(batch.with_(versions=versions))
    assert (trainer.forwards, trainer.version) == (0, 1)
    stats = trainer.train_step(batch.with_(versions=versions))  # sampled one version ago
    assert trainer.forwards == 1
    assert stats["loss/ratio"].value == 1.0  # the anchor is the trainer's own, not the sampler's
    trainer.train_step(batch.with_(versions=versions + 2))
    assert trainer.forwards == 1
    several = module(path, kind=Watched, updates_per_batch=2)
    stats = several.train_step(batch)
    assert several.forwards == 1 and stats["loss/ratio"].value != 1.0
    several.train_step(batch.without("rollout_logprobs"), loss="sft")  # no sampler, no ratio
    assert several.forwards == 1
    stats = several.train_step(Batch(torch.tensor([5, 3]), {"tokens": torch.arange(8)}), loss="sft")
    assert stats["tokens/trained"].value == 6


def test_eval_learns_nothing(path):
    trainer = module(path)
    before = weights(trainer)
    stats = trainer.eval_step(rollout())
    assert same(before, weights(trainer)) and trainer.version == 0
    assert stats["loss/value"].value == pytest.approx(module(path).train_step(rollout())["loss/value"].value)


@pytest.mark.parametrize("loss", ["sft", {"fn": "sft", "aggregation": "sequence_mean_token_mean"}, "ipo"])
def test_an_evaluation_in_unequal_parts_is_that_of_the_whole(path, loss):
    settings = {"fn": loss} if isinstance(loss, str) else loss
    trainer, batch = module(path, loss=settings), rollout((4, 5, 6), 2)
    batch = batch.with_(preference=torch.tensor([1.0, 0.0] * 3), ref_logprobs=torch.zeros(batch.tokens_total))
    whole = trainer.eval_step(batch)["loss/value"]
    parts = [trainer.eval_step(batch.slice(*rows))["loss/value"] for rows in ((0, 4), (4, 6))]
    assert (parts[0] + parts[1]).value == pytest.approx(whole.value, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(path):
    trainer = module(path)
    trainer.train_step(rollout())
    before, moments = weights(trainer), [s["exp_avg"].clone() for s in trainer.optimizer.state.values()]
    stats = trainer.train_step(rollout(), loss=f"{__name__}:nan_loss")
    assert stats["loss/skipped_updates"].value == 1 and stats["loss/grad_norm"].count == 0
    assert same(before, weights(trainer))
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, trainer.optimizer.state.values(), strict=True))
    assert trainer.train_step(rollout())["loss/skipped_updates"].value == 0


def test_an_update_without_trained_tokens_moves_nothing(path):
    trainer = module(path, updates_per_batch=3)
    trainer.train_step(rollout((5, 9, 7)))
    before, updates = weights(trainer), trainer.updates
    batch = rollout()
    stats = trainer.train_step(batch.with_(loss_mask=torch.zeros_like(batch["loss_mask"])))
    assert stats["loss/skipped_updates"].value == 3 and trainer.updates == updates
    assert same(before, weights(trainer))


def test_dropout_is_off_when_scoring_and_repeats_when_training(tmp_path):
    path = str(tiny_model_dir(tmp_path, attention_dropout=0.5))
    first, second = module(path), module(path)
    batch = rollout()
    assert torch.equal(first.forward_step(batch)["ref_logprobs"], second.forward_step(batch)["ref_logprobs"])
    assert first.train_step(batch)["loss/ratio"].value == 1.0
    state = torch.get_rng_state()
    torch.rand(3)  # what else happened in this process does not matter
    second.train_step(batch)
    assert same(weights(first), weights(second))
    torch.set_rng_state(state)
    plain = module(path, kind=Watched)
    plain.train_step(batch)
    assert torch.equal(torch.get_rng_state(), state)


def test_deterministic_runs_refuse_operations_that_are_not(path):
    try:
        trainer = module(path, deterministic=True)
        assert math.isfinite(trainer.train_step(rollout())["loss/grad_norm"].value)
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- log-probs


def test_logprobs_are_those_at_the_sampling_temperature(path):
    batch = rollout()
    got = module(path, sampling={"temperature": 0.7}, frozen=True).forward_step(batch, into="mine")["mine"]
    expected = expected_logprobs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), batch, 0.7)
    torch.testing.assert_close(got[batch["loss_mask"]], expected, rtol=1e-5, atol=1e-5)
    assert not got[~batch["loss_mask"]].any()


def test_a_family_with_logits_of_its_own_is_refused(path, monkeypatch):
    from transformers import Qwen2ForCausalLM

    plain = Qwen2ForCausalLM.forward

    def doubled(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = 2 * out.logits
        return out

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", doubled)
    with pytest.raises(NotImplementedError, match="changes its logits"):
        module(path)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [("gemma2", "final_logit_softcapping", 0.05), ("cohere", "logit_scale", 9.0), ("granite", "logits_scaling", 0.1)],
)
def test_families_that_scale_or_cap_their_logits(tmp_path, family, key, value):
    module(str(tiny_model_dir(tmp_path, family=family, **{key: value})))


# ---- weights


def test_exported_weights_are_the_live_parameters(path):
    trainer = module(path)
    exported = dict(trainer.export_weights())
    reference = module(path, frozen=True)
    assert reference.optimizer is None and not any(p.requires_grad for p in reference.model.parameters())
    assert torch.equal(*(model.forward_step(rollout())["ref_logprobs"] for model in (reference, trainer)))
    assert trainer.forward_step(rollout().select([]))["ref_logprobs"].shape == (0,)
    before = {name: tensor.clone() for name, tensor in exported.items()}
    trainer.train_step(rollout())
    assert not any(torch.equal(before[name], tensor) for name, tensor in exported.items())
    assert same(exported, weights(trainer))
    assert "lm_head.weight" not in exported  # tied


def test_random_weights_come_from_the_seed(path):
    first, second, third = (weights(module(path, init="random", seed=seed)) for seed in (1, 1, 2))
    assert same(first, second) and not same(first, third)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
def test_save_hf_loads_with_transformers(tmp_path, family):
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in family else {}
    trainer = module(str(tiny_model_dir(tmp_path / "from", family=family, **more)))
    trainer.train_step(rollout())
    trainer.save_hf(tmp_path / "to")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype=torch.float32)
    assert same(dict(loaded.named_parameters()), weights(trainer))
    assert AutoTokenizer.from_pretrained(tmp_path / "to").chat_template
    assert same(weights(module(str(tmp_path / "to"))), weights(trainer))


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    path = str(tiny_model_dir(tmp_path / "model", attention_dropout=0.3))
    schedule = {"lr": 1e-2, "schedule": "cosine", "warmup": 1}
    batches = [rollout(seed=i) for i in range(4)]
    straight = module(path, optimizer=schedule)
    for i, batch in enumerate(batches):
        straight.train_step(batch)
        if i == 1:
            straight.save(tmp_path / "checkpoint")
    resumed = module(path, init="random", optimizer=schedule)
    resumed.load(tmp_path / "checkpoint")
    assert (resumed.version, resumed.updates) == (2, 2)
    for batch in batches[2:]:
        resumed.train_step(batch)
    assert same(weights(straight), weights(resumed))


def test_a_checkpoint_before_the_first_step_is_complete(path, tmp_path):
    module(path).save(tmp_path)
    resumed, fresh = module(path, init="random"), module(path)
    resumed.load(tmp_path)
    for trainer in (resumed, fresh):
        trainer.train_step(rollout())
    assert same(weights(resumed), weights(fresh))


def test_a_checkpoint_of_another_model_is_refused_by_name(path, tmp_path):
    module(path).save(tmp_path / "checkpoint")
    other = module(str(tiny_model_dir(tmp_path / "other", hidden=16, tied=False)))
    before = weights(other)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is \(320, 32\) there and \(320, 16\) here"):
        other.load(tmp_path / "checkpoint")
    assert same(before, weights(other))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        other.load(tmp_path)


# ---- heads


def test_values_are_read_where_the_token_is_predicted(path, tmp_path):
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path)
    batch = rollout()
    values = module(str(tmp_path), head="value").forward_step(batch)["values"]
    reward = module(str(tmp_path), head="reward").forward_step(batch)["reward"]
    for i, row in enumerate(batch.rows()):
        hidden = plain.model(input_ids=row["tokens"].long()[None]).last_hidden_state[0]
        scores = plain.score(hidden)[:, 0].detach()
        got = values[batch.offsets[i] : batch.offsets[i + 1]]
        torch.testing.assert_close(got[1:], scores[:-1] * row["loss_mask"][1:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(reward[i], scores[-1], rtol=1e-5, atol=1e-6)


def test_a_value_model_starts_at_zero_learns_and_comes_back(path, tmp_path):
    value = module(path, head="value", head_init="zero", loss={"fn": "value"})
    batch = rollout()
    assert not value.forward_step(batch)["values"].any()
    batch = batch.with_(**value.forward_step(batch))
    losses = [value.train_step(batch)["loss/value"].value for _ in range(5)]
    assert losses[-1] < losses[0]
    value.save_hf(tmp_path)
    assert same(weights(value), weights(module(str(tmp_path), head="value")))
    assert "score.weight" in weights(value) and "lm_head.weight" not in weights(value)


# ---- what it does not compute


def test_layers_that_are_not_attention_are_refused(tmp_path):
    path = str(tiny_model_dir(tmp_path))
    config = (tmp_path / "config.json").read_text().replace('"full_attention"', '"chunked_attention"', 1)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(NotImplementedError, match=r"layers of type \['chunked_attention'\] cannot compute packed"):
        module(path, rows="packed")
    with pytest.raises(NotImplementedError, match=r"Qwen2ForCausalLM cannot compute single rows: .*chunked_attention"):
        module(path)  # this family has no such layers


def test_a_directory_that_is_no_whole_model_is_refused(tmp_path):
    def refuse(message):
        with pytest.raises(ValueError, match=message):
            module(str(tmp_path))

    refuse(f"'{tmp_path}' is not a Hugging Face model directory")
    tiny_model_dir(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    refuse(r"embed_tokens\.weight is \[320, 32\] there and \[400, 32\] in the model")
    (tmp_path / "config.json").write_text(json.dumps(config))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuse(r"lacks \['model\.layers\.1\.mlp\.up_proj\.weight'\]")
