"""The tiny models that every other test stands on are what they say."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_model_dir, tiny_tokenizer


def test_tokenizer_round_trips_and_knows_chatml():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("héllo wörld\n")["input_ids"]
    assert tokenizer.decode(ids) == "héllo wörld\n" and len(ids) == len("héllo wörld\n".encode())
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.pad_token is None and tokenizer.eos_token_id == 258


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_model_dir_loads_and_is_deterministic(tmp_path, family, tied):
    state = torch.get_rng_state()
    for name in "ab":
        tiny_model_dir(tmp_path / name, family=family, tied=tied, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / n).state_dict() for n in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert torch.equal(a["lm_head.weight"], a["model.embed_tokens.weight"]) is tied
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == 259


def test_too_small_vocab_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab=100"):
        tiny_model_dir(tmp_path, vocab=100)
