"""Every family, there and back."""

import pytest
import torch
from safetensors.torch import load_file

from coalign_megatron import families
from coalign_megatron.convert import ConversionRequest, convert
from coalign_megatron.layouts.megatron import Mesh
from packages.megatron.tests.convert import made
from packages.megatron.tests.weight_families import checkpoints

pytestmark = pytest.mark.backends


def same_model(folder, wanted, hf):
    """What the model reads of a file is as it was: all but rows and copies that nobody reads."""
    found = load_file(folder / "model.safetensors")
    family = families.find_family(hf)
    config = family.config(hf)
    stored = family.stored_names(config, wanted)
    assert found.keys() == stored.keys()
    for name, source in family.sources(config).items():
        assert torch.equal(source.read(found[name]), source.read(wanted[stored[name]])), name


@pytest.mark.parametrize("flavour", ["te", "local"])
@pytest.mark.parametrize("case", checkpoints.CASES)
def test_every_family_goes_there_and_back(tmp_path, case, flavour):
    hf, weights = checkpoints.checkpoint(case)
    source = made.model(tmp_path / "hf", hf, {name: tensor.contiguous() for name, tensor in weights.items()})
    convert(ConversionRequest(source=source, output=tmp_path / "dist", to="megatron", flavour=flavour, verify=True))
    convert(ConversionRequest(source=tmp_path / "dist", output=tmp_path / "back", to="hf", verify=True))
    same_model(tmp_path / "back", weights, hf)


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe"])
def test_experts_and_latent_attention_over_ranks(tmp_path, case, spec):
    hf, _ = checkpoints.checkpoint(case)
    source = made.model(tmp_path / "hf", hf)
    made.legacy(tmp_path / "legacy", hf, mesh=Mesh(2, 2, 2, 2, 2), spec=spec)
    convert(ConversionRequest(source=tmp_path / "legacy", output=tmp_path / "back", to="hf", hf=source, verify=True))
    same_model(tmp_path / "back", load_file(source / "model.safetensors"), hf)
