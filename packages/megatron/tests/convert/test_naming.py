"""Where parameters lie in torch_dist files, by hand."""

import pytest

from coalign_megatron.convert.torch_dist import TorchDistNaming, has_stacked_layers
from packages.megatron.tests.weight_families.test_placements import LLAMA, MIXTRAL, V3
from packages.megatron.tests.weight_families.test_placements import made as rules


def places(hf, flavour="local"):
    """Of each key, the whole tensor's shape and where each parameter lies in it."""
    _, config, parameters = rules(hf)
    found = {}
    for name, parameter in parameters.items():
        place = TorchDistNaming(flavour, has_stacked_layers(config)).place(parameter, config)
        found.setdefault(place.key, ((*place.stacked, *parameter.shape), {}))[1][name] = place.index
    return found


def test_files_have_layers_and_experts_stacked():
    found = places(LLAMA)
    assert found["embedding.word_embeddings.weight"][0] == (5, 4)
    assert found["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][0] == (2, 4)
    shape, inside = found["decoder.layers.self_attention.linear_qkv.weight"]
    assert shape == (2, 8, 4)
    assert inside == {f"decoder.layers.{i}.self_attention.linear_qkv.weight": (i,) for i in range(2)}
    shape, inside = places(MIXTRAL)["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert shape == (2, 4, 8, 4)
    assert inside["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"] == (1, 2) and len(inside) == 8


@pytest.mark.parametrize(
    ("flavour", "norm"), [("local", "mlp.linear_fc1.layer_norm_weight"), ("te", "pre_mlp_layernorm.weight")]
)
def test_the_norm_before_experts_has_another_name_in_each_spec(flavour, norm):
    assert f"decoder.layers.{norm}" in places(MIXTRAL, flavour)


def test_files_of_layers_that_differ_have_them_one_by_one():
    found = places(V3)
    assert found["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"][0] == (2, 4, 4)
    assert found["decoder.layers.0.mlp.linear_fc2.weight"][0] == (4, 4)
    assert "decoder.layers.0.self_attention.kv_layernorm.weight" in found
