"""Ids of a padded vocabulary that stand for no token: nothing samples them, and nothing gives them a probability."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coalign import generate
from coalign.backends import pretrained
from coalign.backends.engines.native.native_engine import NativeModule
from coalign.backends.engines.transformers import TransformersModule
from coalign.backends.hf.fsdp import FSDPModule
from coalign.backends.hf.heads import LanguageModelHead
from coalign.backends.packing import pack
from coalign.config.schema import ModelConfig, SamplingConfig
from coalign.data.batch import Batch
from coalign.roles import Context
from coalign_serve.chat import ChatSession, ChatSettings
from coalign_vllm.module import VLLMModule
from tests.backends.batches import prompts
from tests.runs import run
from tests.tiny import tiny_model_dir, tiny_tokenizer

TOKENS = 259  # ids with a token
ENGINES = {"native": NativeModule, "transformers": TransformersModule}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose rows of padding are by far the likeliest."""
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=1, vocab=320, tied=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] *= 20
    model.save_pretrained(path)
    return str(path)


def make(kind, path, **config):
    module = kind(ModelConfig(load=path, **config), Context(samples_per_prompt=4, tokens_only=True))
    module.setup()
    return module


def sample(module, **options):
    return module.generate(prompts(3, 4), max_new_tokens=16, **options)


def is_said(batch):
    return bool((batch["tokens"][batch["loss_mask"]] < TOKENS).all())


def test_what_has_no_token(path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert pretrained._list_tokenless_ids(tokenizer, 320) == [*range(TOKENS, 320)]
    assert pretrained._list_tokenless_ids(tiny_tokenizer(), TOKENS) == []
    tokenizer.add_tokens(["<tool>"])
    assert pretrained._list_tokenless_ids(tokenizer, 300) == [*range(TOKENS + 1, 300)]


def test_gaps_have_no_token_and_repeated_texts_have_one():
    texts = ["<unk>", "a", None, "a"]  # the last is not in the vocabulary by its text

    class Vocabulary:
        unk_token, added_tokens_decoder = "<unk>", {0: "<unk>"}

        def get_vocab(self):
            return {"<unk>": 0, "a": 1}

        def convert_ids_to_tokens(self, number):
            return texts[number] if number < 4 else "<unk>" if number == 4 else [][number]

    assert pretrained._list_tokenless_ids(Vocabulary(), 7) == [2, 4, 5, 6]


@pytest.mark.parametrize(("engine", "temperature"), [("native", 0.6), ("native", 0.0), ("transformers", 1.0)])
def test_nothing_else_is_sampled_and_the_trainer_agrees(path, engine, temperature):
    sampling = {"temperature": temperature}
    batch = sample(make(ENGINES[engine], path, module=engine, sampling=sampling))
    assert is_said(batch)
    trainer = make(FSDPModule, path, sampling=sampling)
    found = trainer.forward_step(batch, into="old_logprobs")["old_logprobs"]
    if temperature:
        torch.testing.assert_close(found, batch["rollout_logprobs"], rtol=0, atol=1e-5)
    assert found.isfinite().all() and found[batch["loss_mask"]].min() > -20


def test_an_engine_samples_as_plain_torch_without_them_and_only_if_asked(path):
    batch = sample(make(NativeModule, path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    row = next(iter(batch.rows()))
    with torch.no_grad():
        logits = model(input_ids=row["tokens"].long()[None]).logits[0, :-1]
    logits[:, TOKENS:] = -torch.inf
    chosen = logits.log_softmax(-1).gather(1, row["tokens"][1:, None].long())[:, 0] * row["loss_mask"][1:]
    torch.testing.assert_close(row["rollout_logprobs"][1:], chosen, rtol=0, atol=1e-5)
    module = NativeModule(ModelConfig(load=path), Context(samples_per_prompt=4))
    module.setup()
    assert not is_said(sample(module))


@pytest.mark.parametrize("needs", [("entropy",), ("collision",), ("top",)])
@pytest.mark.parametrize("forbidden", [[17, 18, 19], [3, 19]])
def test_the_head_computes_as_if_they_were_not_there(needs, forbidden):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8), torch.randn(20, 8, requires_grad=True)
    kept = [i for i in range(20) if i not in forbidden]
    tokens = torch.tensor([0, 1, 2, 4, 6, 7])
    layout = pack(Batch(torch.tensor([6]), {"tokens": tokens.int()}))
    head, plain = LanguageModelHead(top=4), LanguageModelHead(top=4)
    head.forbid(forbidden, 20)
    found = head(hidden, weight, layout, needs)
    log = (hidden @ weight[kept].T).log_softmax(-1)
    if "top" in needs:
        values, places = log.topk(4)
        assert torch.equal(found["candidates"], torch.tensor(kept)[places])
        torch.testing.assert_close(found["teacher_logprobs"], values)
        return
    target = torch.tensor([kept.index(int(t)) for t in tokens[1:]])
    torch.testing.assert_close(found["logprobs"], log.gather(1, target[:, None])[:, 0])
    expected = {"entropy": -(log.exp() * log).sum(1), "collision": (2 * log).logsumexp(1)}
    torch.testing.assert_close(found[needs[0]], expected[needs[0]])
    (ours,) = torch.autograd.grad(found["logprobs"].sum(), weight)
    (theirs,) = torch.autograd.grad(log.gather(1, target[:, None]).sum(), weight)
    torch.testing.assert_close(ours, theirs)
    assert not ours[forbidden].any() and plain.vocabulary is None


def test_a_bound_on_logits_bears_padding_and_no_gap():
    head = LanguageModelHead(softcap=3.0)
    head.forbid([18, 19], 20)
    with pytest.raises(NotImplementedError, match=r"bounds its logits.*\[3\]"):
        head.forbid([3, 19], 20)


def test_a_run_and_what_its_model_says(path, tmp_path, monkeypatch):
    rows = "".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    config = {
        "algorithm": "grpo",
        "output": str(tmp_path / "out"),
        "data": {"train": str(tmp_path / "rows.jsonl"), "chat_template": "none"},
        "reward": "contains",
        "models": {
            "policy": {"load": path, "num_gpu": 0, "sampling": {"max_new_tokens": 8}},
            "trainer": {"num_gpu": 0},
            "reference": {"num_gpu": 0},
        },
        "loss": {"fn": "policy_gradient", "kl_coef": 0.1},
        "runtime": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2},
    }
    learned, train = [], FSDPModule.train_step
    note = lambda self, batch, **options: learned.append(batch) or train(self, batch, **options)  # noqa: E731
    monkeypatch.setattr(FSDPModule, "train_step", note)
    assert run(config) == 0
    assert len(learned) == 2 and all(map(is_said, learned))
    first = learned[0]
    for column in ("old_logprobs", "ref_logprobs"):
        if column in first:
            torch.testing.assert_close(first[column], first["rollout_logprobs"], rtol=0, atol=1e-5)
    assert "ref_logprobs" in first
    [record, *_] = generate(str(tmp_path / "out"), ["1"], max_new_tokens=8, quiet=True)
    assert record["status"] in ("ok", "truncated")


def test_chat_says_tokens_alone(path, monkeypatch):
    conversation = ChatSession(ChatSettings(path, SamplingConfig(max_new_tokens=12)))
    said, answer = [], conversation._module.generate
    monkeypatch.setattr(conversation._module, "generate", lambda *a, **o: said.append(answer(*a, **o)))
    conversation.answer("Hi", lambda text: None)
    assert is_said(said[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_says_tokens_alone_too(tmp_path):
    pytest.importorskip("vllm")
    from tests.conformance.engines import SMALL, model_dir

    path = model_dir(tmp_path / "model")
    tiny_tokenizer(path)
    config = ModelConfig(module="vllm", load=str(path), vllm={**SMALL, "additional_config": {"own": 1}})
    module = VLLMModule(config, Context(samples_per_prompt=4, tokens_only=True))
    module.setup()
    batch = sample(module)
    assert is_said(batch)
    trainer = make(FSDPModule, str(path))
    found = trainer.forward_step(batch, into="old_logprobs")["old_logprobs"]
    torch.testing.assert_close(found, batch["rollout_logprobs"], rtol=0, atol=1e-4)
    module.close()
