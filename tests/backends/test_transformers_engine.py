"""The engine on transformers' cache, on architectures that the others refuse, compared with plain Hugging Face. What
every engine does is in tests/conformance/test_engines.py."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoConfig

from coalign import load_config
from coalign.backends.engines.request import Request
from coalign.backends.engines.transformers import TransformersModule, _TransformersModel
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.launch.check import check
from coalign.report.display import Display
from coalign.roles import Context
from coalign.types import Status
from tests.backends.architectures import find_shape, make
from tests.backends.native.helpers import step
from tests.conformance.engines import build, expected_logprobs, load, prompts
from tests.runs import metrics, run, settings
from tests.tiny import tiny_model_dir, tiny_tokenizer

# (family, its shape, how its rows are batched)


# How rows of a family are batched. All other families, greedily: test_architectures.py.
BATCHING = {
    **{"gpt2": "padded", "falcon": "padded", "gpt_oss": "padded"},
    **{"mamba": "equal", "qwen3_next": "equal", "openai-gpt": "whole"},
}


@pytest.mark.parametrize(("family", "batching"), BATCHING.items(), ids=BATCHING)
def test_tokens_and_log_probs_are_those_of_hugging_face(tmp_path, family, batching):
    path = make(tmp_path, family, **find_shape(family) | {"eos_token_id": None})
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
    path = make(tmp_path, "mamba")
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
    for family, message in (
        ("bert", "BertLMHeadModel: it is an encoder"),
        ("t5", "no causal LM for the model type `t5`"),
    ):
        path = tmp_path / family
        tiny_tokenizer(path)
        AutoConfig.for_model(family, **find_shape(family)).save_pretrained(path)
        config = ModelConfig(module="transformers", load=str(path))
        with pytest.raises(ValueError, match=message):
            TransformersModule.check_architecture(config, "policy")
        with pytest.raises(ValueError, match=message):
            TransformersModule(config, Context(model="policy")).setup()
    xlm = make(tmp_path / "xlm", "xlm")
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
    path = make(tmp_path / "mamba", "mamba")
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
