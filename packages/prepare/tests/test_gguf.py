"""GGUF files as models."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coalign.hub import fetch, find_directory
from tests.tiny import CHATML, SPECIAL, _byte_level

gguf = pytest.importorskip("gguf")


def write_gguf(path, *, architecture="llama", quantised=True):
    """Write a llama of one layer with matrices of 8 bits; returns {name: what its numbers stand for}."""
    generator = np.random.default_rng(0)
    hidden, vocabulary, intermediate = 64, 260, 96
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    alphabet = sorted(json.loads(_byte_level())["model"]["vocab"].items(), key=lambda pair: pair[1])
    tokens = [token for token, _ in alphabet] + ["ab", *SPECIAL]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(alphabet) + 1) + [3] * len(SPECIAL))
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(259)
    writer.add_bos_token_id(257)
    writer.add_chat_template(CHATML)
    shapes = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    shapes |= {f"blk.0.{name}_norm.weight": (hidden,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}.weight": (hidden, hidden) for name in ("q", "output")}
    shapes |= {f"blk.0.attn_{name}.weight": (hidden // 2, hidden) for name in "kv"}
    shapes |= {f"blk.0.ffn_{name}.weight": (intermediate, hidden) for name in ("gate", "up")}
    shapes["blk.0.ffn_down.weight"] = (hidden, intermediate)
    meant = {}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape).astype(np.float32) / 8
        if len(shape) == 2 and quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            stored = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
            values = gguf.quants.dequantize(stored, kind)
        else:
            writer.add_tensor(name, values)
        meant[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("COALIGN_CACHE", str(tmp_path / "cache"))


def test_a_file_becomes_a_directory_once(cache, tmp_path):
    file = tmp_path / "tiny.gguf"
    meant = write_gguf(str(file))
    directory = fetch(str(file), weights=False)
    assert not list(directory.glob("*.safetensors"))
    assert fetch(str(file)) == directory == find_directory(str(file))
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert fetch(str(file)) == directory and (directory / "model.safetensors").stat().st_mtime_ns == before
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights = {
        "token_embd": model.model.embed_tokens.weight,
        "blk.0.ffn_down": model.model.layers[0].mlp.down_proj.weight,
    }
    for name, weight in weights.items():
        torch.testing.assert_close(weight.data, torch.tensor(meant[f"{name}.weight"]))
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids).logits, read(ids).logits, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template and tokenizer.decode(tokenizer("a b").input_ids) == "a b"


def test_an_architecture_that_nobody_knows_is_named(cache, tmp_path):
    write_gguf(str(tmp_path / "odd.gguf"), architecture="nobodys")
    with pytest.raises(ValueError, match=r"odd\.gguf cannot be converted: .*nobodys.* can be loaded in its place"):
        fetch(str(tmp_path / "odd.gguf"))


@pytest.mark.parametrize("content", [b"GGUF" + b"\1" * 40, b"GGUF", b""], ids=["broken", "cut", "empty"])
def test_a_damaged_file_is_named(cache, tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.gguf cannot be converted"):
        fetch(str(tmp_path / "bad.gguf"))
