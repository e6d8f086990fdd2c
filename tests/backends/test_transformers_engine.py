"""The engine on transformers' cache, on architectures that the others refuse, compared with plain Hugging Face. What
every engine does is in tests/conformance/test_engines.py."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coalign import load_config
from coalign.backends.engines.request import Request
from coalign.backends.engines.transformers import TransformersModule, _TransformersModel
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.launch.check import check
from coalign.report.display import Display
from coalign.roles import Context
from coalign.types import Status
from tests.backends.native.helpers import step
from tests.conformance.engines import build, expected_logprobs, load, prompts
from tests.runs import metrics, run, settings
from tests.tiny import tiny_model_dir, tiny_tokenizer

BASE = {"vocab_size": 320, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
SHAPE = BASE | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
OLD = BASE | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8} | {
    f"linear_{key}": number
    for key, number in (("num_value_heads", 4), ("num_key_heads", 2), ("key_head_dim", 8), ("value_head_dim", 8))
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
# (family, its shape, how its rows are batched)
ARCHITECTURES = [
    ("llama", SHAPE, "padded"),
    ("qwen2", SHAPE, "padded"),
    ("gpt2", OLD, "padded"),
    ("gptj", OLD | {"rotary_dim": 4}, "padded"),
    ("codegen", OLD | {"rotary_dim": 4}, "padded"),
    (
        "falcon",
        {key: SHAPE[key] for key in (*BASE, "hidden_size", "num_hidden_layers", "num_attention_heads")},
        "padded",
    ),
    ("bloom", BASE | {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "padded"),
    ("mpt", BASE | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}, "padded"),
    (
        "opt",
        {key: SHAPE[key] for key in (*BASE, "hidden_size", "num_hidden_layers", "num_attention_heads")}
        | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 256, "pad_token_id": 1},
        "padded",
    ),
    (
        "gpt_neo",
        BASE
        | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256},
        "padded",
    ),
    (
        "gemma3_text",
        SHAPE | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        "padded",
    ),
    ("gpt_oss", SHAPE | EXPERTS | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 6}, "padded"),
    ("llama4_text", SHAPE | EXPERTS | {"head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 6}, "padded"),
    ("qwen3_next", SHAPE | EXPERTS | LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 32}, "equal"),
    ("qwen3_5_text", SHAPE | LINEAR, "equal"),
    ("mamba", BASE | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "equal"),
    (
        "mamba2",
        BASE
        | {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
        "equal",
    ),
    ("jamba", SHAPE | {"num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}, "equal"),
    ("bamba", SHAPE | MAMBA2 | {"attn_layer_indices": [1]}, "equal"),
    ("falcon_h1", SHAPE | MAMBA2 | {"mamba_d_ssm": 64}, "equal"),
    ("minimax", SHAPE | EXPERTS | {"num_local_experts": 4, "head_dim": 8}, "equal"),
    (
        "deepseek_v32",
        SHAPE
        | EXPERTS
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "first_k_dense_replace": 1},
        "equal",
    ),
    ("rwkv", BASE | {"hidden_size": 32, "num_hidden_layers": 2, "rescale_every": 1}, "whole"),
    ("recurrent_gemma", SHAPE | {"lru_width": 32, "attention_window_size": 6}, "whole"),
    (
        "openai-gpt",
        {key: value for key, value in OLD.items() if key in ("vocab_size", "n_embd", "n_layer", "n_head")},
        "whole",
    ),
]
QUICK = ("gpt2", "falcon", "gpt_oss", "mamba", "qwen3_next", "openai-gpt")


def make(path, family, **shape):
    """Write a random model, far from uniform, and the tiny tokenizer."""
    tiny_tokenizer(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("family", "shape", "batching"),
    [pytest.param(*case, id=case[0], marks=() if case[0] in QUICK else pytest.mark.backends) for case in ARCHITECTURES],
)
def test_tokens_and_log_probs_are_those_of_hugging_face(tmp_path, family, shape, batching):
    path = make(tmp_path, family, **shape)
    limits = torch.tensor([12, 7, 12, 9])
    settings = {"sampling": {"temperature": 0.7, "max_new_tokens": 12}}
    policy, model = build("transformers", path, transformers={"max_sequences": 5}, **settings), load(path)
    policy.engine.end_tokens = frozenset()
    model.config.rescale_every = 0  # RWKV's forward would divide its weights
    greedy = policy.generate(prompts().with_(max_new_tokens=limits), samples=1, temperature=0.0)
    drawn = policy.generate(prompts().with_(max_new_tokens=limits))
    assert policy.engine.model.batching == batching
    for batch, temperature in ((greedy, 0.0), (drawn, 0.7)):
        assert set(batch["status"].tolist()) == {Status.TRUNCATED}
        met = batch["rollout_logprobs"][batch["loss_mask"]]
        torch.testing.assert_close(met, expected_logprobs(model, batch, temperature), rtol=0, atol=3e-5)
    with torch.no_grad():
        for row in greedy.rows():
            likeliest = model(input_ids=row["tokens"].long()[None], use_cache=False).logits[0, :-1].argmax(-1)
            assert torch.equal(likeliest[row["loss_mask"][1:]], row["tokens"][row["loss_mask"]].long())
    same = dict(model.state_dict())
    assert all(torch.equal(tensor, same[name]) for name, tensor in policy.export_weights())
    if batching != "whole":  # where transformers' own cache is right
        prompt = prompts().slice(3, 4)["tokens"].long()[None]
        told = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=9)
        assert told[0].tolist() == list(greedy.rows())[3]["tokens"].tolist()


def test_a_batching_that_a_model_only_declares_is_replaced(tmp_path, monkeypatch, caplog):
    """Mamba's states cannot be padded."""
    path = make(tmp_path, "mamba", **BASE, hidden_size=32, num_hidden_layers=2, state_size=8)
    monkeypatch.setattr(_TransformersModel, "choose_batching", lambda self: "padded")
    policy = build("transformers", path)
    with caplog.at_level(logging.WARNING):
        policy.generate(prompts())
    assert policy.engine.model.batching == "equal"
    assert "MambaForCausalLM is exact only with `batching: equal`" in caplog.text
    forced = build("transformers", path, transformers={"batching": "padded"})
    with pytest.raises(ValueError, match=r"cannot sample from MambaForCausalLM: .*\(batching: padded\)"):
        forced.generate(prompts())


def test_tokens_that_see_what_follows_are_refused(tmp_path):
    for name, family, more in (
        ("encoder", "bert", {}),
        ("seq2seq", "t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}),
    ):
        path = tmp_path / name
        tiny_tokenizer(path)
        AutoConfig.for_model(family, **{**SHAPE, **more}).save_pretrained(path)
        message = {"bert": "BertLMHeadModel: it is an encoder", "t5": "no causal LM for the model type `t5`"}[family]
        config = ModelConfig(module="transformers", load=str(path))
        with pytest.raises(ValueError, match=message):
            TransformersModule.check_architecture(config, "policy")
        with pytest.raises(ValueError, match=message):
            TransformersModule(config, Context(model="policy")).setup()
    xlm = make(tmp_path / "xlm", "xlm", vocab_size=320, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=256)
    with pytest.raises(ValueError, match="cannot sample from XLMWithLMHeadModel: its logits differ"):
        build("transformers", xlm).generate(prompts())


@pytest.mark.parametrize("batching", ["padded", "whole", pytest.param("equal", marks=pytest.mark.slow)])
def test_few_places_give_the_tokens_of_many(tmp_path, batching):
    path = tiny_model_dir(tmp_path)
    few = {"max_sequences": 2, "prefill_tokens": 16, "batching": batching}
    settings = {"temperature": 1.0, "repetition_penalty": 1.3}
    one, other = build("transformers", path, transformers=few), build("native", path)
    ours, theirs = one.generate(prompts(), **settings), other.generate(prompts(), **settings)
    assert torch.equal(ours["tokens"], theirs["tokens"]) and len(ours) == 12
    torch.testing.assert_close(ours["rollout_logprobs"], theirs["rollout_logprobs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("batching", ["padded", "equal"])
def test_turns_of_a_conversation_are_those_of_one_text(tmp_path, batching):
    """Greedy turns of three conversations that end at different steps; the cache holds two of them."""
    path = tiny_model_dir(tmp_path)
    policy, model = build("transformers", path, transformers={"max_sequences": 2, "batching": batching}), load(path)
    policy.generate(prompts(1))
    texts = {group: prompts().slice(group, group + 1)["tokens"].tolist() for group in range(3)}
    first = {group: len(text) for group, text in texts.items()}
    waiting = []
    with policy.engine.open(SamplingConfig(temperature=0.0, max_new_tokens=4)) as session:
        for turn in range(3):
            for group, text in texts.items():
                request = Request(list(text), group, limit=2 + (group + turn) % 3, first_turn=first[group])
                session.submit(request, lambda place, response, group=group: waiting.append((group, response)))
            step(policy.engine, session)
            for group, response in waiting:
                read, tokens = texts[group], response.tokens.tolist()
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([read + tokens])).logits[0, len(read) - 1 : -1]
                assert logits.argmax(-1).tolist() == tokens and len(tokens) == 2 + (group + turn) % 3
                texts[group] = [*read, *tokens, 7, 8]
            waiting.clear()
    assert len(texts[2]) == first[2] + 3 * 3 + 6 and (session.tokens_kept > 0) == (batching == "padded")


def test_check_names_the_batching(tmp_path, capsys):
    config = settings(tmp_path, "grpo")
    path = make(tmp_path / "mamba", "mamba", **BASE, hidden_size=32, num_hidden_layers=2, state_size=8)
    config["models"]["policy"] |= {"module": "transformers", "load": str(path)}
    config["models"]["trainer"]["load"] = str(tmp_path / "model")
    check(load_config(config | {"loss": {"kl_coef": 0.0}}), Display())
    out = capsys.readouterr().out
    assert "batching: equal" in out and "no problem found" in out


def test_the_curve_of_grpo_is_the_native_engines(tmp_path):
    curves, drawn = [], []
    for module in ("native", "transformers"):
        config = settings(tmp_path, "grpo", steps=3, log_samples=16)
        config["output"] = str(tmp_path / module)
        config["models"]["policy"]["module"] = module
        assert run(config) == 0
        curves.append([line for line in metrics(config) if "reward/mean" in line])
        drawn.append((tmp_path / module / "samples.jsonl").read_text().split("\n")[:16])
    assert len(curves[0]) == 3 and drawn[0] == drawn[1]
    for ours, theirs in zip(*curves, strict=True):
        for name in ("reward/mean", "loss/value", "loss/grad_norm", "tokens/response"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name
