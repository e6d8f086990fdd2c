"""Adapters: what they compute, what they train, what leaves the model, what comes back from disk."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from coalign.backends import lora, pretrained
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.config.schema import ModelConfig
from coalign.roles import Context
from tests.backends.batches import prompts, rollout
from tests.backends.test_fsdp import Watched, module, same, weights
from tests.conformance.engines import expected_logprobs
from tests.tiny import tiny_model_dir

KINDS = [{"rank": 4}, {"rank": 4, "rslora": True}, {"rank": 4, "dora": True}]
ids = lambda lora: "-".join(lora)  # noqa: E731
# The fast suite compares every kind with peft, and sees the rest of one that does the most.
ONE_KIND = [*(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2]), KINDS[2]]


def trained(path, lora, steps=2, **config):
    trainer = module(path, lora=lora, **config)
    for seed in range(steps):
        trainer.train_step(rollout(seed=seed))
    return trainer


def scores(trainer, **how):
    [(_, column)] = trainer.forward_step(rollout(), **how).items()
    return column


# ---- which layers


def test_patterns_are_of_full_names(path, caplog):
    def adapted(target):
        model = pretrained.build_skeleton(ModelConfig(load=path, lora={"target": target, "rank": 2}))
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert all("lora_" in name for name in names)
        return len(names) // 2

    assert adapted(["all-linear"]) == 14 and adapted(["*.q_proj"]) == 2 and adapted(["q_proj", "v_proj"]) == 4
    assert adapted(["*.q_proj", "*.v_proj", "*.?_proj"]) == 8
    assert adapted(["model.layers.1.*"]) == 7 and adapted("*.mlp.*") == 6
    with caplog.at_level(logging.INFO, "coalign"):
        module(path, lora={"target": "*.q_proj", "rank": 2})
    # 2 layers · rank 2 · (32 in + 32 out)
    assert "models.trainer trains 256 of 29,216 parameters (0.88 %)" in caplog.text


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("*.q_prj", r"models\.trainer\.lora\.target: '\*\.q_prj' matches none .*model\.layers\.0\.self_attn\.q_proj"),
        ("q_prj", r"'q_prj' matches none of the linear layers of Qwen2ForCausalLM \(model\.layers\.0\.self"),
        ("zzz", r"'zzz' matches none .*down_proj, .*v_proj, …"),
        ("*", r"matches the head 'lm_head', which takes no adapter"),
        ("lm_head", r"matches the head 'lm_head'"),
        ("*embed_tokens", r"matches the embeddings; adapters go into linear layers"),
        ("score", "matches the head 'score'"),
    ],
)
def test_a_bad_pattern_is_named(path, target, message):
    head = {"head": "value", "head_init": "zero"} if target == "score" else {}
    with pytest.raises(ValueError, match=message):
        module(path, lora={"target": ["*.v_proj", target]}, **head)


# ---- what it computes


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_the_same_as_pefts_own_model(path, tmp_path, kind):
    """Log-probs of the trained adapters, from the directory that peft loads."""

    import peft

    trainer = trained(path, kind | {"alpha": 6.0})
    trainer.save_adapter(tmp_path)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tmp_path)
    ours, batch = scores(trainer), rollout()
    torch.testing.assert_close(ours[batch["loss_mask"]], expected_logprobs(theirs, batch, 1.0), rtol=1e-5, atol=1e-5)
    assert (ours - scores(trainer, base=True)).abs().max() > 0.01


def test_gradients_do_not_depend_on_cuts_or_checkpointing(path):
    gradients = []
    for more in ({"share_prefix": False}, {"max_tokens_per_micro": 21}, {"activation_checkpointing": "full"}):
        trainer = trained(path, KINDS[2], steps=1, kind=OnlyTrained, **more)
        trainer.train_step(rollout(seed=1))
        gradients.append(trainer.gradient.double())
    for gradient in gradients[1:]:
        assert float((gradients[0] - gradient).norm() / gradients[0].norm()) < 1e-5


class OnlyTrained(Watched):
    def optimizer_step(self):
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.requires_grad])
        return super(Watched, self).optimizer_step()


def test_dropout_is_off_when_scoring_and_repeats_when_training(path):
    still, dropped, again = (trained(path, {"rank": 4, "dropout": p}) for p in (0.0, 0.5, 0.5))
    assert same(weights(dropped), weights(again)) and not same(weights(dropped), weights(still))
    assert torch.equal(scores(dropped), scores(again))


# ---- without the adapters


@pytest.mark.parametrize("kind", ONE_KIND, ids=ids)
def test_adapters_alone_learn_and_the_base_is_the_frozen_model_bit_for_bit(path, kind):
    reference = scores(module(path, frozen=True))
    trainer, again, reseeded = (module(path, lora=kind, seed=seed) for seed in (0, 0, 1))
    drawn = [lora.find_trained_parameters(model.model.model) for model in (trainer, again, reseeded)]
    assert same(drawn[0], drawn[1]) and not same(drawn[0], drawn[2])  # from the seed
    assert torch.equal(scores(trainer, base=True), reference)
    first = {name: p.clone() for name, p in trainer.model.named_parameters()}
    before = weights(trainer)
    for seed in range(2):  # B starts at zero, so the first step moves nothing of A
        trainer.train_step(rollout(seed=seed))
        assert torch.equal(scores(trainer, base=True), reference)
        assert not torch.equal(scores(trainer), reference)  # they are back on
        assert not same(weights(trainer), before)
        before = weights(trainer)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, first[name])}
    assert moved == {name for name in first if "lora_" in name} and len(trainer.optimizer.state) == len(moved)
    for config in ({}, {"frozen": True}, {"frozen": True, "lora": KINDS[0]}):
        with pytest.raises(ValueError, match=r"models\.trainer\.lora is not set"):
            scores(module(path, **config), base=True)


# ---- merged weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ONE_KIND, ids=ids)
def test_exported_weights_are_those_of_pefts_merge(path, tmp_path, kind, dtype):
    import peft

    trainer = trained(path, kind, dtype=dtype)
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    exported = weights(trainer)
    assert all(torch.equal(p, base[name]) for name, p in trainer.model.named_parameters() if name in base)
    trainer.save_adapter(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).float()
    merged = dict(peft.PeftModel.from_pretrained(plain, tmp_path).merge_and_unload().named_parameters())
    assert exported.keys() == merged.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == getattr(torch, dtype)
        expected = merged[name].detach().to(tensor.dtype)
        torch.testing.assert_close(tensor, expected, rtol=1e-6 if dtype == "float32" else 8e-3, atol=1e-7)


def test_only_what_changes_is_exported_when_asked(path):
    trainer = trained(path, {"target": "*.q_proj"})
    changing = dict(trainer.export_weights(changing=True))
    everything = weights(trainer)
    start = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    moved = {name for name in everything if not torch.equal(everything[name], start[name])}
    assert moved == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    # and what engines may compute as one with them
    beside = {name.replace("q_proj", part) for name in moved for part in ("k_proj", "v_proj", "o_proj")}
    assert set(changing) == moved | beside
    assert same(changing, {name: everything[name] for name in changing})
    assert len(dict(module(path).export_weights(changing=True))) == len(everything)


@pytest.mark.parametrize("kind", ONE_KIND, ids=ids)
def test_the_hugging_face_directory_is_merged(path, tmp_path, kind):
    trainer = trained(path, kind)
    shapes = lambda model: {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}  # noqa: E731
    config = ModelConfig(load=path, lora=kind)
    assert shapes(pretrained.build_skeleton(config)) == shapes(trainer.model.model)
    trainer.save_hf(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert same(dict(loaded.named_parameters()), weights(trainer))
    torch.testing.assert_close(scores(module(str(tmp_path), frozen=True)), scores(trainer), rtol=0, atol=3e-6)


# ---- adapters on disk


@pytest.mark.parametrize("kind", ONE_KIND, ids=ids)
def test_a_resumed_run_ends_with_the_same_weights(path, tmp_path, kind):
    kind = kind | {"dropout": 0.2}
    straight = trained(path, kind)
    straight.save(tmp_path)
    resumed = module(path, lora=kind, seed=0)
    for p in lora.find_trained_parameters(resumed.model.model).values():
        p.data.fill_(3.0)
    resumed.load(tmp_path)
    for trainer in (straight, resumed):
        for seed in (2, 3):
            trainer.train_step(rollout(seed=seed))
    assert same(weights(straight), weights(resumed))


def test_a_checkpoint_holds_what_is_trained_and_its_shape_is_named(path, tmp_path):
    trained(path, {"target": "*.q_proj", "rank": 1}, steps=1).save(tmp_path / "small")
    assert sum(file.stat().st_size for file in (tmp_path / "small").iterdir()) < 60_000  # the weights alone are 117 kB
    trained(path, {"rank": 4}, steps=0).save(tmp_path / "rank_4")
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.default\.weight is \(4, 32\) there and \(2, 32\) here"):
        module(path, lora={"rank": 2}).load(tmp_path / "rank_4")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is missing there"):
        module(path).load(tmp_path / "rank_4")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ONE_KIND, ids=ids)
def test_going_on_from_an_adapter(path, tmp_path, kind, frozen):
    trainer = trained(path, kind)
    trainer.save_adapter(tmp_path)
    loaded = module(path, frozen=frozen, lora=kind | {"load": str(tmp_path)}, seed=5)
    assert torch.equal(scores(loaded), scores(trainer))
    assert same(weights(loaded), weights(trainer))
    assert frozen or loaded.train_step(rollout())["loss/grad_norm"].value > 0


def test_a_policy_on_its_own_samples_with_the_adapter(path, tmp_path):
    trainer = trained(path, KINDS[0])
    trainer.save_adapter(tmp_path)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)  # a directory does not depend on the order of Python's sets
    config = {"load": path, "lora": KINDS[0] | {"load": str(tmp_path)}, "sampling": {"max_new_tokens": 6}}
    policy = NativeModule(ModelConfig(module="native", **config), Context(model="policy", samples_per_prompt=2))
    policy.setup()
    sampled = policy.generate(prompts(3, 4))
    own = trainer.forward_step(sampled)["ref_logprobs"]
    torch.testing.assert_close(own, sampled["rollout_logprobs"], rtol=0, atol=1e-5)
    assert (own - trainer.forward_step(sampled, base=True)["ref_logprobs"]).abs().max() > 0.01


def test_an_adapter_of_another_kind_or_model_is_refused(path, tmp_path):
    kind = {"rank": 4, "target": ["*.q_proj", "*.k_proj"]}
    trained(path, kind, steps=0).save_adapter(tmp_path / "a")
    narrow = str(tiny_model_dir(tmp_path / "narrow", hidden=16))
    trained(narrow, kind, steps=0).save_adapter(tmp_path / "b")
    for name, change, message in (
        ("a", {"rank": 2}, r"models\.trainer\.lora\.rank is 2, but 4 in the adapter"),
        ("a", {"alpha": 8.0}, r"models\.trainer\.lora\.alpha is 8\.0, but 32\.0 in the adapter"),
        ("a", {"dora": True}, r"models\.trainer\.lora\.dora is True, but False"),
        ("a", {"target": "*.q_proj"}, r"lora\.target is not that of .*k_proj\.lora_A\.weight is only there"),
        ("a", {"target": ["*.k_proj", "*.mlp.*"]}, r"mlp\.down_proj\.lora_A\.weight is not there"),
        ("b", {}, r"of another model than models\.trainer\.load: .* \(4, 16\) there and \(4, 32\)"),
        ("c", {}, r"no adapter_model\.safetensors there"),
    ):
        if name == "c":
            (tmp_path / "b" / "adapter_model.safetensors").rename(tmp_path / "c")
            name = "b"
        with pytest.raises(ValueError, match=message):
            module(path, lora=kind | change | {"load": str(tmp_path / name)})


# ---- adapters of peft


def peft_adapter(path, to, **settings):
    """Write an adapter that peft drew; return the log-probs of a rollout's tokens, which its own model computes."""
    import peft

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False} | settings)
        model = peft.get_peft_model(plain, config)
    model.save_pretrained(to)
    return expected_logprobs(model, rollout(), 1.0)


PATTERNS = [
    {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "k_proj": 6}, "alpha_pattern": {r".*\.0\..*_proj": 40}},
    {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {"k_proj": 3}, "use_rslora": True},
    {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {"k_proj": 3}, "use_dora": True},
    {"layers_to_transform": [1]},
    {"exclude_modules": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]},
]


@pytest.mark.parametrize("settings", PATTERNS, ids=lambda settings: "-".join(settings))
def test_layers_have_the_ranks_and_scales_of_pefts_adapter(path, tmp_path, settings):
    layer = "1" if {"layers_to_transform", "exclude_modules"} & settings.keys() else "?"
    target = [f"model.layers.{layer}.self_attn.{name}_proj" for name in "qk"]
    kind = {"rank": 4, "alpha": 8, "rslora": "use_rslora" in settings, "dora": "use_dora" in settings, "target": target}
    expected = peft_adapter(path, tmp_path, target_modules=["q_proj", "k_proj"], **settings)
    loaded = module(path, lora=kind | {"load": str(tmp_path)})
    torch.testing.assert_close(scores(loaded)[rollout()["loss_mask"]], expected, rtol=1e-5, atol=1e-5)
    again = tmp_path / "again"
    loaded.save_adapter(again)
    other = module(path, lora=kind | {"load": str(again)})
    assert torch.equal(scores(other), scores(loaded))
    skeleton = pretrained.build_skeleton(ModelConfig(load=path, lora=kind | {"load": str(tmp_path)}))
    assert {n: p.shape for n, p in skeleton.named_parameters()} == {
        n: p.shape for n, p in loaded.model.model.named_parameters()
    }


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"bias": "all"}, {}, r"adapter_config\.json has bias: 'all', which `lora` does not train; `coalign merge` it"),
        ({"bias": "lora_only"}, {}, "has bias: 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, {}, r"has modules_to_save: \['lm_head'\]"),
        ({"lora_bias": True}, {}, "has lora_bias: True"),
        ({"trainable_token_indices": [3]}, {}, r"has trainable_token_indices: \[3\]"),
        ({"init_lora_weights": "pissa"}, {}, "has init_lora_weights: 'pissa'"),
        ({"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}, {}, "has alora_invocation_tokens"),
        ({}, {"use_novelty": True, "size": 3, "old": None}, r"has use_novelty: True, which peft \S+ does not know"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_else_an_adapter_computes_is_refused_by_name(path, tmp_path, settings, fields, message):
    peft_adapter(path, tmp_path, target_modules=["q_proj"], **settings)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        module(path, lora={"rank": 4, "alpha": 8, "target": "*.q_proj", "load": str(tmp_path)})


def test_ranks_of_layers_cannot_be_synced_apart(path, tmp_path):
    peft_adapter(path, tmp_path, target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 6})
    config = ModelConfig(
        load=path, lora={"rank": 4, "alpha": 8, "target": ["*.q_proj", "*.k_proj"], "load": str(tmp_path)}
    )
    model = pretrained.load(config, seed=0)
    with pytest.raises(ValueError, match=r"`apart`.*models\.trainer\.lora\.load has rank 6 in .*k_proj.*, not 4"):
        lora.check_separate(model, Context(model="trainer", adapter_rank=4))


# ---- heads of one number


@pytest.mark.parametrize("head", ["value", "reward"])
def test_the_head_is_trained_whole(path, tmp_path, head):
    import peft

    trainer = module(path, head=head, head_init="zero", lora={"rank": 2}, loss={"fn": f"{__name__}:upwards"})
    for _ in range(2):
        trainer.train_step(rollout())
    assert {n for n, p in trainer.model.named_parameters() if p.requires_grad and "lora_" not in n} == {
        "model.score.weight"
    }
    assert weights(trainer)["score.weight"].any()
    trainer.save_hf(tmp_path / "hf")
    merged = module(str(tmp_path / "hf"), head=head, frozen=True)
    torch.testing.assert_close(scores(merged), scores(trainer), rtol=1e-4, atol=1e-6)
    trainer.save_adapter(tmp_path / "adapter")
    again = module(path, head=head, head_init="zero", lora={"rank": 2, "load": str(tmp_path / "adapter")})
    assert torch.equal(scores(again), scores(trainer))
    plain = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.equal(theirs.base_model.model.score.weight, weights(trainer)["score.weight"])


def upwards(x):
    from coalign.types import LossOutput

    out = x.values if x.values is not None else x.scores[x.segment]
    return LossOutput(-out)


# ---- 4-bit base


def test_a_base_in_4_bits(path, tmp_path):
    trainer = trained(path, {"rank": 4, "base_bits": 4}, steps=0)
    base = scores(trainer, base=True)
    assert 0 < (base - scores(module(path, frozen=True))).abs().max() < 0.2
    before = {n: p.clone() for n, p in trainer.model.named_parameters() if p.dtype == torch.uint8}
    assert len(before) == 14
    for seed in range(2):
        trainer.train_step(rollout(seed=seed))
    assert torch.equal(scores(trainer, base=True), base)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)
    trainer.save_hf(tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.float32}
    torch.testing.assert_close(scores(module(str(tmp_path / "hf"), frozen=True)), scores(trainer), rtol=0, atol=1e-5)
    trainer.save(tmp_path / "checkpoint")
    resumed = module(path, lora={"rank": 4, "base_bits": 4})
    resumed.load(tmp_path / "checkpoint")
    for each in (trainer, resumed):
        each.train_step(rollout(seed=3))
    assert same(weights(trainer), weights(resumed))


def test_where_a_base_in_4_bits_cannot_be(path):
    for key, value in (("init", "random"), ("num_process", 2)):
        with pytest.raises(ValueError, match=f"needs .*{key}"):
            ModelConfig(load=path, lora={"base_bits": 4}, **{key: value})
