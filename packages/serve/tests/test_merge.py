"""`coalign merge`."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from coalign.cli import app
from coalign_serve.weights.merge import merge
from tests.backends.batches import rollout
from tests.backends.test_fsdp import module, same, weights
from tests.tiny import tiny_model_dir, tiny_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tiny_model_dir(tmp_path_factory.mktemp("base") / "model")
    GenerationConfig(temperature=0.3, do_sample=True, eos_token_id=[258, 256]).save_pretrained(path)
    return path


def adapter(base, to, **config):
    trainer = module(str(base), **{"lora": {"rank": 4}} | config)
    for seed in range(2):
        trainer.train_step(rollout(seed=seed))
    trainer.save_adapter(to)
    return trainer


def weights_of(path):
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("kind", [{"rank": 4}, {"rank": 4, "dora": True}, {"rank": 2, "target": "*.q_proj"}])
def test_the_weights_are_those_of_the_trainer(base, tmp_path, kind):
    trainer = adapter(base, tmp_path / "adapter", lora=kind)
    result = CliRunner().invoke(app, ["merge", str(base), str(tmp_path / "adapter"), "-o", str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    torch.testing.assert_close(weights_of(tmp_path / "merged"), weights(trainer), rtol=1e-6, atol=1e-7)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [258, 256]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "merged"]


def test_an_error_leaves_nothing_behind(base, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no space left")

    peft_adapter(base, tmp_path / "adapter")
    monkeypatch.setattr("coalign_serve.weights.merge.copy_processor", fail)  # after the weights are written
    with pytest.raises(OSError, match="no space left"):
        merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_sum_is_rounded_once(base, tmp_path):
    trainer = adapter(base, tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "half", dtype="bfloat16")
    exact = {name: tensor.to(torch.bfloat16) for name, tensor in weights(trainer).items()}
    torch.testing.assert_close(weights_of(tmp_path / "half"), exact, rtol=8e-3, atol=0)
    merge(tmp_path / "half", tmp_path / "adapter", tmp_path / "again")  # the base's dtype
    assert {tensor.dtype for tensor in weights_of(tmp_path / "again").values()} == {torch.bfloat16}


def test_an_adapter_of_peft_with_ranks_of_its_own(base, tmp_path):
    import peft

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ranks = {"r": 2, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 5}}
    theirs = peft.get_peft_model(model, peft.LoraConfig(**ranks, init_lora_weights=False))
    theirs.save_pretrained(tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    expected = theirs.merge_and_unload()
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert same(dict(got.named_parameters()), dict(expected.named_parameters()))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("untied") / "model", tied=False)


def peft_adapter(base, to, *, rows=None, tokenizer=None, **settings):
    """Write an adapter of peft, whose embeddings were resized to ``rows``; return the logits that it computes."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if rows:
            model.resize_token_embeddings(rows, mean_resizing=False)
        config = peft.LoraConfig(**{"r": 4, "init_lora_weights": False, "target_modules": ["q_proj"]} | settings)
        adapted = peft.get_peft_model(model, config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(to)
    return logits(adapted)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40)[None]).logits


def compare(computed, expected):
    """Compare by the largest logit, 320 where embeddings have adapters; sums of such terms leave smaller ones."""
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


EMBEDDINGS, HEAD = ["q_proj", "embed_tokens"], ["q_proj", "lm_head"]
SLOW = pytest.mark.slow
TIED = [
    ({}, True),
    ({"target_modules": EMBEDDINGS}, False),
    pytest.param({"target_modules": HEAD}, False, marks=SLOW),
    ({"target_modules": [*EMBEDDINGS, "lm_head"]}, False),
    pytest.param({"target_modules": EMBEDDINGS, "use_dora": True}, False, marks=SLOW),
    ({"target_modules": EMBEDDINGS, "ensure_weight_tying": True}, True),
    pytest.param({"modules_to_save": ["embed_tokens"]}, False, marks=SLOW),
    ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    ({"modules_to_save": ["lm_head"]}, False),
    ({"trainable_token_indices": [5, 7]}, True),
    ({"rows": 330}, True),
    pytest.param({"rows": 300}, True, marks=SLOW),
    pytest.param({"rows": 330, "target_modules": EMBEDDINGS}, False, marks=SLOW),
    pytest.param({"rows": 330, "target_modules": HEAD}, False, marks=SLOW),
    ({"rows": 330, "modules_to_save": ["embed_tokens", "lm_head"]}, False),
    ({"rows": 330, "trainable_token_indices": [325]}, True),
]
UNTIED = [
    {"target_modules": [*EMBEDDINGS, "lm_head"]},
    {"rows": 330},
    {"rows": 330, "modules_to_save": ["embed_tokens", "lm_head"]},
    {"alpha_pattern": {"q_proj": 3}, "bias": "all", "modules_to_save": ["norm"]},
    {"init_lora_weights": "pissa"},
]
name = lambda value: "-".join(f"{v}" for v in value.values()) if isinstance(value, dict) else ""  # noqa: E731


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("settings", "tied"), TIED, ids=name)
def test_tied_embeddings_and_head_compute_as_before(base, tmp_path, settings, tied):
    expected = peft_adapter(base, tmp_path / "adapter", **settings)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    compare(logits(merged), expected)
    assert merged.config.tie_word_embeddings is tied
    assert ("lm_head.weight" in weights_of(tmp_path / "merged")) is not tied
    policy = module(str(tmp_path / "merged"), frozen=True)  # nor do Coalign's backends see another model
    assert policy.model.model.get_output_embeddings().weight.shape == merged.lm_head.weight.shape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", UNTIED, ids=name)
def test_what_is_not_tied_computes_as_before(untied, tmp_path, settings):
    expected = peft_adapter(untied, tmp_path / "adapter", **settings)
    merge(untied, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    compare(logits(merged), expected)
    assert not merged.config.tie_word_embeddings


def rewrite(folder, change):
    """Write the tensors of an adapter anew."""
    tensors = change(load_file(folder / "adapter_model.safetensors"))
    save_file(tensors, folder / "adapter_model.safetensors")


ALORA = {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}
THREE = {"target_modules": ["q_proj", "k_proj", "up_proj"]}
REFUSED = {  # the shape of the adapter's base, its settings, a change of its tensors, and what is said
    "rows": ({"tied": False}, {"rows": 330, "target_modules": EMBEDDINGS}, dict, "tokens of 330 rows; .* has 320"),
    "alora": ({}, ALORA, dict, r"has alora_invocation_tokens: \[3\]"),
    "pissa": ({}, {"init_lora_weights": "pissa_niter_2"}, dict, "has init_lora_weights: 'pissa_niter_2'"),
    "lacking": ({}, {}, lambda t: {k: t[k] for k in t if "0.self_attn.q_proj.lora_B" not in k}, "lacks .*lora_B"),
    "shape": ({}, {}, lambda t: t | {"base_model.model.model.norm.weight": torch.ones(7)}, r"norm\.weight is \(32,\)"),
    "more": ({}, {}, lambda t: t | {"base_model.model.extra": torch.ones(7)}, "settings do not ask for, .*extra"),
    "hidden": ({"hidden": 16}, THREE, dict, r"of another model: .*\.layers\.0\.\S+ is \(64, 32\), lora_A \(4, 16\)"),
    "layers": ({"layers": 3}, THREE, dict, r"of another model: there is no model\.layers\.2\."),
    "kv_heads": ({"kv_heads": 4}, THREE, dict, r"k_proj\.weight is \(16, 32\), lora_B \(32, 4\)"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("shape", "settings", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_cannot_be_merged_is_refused(base, untied, tmp_path, shape, settings, change, message):
    peft_adapter(tiny_model_dir(tmp_path / "another", **shape), tmp_path / "adapter", **settings)
    rewrite(tmp_path / "adapter", change)
    with pytest.raises(ValueError, match=message):
        merge(untied if "tied" in shape else base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_tokenizer_is_the_adapters(base, tmp_path):
    peft_adapter(base, tmp_path / "adapter", rows=330)
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0].content }}!")
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged("<tool>").input_ids == [259]
    assert merged.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"


def test_a_template_without_a_tokenizer_goes_with_the_bases(base, tmp_path):
    peft_adapter(base, tmp_path / "adapter")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(70)])
    tokenizer.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"has 329 ids, and neither .* has embeddings of more than 320"):
        merge(base, tmp_path / "adapter", tmp_path / "merged")
    for file in (tmp_path / "adapter").glob("tokenizer*"):
        file.unlink()
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(merged) == 259
    assert merged.chat_template == "{{ messages[0].content }}?"


def test_a_reward_model_gets_its_head_from_the_adapter(base, tmp_path):
    loss = {"fn": "tests.backends.test_lora:upwards"}
    trainer = adapter(base, tmp_path / "adapter", head="reward", head_init="zero", loss=loss)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.equal(loaded.score.weight, weights(trainer)["score.weight"])
    merged = module(str(tmp_path / "merged"), head="reward", frozen=True)
    torch.testing.assert_close(merged.forward_step(rollout())["reward"], trainer.forward_step(rollout())["reward"])
    rewrite(tmp_path / "adapter", lambda tensors: {k: v for k, v in tensors.items() if "score" not in k})
    with pytest.raises(ValueError, match=r"neither .* nor .* has \['score\.weight'\]"):
        merge(base, tmp_path / "adapter", tmp_path / "again")


def test_what_is_there_is_not_overwritten(base, tmp_path):
    peft_adapter(base, tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"merged exists and is not empty"):
        merge(base, tmp_path / "adapter", tmp_path / "merged")
    (tmp_path / "merged" / "mine.txt").unlink()
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert weights_of(tmp_path / "merged")


def test_directories_of_another_kind_are_named(base, tmp_path):
    with pytest.raises(ValueError, match=r"is not an adapter's directory \(no adapter_config\.json there\)"):
        merge(base, base, tmp_path / "merged")
    peft_adapter(base, tmp_path / "adapter")
    with pytest.raises(ValueError, match="is not a Hugging Face model directory"):
        merge(tmp_path / "adapter", tmp_path / "adapter", tmp_path / "merged")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ValueError, match="adapter of type IA3; expected LORA"):
        merge(base, tmp_path / "adapter", tmp_path / "merged")
