import pytest
import torch

from coalign.weights.sync.transport import WeightError
from coalign_megatron.convert import ConversionRequest, convert
from coalign_megatron.layouts.megatron import Mesh
from packages.megatron.tests.convert import made


def back(tmp_path, hf, **options):
    source = made.model(tmp_path / "hf", hf)
    request = ConversionRequest(source=tmp_path / "legacy", output=tmp_path / "back", to="hf", hf=source, **options)
    assert convert(request).source == "legacy"
    made.same(made.stored(tmp_path / "back"), made.stored(source))


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
    folder = made.legacy(tmp_path / "legacy", made.LLAMA, mesh=Mesh(2, 2))
    source, dist = made.model(tmp_path / "hf", made.LLAMA), tmp_path / "dist"
    convert(ConversionRequest(source=folder, output=dist, to="megatron", hf=source, verify=True))
    convert(ConversionRequest(source=dist, output=tmp_path / "back", to="hf"))
    made.same(made.stored(tmp_path / "back"), made.stored(source))


def change(file, edit):
    state = torch.load(file, weights_only=False)
    edit(state)
    torch.save(state, file)


def remove(file):
    file.unlink()
    file.parent.rmdir()


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-100])


def rename(state):
    state["model"]["decoder.layers.1.strange.weight"] = state["model"].pop("decoder.layers.1.mlp.linear_fc2.weight")


def reshape(state):
    state["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(16, 24)


def move_norm(state):
    state["model"]["decoder.layers.0.input_layernorm.weight"].add_(1)


def edited(edit):
    return lambda file: change(file, edit)


SHAPE = r"'\S+\.0\.mlp\.linear_fc2\.weight' has the shape \[16, 24\]; .* require \[16, 12\]"
NAMES = r"mp_rank_00_000/.* missing \['\S+\.1\.mlp\.linear_fc2\.weight'\], extra \['\S+\.1\.strange\.weight'\]"
REFUSED = {  # what is done to the file of a rank (tensor, pipeline), and what is said
    "a rank is missing": ("01_001", remove, "3 ranks, which are not 2 tensor × 2 pipeline × 1 expert"),
    "cut off": ("01_000", cut_off, r"mp_rank_01_000/model_optim_rng\.pt cannot be read, is it cut off\?"),
    "names": ("00_000", edited(rename), NAMES),
    "a shape": ("00_000", edited(reshape), SHAPE),
    "heads": ("00_000", edited(lambda state: state.update(checkpoint_version=1.0)), "_version 1.0; 2.0 and later"),
    "ranks disagree": ("01_000", edited(move_norm), r"'model\.layers\.0\.input_layernorm\.weight'"),
}


@pytest.mark.parametrize(("rank", "damage", "message"), REFUSED.values(), ids=REFUSED)
def test_ranks_that_make_no_model_are_refused(tmp_path, rank, damage, message):
    folder = made.legacy(tmp_path / "legacy", made.LLAMA, mesh=Mesh(2, 2))
    damage(folder / "iter_0000005" / f"mp_rank_{rank}" / "model_optim_rng.pt")
    source = made.model(tmp_path / "hf", made.LLAMA)
    with pytest.raises((ValueError, WeightError), match=message):
        convert(ConversionRequest(source=folder, output=tmp_path / "back", to="hf", hf=source, verify=True))
    assert not (tmp_path / "back").exists()
