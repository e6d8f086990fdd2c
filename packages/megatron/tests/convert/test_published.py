"""DeepSeek V3 as it is published: weights of 8 bits with scales, and a layer that predicts further tokens."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from coalign_megatron.convert import ConversionRequest, convert, huggingface
from packages.megatron.tests.convert import made
from packages.megatron.tests.weight_families.test_placements import V3

SIZES = {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 160, "moe_intermediate_size": 16}
HF = V3 | SIZES | {"model_type": "deepseek_v3", "vocab_size": 300, "torch_dtype": "bfloat16"}
PUBLISHED = HF | {
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
GATE = "model.layers.0.mlp.gate_proj.weight"  # [160, 144]: four blocks, three of them not full


def test_each_block_has_its_scale():
    weight = torch.ones(130, 129)
    weight[0, 0] = 3.0
    found = huggingface.read_fp8("x", weight.to(torch.float8_e4m3fn), torch.tensor([[2.0, 5.0], [7.0, 11.0]]))
    assert found.dtype == torch.bfloat16
    assert [found[i, j].item() for i, j in ((0, 0), (127, 127), (127, 128), (128, 127), (129, 128))] == [6, 2, 5, 7, 11]
    with pytest.raises(ValueError, match=r"'x_scale_inv' has the shape \[1, 2\]; 'x' \[130, 129\] .* has \[2, 2\]"):
        huggingface.read_fp8("x", weight.to(torch.float8_e4m3fn), torch.ones(1, 2))


@pytest.fixture
def published(tmp_path):
    """A directory, and what its tensors mean in bfloat16."""
    meant = {name: tensor.bfloat16() for name, tensor in made.tensors(HF).items()}
    generator = torch.Generator().manual_seed(1)
    stored = {}
    for name, tensor in meant.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        small = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
        stored |= {name: small, f"{name}_scale_inv": scales}
        every = torch.kron(scales, torch.ones(128, 128))[:rows, :columns]
        meant[name] = (small.float() * every).bfloat16()
    stored |= {"model.layers.2.eh_proj.weight": torch.zeros(4, 8), "model.layers.2.mlp.gate.weight": torch.zeros(2, 4)}
    return made.model(tmp_path / "published", PUBLISHED, stored), meant


def test_they_are_converted_as_bfloat16_and_without_the_layer_that_is_named(tmp_path, published):
    source, meant = published
    asked = ConversionRequest(source=source, output=tmp_path / "dist", to="megatron", verify=True, without_mtp=True)
    report = convert(asked)
    assert report.left_out == ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight")
    assert report.verified == len(meant)
    convert(ConversionRequest(source=tmp_path / "dist", output=tmp_path / "back", to="hf"))
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert found[name].dtype == tensor.dtype or "correction" in name
        assert torch.equal(found[name].to(tensor.dtype), tensor), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == HF | {"num_nextn_predict_layers": 0}
    manifest = json.loads((tmp_path / "dist" / "coalign_convert.json").read_text())
    assert manifest["source"]["left_out"] == list(report.left_out)


def refused(tmp_path, source, match):
    with pytest.raises(ValueError, match=match):
        convert(ConversionRequest(source=source, output=tmp_path / "dist", to="megatron"))
    assert not list(tmp_path.glob("dist*"))


def test_the_layer_is_not_left_out_unasked(tmp_path, published):
    refused(tmp_path, published[0], r"2 tensors \(model\.layers\.2\.eh_proj\.weight …\).*--without-mtp")


def test_eight_bits_without_scales_and_other_quantisations(tmp_path, published):
    source, _ = published
    tensors = load_file(source / "model.safetensors")
    del tensors[f"{GATE}_scale_inv"]
    save_file({name: tensors[name] for name in tensors if "layers.2" not in name}, source / "model.safetensors")
    refused(tmp_path, source, rf"'{GATE}' is torch\.float8_e4m3fn, but there is no '{GATE}_scale_inv'")
    (source / "config.json").write_text(json.dumps(HF | {"quantization_config": {"quant_method": "awq"}}))
    refused(tmp_path, source, r"'quantization_config' is \{'quant_method': 'awq'\}; what can be read")
