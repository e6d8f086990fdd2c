"""Families of remote code against models of transformers that compute the same: the forward passes that are written
down here, and what the families make of their tensors."""

import pytest
import torch

from coalign_megatron import families
from packages.megatron.tests.weight_families import remote
from packages.megatron.tests.weight_families.checkpoints import checkpoint
from packages.megatron.tests.weight_families.parameters import from_hf

TOKENS = torch.arange(12) * 7 % 131
SIZES = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": None}


def as_baichuan(hf, tensors):
    """Llama, but that queries, keys and values are one tensor."""
    found = dict(tensors)
    for i in range(2):
        at = f"model.layers.{i}.self_attn."
        parts = found.pop(f"{at}W_pack.weight").chunk(3)
        found |= {f"{at}{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
    return "llama", {"num_key_value_heads": 4, "rms_norm_eps": hf["rms_norm_eps"]}, found


def rename(tensors, ends, layers, names, packed, sizes):
    """The tensors of a twin: by other names, and queries, keys and values of ``packed`` apart."""
    twins = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    found = {twin: tensors[f"{name}.weight"] for twin, name in zip(twins, ends, strict=True)}
    for i in range(2):
        at, there = f"model.layers.{i}.", f"{layers}.{i}."
        found |= {f"{at}{name}.weight": tensors[f"{there}{other}.weight"] for name, other in names.items()}
        for what in ("weight", "bias"):
            parts = tensors[f"{there}{packed}.{what}"].split(sizes)
            found |= {f"{at}self_attn.{name}_proj.{what}": part for name, part in zip("qkv", parts, strict=True)}
    return found


def as_qwen(hf, tensors):
    """Qwen 2 by other names, but that queries, keys and values are one tensor."""
    names = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj"}
    names |= {"mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1", "mlp.down_proj": "mlp.c_proj"}
    ends = ("transformer.wte", "transformer.ln_f", "lm_head")
    found = rename(tensors, ends, "transformer.h", names, "attn.c_attn", 32)
    return "qwen2", {"num_key_value_heads": 4, "rms_norm_eps": hf["layer_norm_epsilon"]}, found


def as_chatglm(hf, tensors):
    """GLM-4 by other names, but that queries, keys and values are one tensor."""
    names = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
    names |= {"self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h"}
    names |= {"mlp.down_proj": "mlp.dense_4h_to_h"}
    ends = ("embedding.word_embeddings", "encoder.final_layernorm", "output_layer")
    ends, layers = [f"transformer.{name}" for name in ends], "transformer.encoder.layers"
    found = rename(tensors, ends, layers, names, "self_attention.query_key_value", (32, 16, 16))
    return "glm", {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": hf["layernorm_epsilon"]}, found


def baichuan(hf, tensors, tokens):
    return remote.baichuan(hf, tensors, tokens, alibi=False, normalised=False)


TWINS = {
    "baichuan_7b": (as_baichuan, baichuan),
    "qwen": (as_qwen, remote.qwen),
    "chatglm": (as_chatglm, remote.chatglm),
}


@pytest.mark.parametrize("case", TWINS)
def test_the_forward_pass_is_that_of_a_twin_in_transformers(case):
    from transformers import AutoConfig, AutoModelForCausalLM

    hf, tensors = checkpoint(case)
    as_twin, forward = TWINS[case]
    kind, settings, twin = as_twin(hf, tensors)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings), dtype=torch.float32).eval()
    model.load_state_dict(twin)
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
    logits = forward(hf, tensors, TOKENS)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", TWINS)
def test_in_megatron_they_are_their_twins_to_the_bit(case):
    hf, tensors = checkpoint(case)
    kind, settings, twin = TWINS[case][0](hf, tensors)
    other = families.find_family(hf_twin := {"model_type": kind, **SIZES, **settings})
    family = families.find_family(hf)
    mine, theirs = family.parameters(family.config(hf)), other.parameters(other.config(hf_twin))
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        assert torch.equal(from_hf(parameter, tensors), from_hf(theirs[name], twin)), name


def test_what_of_baichuan_is_alibi_and_what_has_a_normalised_head():
    configs = {
        case: families.find_family(checkpoint(case)[0]).config(checkpoint(case)[0])
        for case in ("baichuan_7b", "baichuan_13b", "baichuan2_7b")
    }
    expected = {"baichuan_7b": ("rope", False), "baichuan_13b": ("alibi", False), "baichuan2_7b": ("rope", True)}
    assert {case: (c.position_embedding_type, c.normalised_head) for case, c in configs.items()} == expected


def test_a_normalised_head_does_not_see_the_length_of_its_rows():
    hf, tensors = checkpoint("baichuan_13b")
    logits = remote.baichuan(hf, tensors, TOKENS, alibi=True, normalised=True)
    longer = tensors | {"lm_head.weight": tensors["lm_head.weight"] * 3}
    torch.testing.assert_close(remote.baichuan(hf, longer, TOKENS, alibi=True, normalised=True), logits)


def test_slopes():
    assert remote.slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(remote.slopes(6), torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]))
