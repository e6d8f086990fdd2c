"""Sizes read from configurations alone: against transformers' own classes on the meta device, and published totals."""

import json

import pytest

from coalign_plan.hf_config import read_directory, read_model_size
from packages.plan.tests.shapes import BENCHMARKS

MODELS = json.loads((BENCHMARKS / "data/planner/models.json").read_text(encoding="utf-8"))["models"]

# Parameters in 1e9, as the model cards publish them: of all weights; and of those that are active.
DENSE = {"Qwen2.5-0.5B": 0.49, "Qwen2.5-7B": 7.6, "Qwen2.5-72B": 72.7, "Qwen3-0.6B": 0.6, "Llama-3.1-8B": 8.03}
DENSE |= {"Llama-3.1-70B": 70.6, "Llama-3.1-405B": 405.9, "Gemma-2-9B": 9.24, "Gemma-3-27B": 27.0}
DENSE |= {"Nemotron-H-8B": 8.1, "Phi-4": 14.7}
PUBLISHED = {name: (total, total) for name, total in DENSE.items()}
PUBLISHED |= {"Qwen3-30B-A3B": (30.5, 3.3), "Qwen3-235B-A22B": (235, 22), "Qwen3-Coder-480B-A35B": (480, 35)}
PUBLISHED |= {"Qwen3-Next-80B-A3B": (80, 3.9), "Llama-4-Scout": (108, 17.2), "Llama-4-Maverick": (401, 17.2)}
PUBLISHED |= {"Mixtral-8x7B": (46.7, 12.9), "Mixtral-8x22B": (140.6, 39.1), "DeepSeek-V3": (671, 37.5)}
PUBLISHED |= {"DeepSeek-V2-Lite": (15.7, 2.7), "Kimi-K2": (1026, 32.6), "GLM-4.5": (353, 33.6)}
PUBLISHED |= {"GPT-OSS-120B": (116.8, 5.7), "GPT-OSS-20B": (20.9, 4.2), "Nemotron-3-Nano-30B-A3B": (31.6, 3.6)}
PUBLISHED |= {"MiniMax-M2": (229, 11)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_those_published(name):
    size = read_model_size(MODELS[name], name)
    total, active = PUBLISHED[name]
    assert size.parameters == pytest.approx(total * 1e9, rel=0.015)
    assert size.active_parameters == pytest.approx(active * 1e9, rel=0.025)
    assert sum(size.parameters_by_kind().values()) == size.parameters


FAMILIES = [
    *("GPT2", "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3Text", "Phi3", "Starcoder2", "GPTNeoX", "Mixtral"),
    *("Qwen2Moe", "Qwen3Moe", "Qwen3Next", "DeepseekV3", "GptOss", "Glm4Moe", "Jamba", "Bamba", "NemotronH", "MiniMax"),
    *("KimiLinear", "Lfm2", "Mamba2", "FalconMamba"),
]


def make_config(family):
    """The configuration that transformers has for a family, or that of a small model whose head is tied."""
    import transformers

    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512}
    if family == "tied":
        return transformers.LlamaConfig(**small, tie_word_embeddings=True)
    return getattr(transformers, f"{family}Config")(**({"num_hidden_layers": 4} if "Mamba" in family else {}))


@pytest.mark.slow
def test_counts_are_those_of_transformers():
    """Norms and biases are left out; they are below two thousandths of every real model."""
    import torch
    from transformers import AutoModelForCausalLM

    for family in [*FAMILIES, "tied"]:
        config = make_config(family)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counted = sum(weight.numel() for weight in model.parameters())
        for source in (config, config.to_dict()):
            size = read_model_size(source)
            allowed = 0.01 if family == "tied" else 0.002
            assert size.parameters == pytest.approx(counted, rel=allowed), family


@pytest.mark.slow
def test_towers_are_counted():
    import torch
    from transformers import AutoModelForImageTextToText, Gemma3Config, Qwen2_5_VLConfig, Qwen3VLConfig

    for config in (Qwen2_5_VLConfig(), Qwen3VLConfig(), Gemma3Config(vision_config={"vision_use_head": False})):
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        size = read_model_size(config)
        parts = ("vision", "visual", "multi_modal")
        counted = sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in parts))
        assert size.parameters_by_kind()["vision_tower"] == pytest.approx(counted, rel=0.02)
        assert size.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.005)


def test_hand_worked_sizes():
    """Two layers of width 8, two heads of which one has keys, an MLP of width 16, 10 tokens, head apart."""
    size = read_model_size(
        dict(model_type="llama", hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             intermediate_size=16, vocab_size=10, tie_word_embeddings=False)
    )  # fmt: skip
    parameters = {kind: count for kind, count in size.parameters_by_kind().items() if count}
    assert parameters == {"embedding": 80, "attention": 2 * (64 + 32 + 32 + 64), "mlp": 2 * 3 * 128, "head": 80}
    # Products: 2 x (384 + 768 + 80); scores and their use: 2 layers x 2 heads x 2 x (4 + 4) FLOPs a token of context.
    assert size.forward_flops(100) == 2 * (384 + 768 + 80) + 2 * 2 * 2 * 8 * 50
    assert size.kv_bytes(10, 2) == 2 * 2 * 4 * 10 * 2
    # Adapters: (in + out) of queries, keys, values, output, and of the three matrices of the MLP.
    assert size.lora_parameters(4) == 4 * 2 * (16 + 12 + 12 + 16 + 3 * 24)


def test_cache_of_windows_and_states_does_not_grow():
    gemma = read_model_size(MODELS["Gemma-3-27B"])
    full = sum(layer.count * layer.cache for layer in gemma.layers if not layer.window)
    assert gemma.cache_numbers(20000) - gemma.cache_numbers(10000) == full * 10000
    hybrid = read_model_size(MODELS["Nemotron-H-8B"])
    assert hybrid.kv_bytes(1) > 100 * (hybrid.kv_bytes(2) - hybrid.kv_bytes(1))  # states dominate a short sequence
    latent = read_model_size(MODELS["DeepSeek-V3"])
    assert latent.kv_bytes(1) == 61 * (512 + 64) * 2


def test_a_configuration_may_be_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5-7B"]))
    assert read_directory(tmp_path).parameters == read_model_size(MODELS["Qwen2.5-7B"]).parameters


def test_a_missing_size_is_named():
    with pytest.raises(ValueError, match="hidden_size"):
        read_model_size({"model_type": "llama", "vocab_size": 10})
    with pytest.raises(ValueError, match="encoder-decoder"):
        read_model_size({"is_encoder_decoder": True, "d_model": 8, "vocab_size": 10})
    with pytest.raises(ValueError, match="retention"):
        read_model_size(MODELS["Qwen2.5-7B"] | {"layer_types": ["retention"]})
