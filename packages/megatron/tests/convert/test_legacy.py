import pytest
import torch
from safetensors.torch import load_file

from coalign.weights.sync.transport import WeightError
from coalign_megatron.convert import ConversionRequest, convert
from coalign_megatron.layouts.megatron import Mesh
from packages.megatron.tests.convert import made


def back(tmp_path, hf, **options):
    source = made.model(tmp_path / "hf", hf)
    request = ConversionRequest(source=tmp_path / "legacy", output=tmp_path / "back", to="hf", hf=source, **options)
    assert convert(request).source == "legacy"
    found, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / "back", source))
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("spec", ["local", "te", "legacy"])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "virtual"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]
)
@pytest.mark.parametrize("hf", [made.LLAMA, made.QWEN2], ids=["llama", "tied"])
def test_any_layout_and_all_names(tmp_path, hf, tensor, pipeline, virtual, spec):
    mesh = Mesh(tensor, pipeline)
    made.legacy(tmp_path / "legacy", hf, mesh=mesh, virtual=virtual, spec=spec, nested=spec == "legacy")
    back(tmp_path, hf, verify=True)


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("mesh", [Mesh(1, 1, 2, 2, 1), Mesh(2, 2, 2, 2, 2)], ids=["ep2", "tp2 pp2 ep2"])
def test_experts_over_ranks(tmp_path, mesh, spec):
    made.legacy(tmp_path / "legacy", made.MIXTRAL, mesh=mesh, spec=spec)
    back(tmp_path, made.MIXTRAL, verify=True)


def test_to_another_megatron_format(tmp_path):
    made.legacy(tmp_path / "legacy", made.LLAMA, mesh=Mesh(2, 2))
    source = made.model(tmp_path / "hf", made.LLAMA)
    convert(
        ConversionRequest(source=tmp_path / "legacy", output=tmp_path / "dist", to="megatron", hf=source, verify=True)
    )
    convert(ConversionRequest(source=tmp_path / "dist", output=tmp_path / "back", to="hf"))
    found, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / "back", source))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def change(file, edit):
    state = torch.load(file, weights_only=False)
    edit(state)
    torch.save(state, file)


def refused(tmp_path, match, error=ValueError, **options):
    source = made.model(tmp_path / "hf", made.LLAMA)
    with pytest.raises(error, match=match):
        convert(ConversionRequest(source=tmp_path / "legacy", output=tmp_path / "back", to="hf", hf=source, **options))
    assert not (tmp_path / "back").exists()


@pytest.fixture
def ranks(tmp_path):
    folder = made.legacy(tmp_path / "legacy", made.LLAMA, mesh=Mesh(2, 2)) / "iter_0000005"
    return [folder / f"mp_rank_{t:02d}_{p:03d}" / "model_optim_rng.pt" for p in range(2) for t in range(2)]


def test_a_rank_that_is_missing(tmp_path, ranks):
    ranks[3].unlink()
    ranks[3].parent.rmdir()
    refused(tmp_path, "3 ranks, which are not 2 tensor × 2 pipeline × 1 expert")


def test_a_file_that_is_cut_off(tmp_path, ranks):
    ranks[1].write_bytes(ranks[1].read_bytes()[:-100])
    refused(tmp_path, r"mp_rank_01_000/model_optim_rng\.pt cannot be read, is it cut off\?")


def test_names_that_are_missing_or_too_many(tmp_path, ranks):
    def edit(state):
        state["model"]["decoder.layers.1.strange.weight"] = state["model"].pop("decoder.layers.1.mlp.linear_fc2.weight")

    change(ranks[0], edit)
    names = (
        r"missing \['decoder\.layers\.1\.mlp\.linear_fc2\.weight'\], extra \['decoder\.layers\.1\.strange\.weight'\]"
    )
    refused(tmp_path, r"mp_rank_00_000/.* " + names)


def test_a_shape_of_another_layout(tmp_path, ranks):
    def edit(state):
        state["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(16, 24)

    change(ranks[0], edit)
    refused(tmp_path, r"'decoder\.layers\.0\.mlp\.linear_fc2\.weight' has the shape \[16, 24\]; .* require \[16, 12\]")


def test_an_order_of_heads_from_before_version_2(tmp_path, ranks):
    change(ranks[0], lambda state: state.update(checkpoint_version=1.0))
    refused(tmp_path, "checkpoint_version 1.0; 2.0 and later")


def test_ranks_that_disagree_on_what_they_share_are_found_by_verifying(tmp_path, ranks):
    change(ranks[1], lambda state: state["model"]["decoder.layers.0.input_layernorm.weight"].add_(1))
    refused(tmp_path, r"'model\.layers\.0\.input_layernorm\.weight'", WeightError, verify=True)
