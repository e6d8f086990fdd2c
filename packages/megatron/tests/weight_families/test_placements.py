"""Where numbers lie, by hand: each kind of line and of cut, stages, experts, names; and what is refused."""

import pytest
import torch

from coalign_megatron import families
from coalign_megatron.layouts.megatron import MegatronLayout, Mesh, split_layers
from coalign_megatron.layouts.shards import cut
from packages.megatron.tests.weight_families.parameters import from_hf, join_parts, part, to_hf

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 4, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 4, "vocab_size": 5, "max_position_embeddings": 8}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
BLOOM = {"architectures": ["BloomForCausalLM"], "n_layer": 1, "hidden_size": 4, "n_head": 2, "vocab_size": 5}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 2, "n_embd": 2, "vocab_size": 5, "n_positions": 8}
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
WORDS = "embedding.word_embeddings.weight"


def made(hf, **settings):
    family = families.find_family(hf | settings)
    config = family.config(hf | settings)
    return family, config, family.parameters(config)


def numbers(rows, first=0, columns=4):
    """Row i is full of first + i."""
    return (torch.arange(rows) + float(first))[:, None].expand(rows, columns).clone()


def rows(tensor):
    return [int(row.flatten()[0]) for row in tensor]


def held(hf, rank, *, chunk=0, split=None, spec="local", divisor=4, **mesh):
    """By local names, what a rank holds."""
    family, config, _ = made(hf)
    parameters, mesh = family.parameters(config, vocab_divisor=divisor), Mesh(**mesh)
    layout = MegatronLayout(config, mesh, split or split_layers(config.num_layers, mesh.pipeline), spec)
    return {shard.name: shard for shard in layout.shards(parameters, mesh.at(rank), chunk)}


# ---- kinds of lines and cuts


def test_gate_and_up_are_cut_before_they_are_joined():
    """The trap: a global [gate | up] cut in two gives rank 0 all of the gate, and loads."""
    parameter = made(LLAMA)[2]["decoder.layers.0.mlp.linear_fc1.weight"]
    at = "model.layers.0.mlp."
    full = from_hf(parameter, {f"{at}gate_proj.weight": numbers(4), f"{at}up_proj.weight": numbers(4, 10)})
    assert rows(full) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [rows(part(parameter, full, rank, 2)) for rank in range(2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    naive = full.chunk(2)
    assert not torch.equal(naive[0], part(parameter, full, 0, 2))
    assert not torch.equal(join_parts(parameter, naive), full)
    columns = held(LLAMA, 1, tensor=2)["decoder.layers.0.mlp.linear_fc2.weight"]  # row-parallel
    assert [piece.full for piece in columns.pieces] == [((0, 4), (2, 4))]


def test_queries_keys_and_values_group_by_group():
    parameter = made(LLAMA)[2][QKV]
    at = "model.layers.0.self_attn."
    sources = {"q": numbers(4), "k": numbers(2, 10), "v": numbers(2, 20)}
    full = from_hf(parameter, {f"{at}{name}_proj.weight": tensor for name, tensor in sources.items()})
    assert rows(full) == [0, 1, 10, 20, 2, 3, 11, 21]
    assert rows(part(parameter, full, 1, 2)) == [2, 3, 11, 21]


def test_blocks_of_queries_keys_and_values_are_taken_apart():
    hf = LLAMA | {"architectures": ["BaichuanForCausalLM"], "hidden_size": 4, "num_attention_heads": 2}
    parameter = made(hf)[2][QKV]
    packed = torch.cat([numbers(4), numbers(4, 10), numbers(4, 20)])
    full = from_hf(parameter, {"model.layers.0.self_attn.W_pack.weight": packed})
    assert rows(full) == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    assert torch.equal(to_hf(parameter, full)["model.layers.0.self_attn.W_pack.weight"], packed)


def test_what_is_packed_by_head_already_stays():
    parameter = made(BLOOM)[2][QKV]
    name = "transformer.h.0.self_attention.query_key_value.weight"
    assert rows(from_hf(parameter, {name: numbers(12)})) == list(range(12))


def test_one_key_and_value_over_more_ranks_than_groups_is_a_flat_cut():
    """Megatron gathers what it cut: rank 2 of 4 holds the fourth head's second row, and the key."""
    hf = {"architectures": ["GPTBigCodeForCausalLM"], "n_layer": 1, "n_head": 4, "vocab_size": 5, "n_positions": 8}
    parameter = made(hf, n_embd=8)[2][QKV]
    full = from_hf(parameter, {"transformer.h.0.attn.c_attn.weight": numbers(12, columns=8)})
    assert [rows(part(parameter, full, rank, 4)) for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    MegatronLayout(made(hf, n_embd=8)[1], Mesh(tensor=4), split_layers(1))


def test_a_rank_of_more_than_there_are_groups_may_have_no_queries():
    """Of two queries, a key and a value a group, flat over four ranks: rank 1 has the first group's key and value."""
    shard = held(LLAMA, 1, tensor=4)[QKV]
    at = "model.layers.0.self_attn."
    assert [piece.name for piece in shard.pieces] == [f"{at}k_proj.weight", f"{at}v_proj.weight"]
    sources = {"q": numbers(4), "k": numbers(2, 10), "v": numbers(2, 20)}
    full = {f"{at}{name}_proj.weight": tensor for name, tensor in sources.items()}
    assert rows(dict(cut(full.__getitem__, [shard]))[QKV]) == [10, 20]


def test_weights_that_are_stored_transposed():
    parameters = made(GPT2)[2]
    fc1 = parameters["decoder.layers.0.mlp.linear_fc1.weight"]
    stored = torch.arange(16.0).view(2, 8)  # [in, out]
    full = from_hf(fc1, {"transformer.h.0.mlp.c_fc.weight": stored})
    assert torch.equal(full, stored.T)
    assert rows(part(fc1, full, 1, 2)) == [4, 5, 6, 7]
    assert torch.equal(to_hf(fc1, full)["transformer.h.0.mlp.c_fc.weight"], stored)
    bias = torch.tensor([0.0, 1, 10, 11, 20, 21])  # queries, keys, values of two heads
    qkv = from_hf(parameters[QKV.replace("weight", "bias")], {"transformer.h.0.attn.c_attn.bias": bias})
    assert qkv.tolist() == [0, 10, 20, 1, 11, 21]


def test_rows_of_positions_that_the_model_never_reads():
    hf = LLAMA | {"architectures": ["OPTForCausalLM"], "ffn_dim": 8}
    parameter = made(hf)[2]["embedding.position_embeddings.weight"]
    stored = numbers(10)
    full = from_hf(parameter, {"model.decoder.embed_positions.weight": stored})
    assert rows(full) == [2, 3, 4, 5, 6, 7, 8, 9]
    back = to_hf(parameter, full)["model.decoder.embed_positions.weight"]
    assert rows(back) == [0, 0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_vocabulary_is_padded_at_its_end_and_the_padding_dropped():
    family, config, _ = made(LLAMA)
    parameter = family.parameters(config, vocab_divisor=8)[WORDS]
    full = from_hf(parameter, {"model.embed_tokens.weight": numbers(5, 1)})
    assert rows(full) == [1, 2, 3, 4, 5, 0, 0, 0]
    assert rows(part(parameter, full, 1, 2)) == [5, 0, 0, 0]
    full[5:] = 7.0  # training has moved the padding
    assert rows(to_hf(parameter, full)["model.embed_tokens.weight"]) == [1, 2, 3, 4, 5]


def test_a_bias_of_what_is_cut_by_rows_is_whole():
    kinds = {name: parameter.sharding for name, parameter in made(BLOOM)[2].items()}
    assert kinds["decoder.layers.0.mlp.linear_fc1.bias"] == "column"
    assert kinds["decoder.layers.0.mlp.linear_fc2.weight"] == "row"
    assert kinds["decoder.layers.0.mlp.linear_fc2.bias"] == "replicated"
    assert kinds["embedding.layernorm.bias"] == "replicated"


# ---- stages and experts


def test_tied_embeddings_stand_on_the_first_stage_and_the_last():
    hf = LLAMA | {"tie_word_embeddings": True, "vocab_size": 4}
    first, last = (held(hf, rank, pipeline=2) for rank in range(2))
    assert WORDS in first and "output_layer.weight" not in first
    assert WORDS not in last and last["output_layer.weight"].pieces[0].name == "model.embed_tokens.weight"
    assert "output_layer.weight" not in held(hf, 0)
    assert "word_embeddings_for_head.weight" in held(hf, 1, pipeline=2, spec="legacy")


def test_layers_of_a_stage_count_from_zero():
    names = list(held(LLAMA, 1, pipeline=2))
    assert "decoder.layers.0.mlp.linear_fc2.weight" in names and "decoder.final_layernorm.weight" in names
    assert not any(name.startswith(("decoder.layers.1", "embedding.")) for name in names)
    own = held(LLAMA, 1, pipeline=2)["decoder.layers.0.mlp.linear_fc2.weight"]
    assert own.pieces[0].name == "model.layers.1.mlp.down_proj.weight"


def test_stages_of_several_chunks_and_of_other_sizes():
    assert split_layers(8, 2, 2) == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert split_layers(7, 3, first=2, last=1) == (((0, 1),), ((2, 3, 4, 5),), ((6,),))
    assert split_layers(5, 2, last=2) == (((0, 1, 2),), ((3, 4),))
    names = held(LLAMA | {"num_hidden_layers": 4}, 1, chunk=1, pipeline=2, split=split_layers(4, 2, 2))
    assert names["decoder.layers.0.mlp.linear_fc2.weight"].pieces[0].name == "model.layers.3.mlp.down_proj.weight"


def test_experts_count_from_zero_on_each_rank():
    """Four ranks: tensor-parallel 2 × data 2. Experts are spread over all of them, cut in two."""
    for rank, (experts, half) in enumerate([((0, 1), 0), ((0, 1), 1), ((2, 3), 0), ((2, 3), 1)]):
        own = held(MIXTRAL, rank, tensor=2, data=2, expert=2, expert_tensor=2, spec="te")
        for i, expert in enumerate(experts):
            shard = own[f"decoder.layers.0.mlp.experts.linear_fc1.weight{i}"]
            w = f"model.layers.0.block_sparse_moe.experts.{expert}."
            assert [piece.name for piece in shard.pieces] == [w + "w1.weight", w + "w3.weight"]
            assert shard.shape == (4, 4)
            assert [piece.full[0] for piece in shard.pieces] == [(2 * half, 2 * half + 2)] * 2
        assert "decoder.layers.0.mlp.experts.linear_fc1.weight2" not in own
        assert own["decoder.layers.0.mlp.router.weight"].shape == (4, 4)


def test_experts_are_not_cut_by_tensor_parallelism():
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    shard = held(MIXTRAL, 1, tensor=2, data=1, expert=2)[name]
    assert shard.shape == (4, 4) and shard.pieces[0].name == "model.layers.0.block_sparse_moe.experts.3.w2.weight"


# ---- names

V3 = LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 4, "kv_lora_rank": 4, "v_head_dim": 2}
V3 |= {"qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "n_routed_experts": 2, "n_shared_experts": 1, "n_group": 1}
V3 |= {"num_experts_per_tok": 1, "moe_intermediate_size": 4, "first_k_dense_replace": 1, "topk_group": 1}


def test_transformer_engine_has_norms_in_the_layers_they_feed():
    own = held(LLAMA, 0, spec="te")
    norm = own["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"]
    assert norm.like == "model.layers.0.input_layernorm.weight"
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in own
    assert not any("input_layernorm" in name or "pre_mlp" in name for name in own)
    own = held(MIXTRAL, 0, spec="te")
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in own  # it feeds the router, too


def test_latent_attention_is_whole_in_transformer_engine_and_cut_in_the_local_spec():
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    local, te = (held(V3, 0, tensor=2, data=1, spec=spec) for spec in ("local", "te"))
    assert local[name].shape == (3, 4) and te[name].shape == (6, 4)
    assert "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight" in te
    assert "decoder.layers.0.input_layernorm.weight" in te
    bias = made(V3)[2]["decoder.layers.1.mlp.router.expert_bias"]
    stored = {"model.layers.1.mlp.gate.e_score_correction_bias": torch.ones(2).bfloat16()}
    assert from_hf(bias, stored).dtype == torch.float32


def test_names_before_core():
    assert set(held(LLAMA | {"num_hidden_layers": 1}, 0, spec="legacy")) == {
        "language_model.embedding.word_embeddings.weight",
        "language_model.encoder.layers.0.input_layernorm.weight",
        "language_model.encoder.layers.0.self_attention.query_key_value.weight",
        "language_model.encoder.layers.0.self_attention.dense.weight",
        "language_model.encoder.layers.0.post_attention_layernorm.weight",
        "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
        "language_model.encoder.layers.0.mlp.dense_4h_to_h.weight",
        "language_model.encoder.final_layernorm.weight",
        "language_model.output_layer.weight",
    }


def test_checkpoints_without_a_prefix_with_buffers_and_with_a_copy_of_the_head():
    family, config, _ = made(GPT2)
    names = list(family.sources(config))
    bare = [name.removeprefix("transformer.") for name in names]
    assert family.stored_names(config, [*bare, "h.0.attn.bias"]) == dict(zip(names, bare, strict=True))
    assert family.stored_names(config, [*names, "lm_head.weight"]) == dict(zip(names, names, strict=True))


def test_old_and_new_words_for_rotary_embeddings():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = made(LLAMA, rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **scaling})[1]
    new = made(LLAMA, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling})[1]
    assert old == new and old.rotary_base == 500000.0 and old.rope_scaling.factor == 8.0


# ---- what is refused


def lay(hf, stages=None, **mesh):
    return MegatronLayout(made(hf)[1], Mesh(**mesh), stages or split_layers(2))


def name_without_output_layers():
    family, config, _ = made(LLAMA)
    names = [name for name in family.sources(config) if "o_proj" not in name]
    family.stored_names(config, [*names, "model.x"])


TWELVE = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 12}
REFUSED = {
    "architecture": (lambda: families.find_family({"architectures": ["LlamaForCausaLM"]}),
                     r"for 'LlamaForCausaLM'; known are LlamaForCausalLM, "),
    "model type": (lambda: families.find_family({"model_type": "qwen4"}), r"for 'qwen4'; known are qwen"),
    "missing key": (lambda: made(LLAMA, vocab_size=None), r"'vocab_size' is missing"),
    "bias": (lambda: made(LLAMA, attention_bias=True), r"'attention_bias' is True; .* has False"),
    "activation": (lambda: made(LLAMA, hidden_act="mish"), r"'hidden_act' is 'mish'; Megatron has \["),
    "rope": (lambda: made(LLAMA, rope_scaling={"rope_type": "longrope"}), r"rope scaling is 'longrope'; known are"),
    "missing and extra tensors": (name_without_output_layers,
                                  r"missing \['model.layers.0.self_attn.o_proj.weight', .*1.* extra \['model.x'\]"),
    "shape": (lambda: from_hf(made(LLAMA)[2][WORDS], {"model.embed_tokens.weight": numbers(6)}),
              r"'model.embed_tokens.weight' .* \(6, 4\), the configuration says \(5, 4\)"),
    "heads": (lambda: lay(LLAMA, tensor=3), r"num_attention_heads 4 does not divide by 3 ranks"),
    "mlp": (lambda: lay(LLAMA | {"intermediate_size": 6}, tensor=4), r"ffn_hidden_size 6 does not divide by 4 ranks"),
    "experts": (lambda: lay(MIXTRAL, data=3, expert=3), r"num_moe_experts 4 does not divide by 3 ranks"),
    "groups": (lambda: lay(LLAMA | TWELVE, tensor=4),
               r"num_query_groups 3 is neither a multiple nor a divisor of 4 ranks"),
    "layers": (lambda: split_layers(7, 2), r"7 layers do not divide by 2 stages × 1 chunks"),
    "order of layers": (lambda: lay(LLAMA, (((1,),), ((0,),)), pipeline=2),
                        r"stages have the layers \[1, 0\] in this order; the model has 2"),
    "stages": (lambda: lay(LLAMA, pipeline=2), r"2 stages of as many chunks each"),
    "vocabulary": (lambda: held(LLAMA, 0, divisor=1, tensor=2),
                   r"'embedding.word_embeddings.weight' \[5, 4\]: 5 .* do not divide by 2 ranks"),
    "experts before core": (lambda: held(MIXTRAL, 0, spec="legacy"),
                            r"'decoder.layers.0.mlp.router.weight' has no name in Megatron-LM before core"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
