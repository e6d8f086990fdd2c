"""What differs between two sides."""

import pytest
import torch
from safetensors.torch import save_file

from coalign_serve.weights.compare import TensorDigest, WeightSet, find_differences, open_saved_weights


def side(name, tensors):
    return WeightSet(name, {key: TensorDigest.of(tensor) for key, tensor in tensors.items()}, tensors.__getitem__)


def test_equal_sides_have_no_differences():
    tensors = {"a": torch.tensor([1.0, float("nan")]), "b": torch.zeros(0)}
    assert not list(find_differences(side("x", tensors), side("y", {k: t.clone() for k, t in tensors.items()})))


def test_every_kind_of_difference():
    zeros = torch.zeros(2)
    ours = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": zeros, "c": zeros, "nan": zeros, "ours": zeros}
    theirs = {"a": torch.tensor([1.0, 2.5, 2.0]), "b": torch.zeros(2, 1), "c": zeros.half(), "theirs": zeros}
    theirs["nan"] = torch.tensor([0.0, float("nan")])
    found = {each.name: each for each in find_differences(side("x", ours), side("y", theirs))}
    assert (found["a"].largest, found["a"].count, found["a"].numel) == (1.0, 2, 3)
    assert found["b"].what == "float32[2], float32[2, 1]"
    assert found["c"].what == "float32[2], float16[2]"
    assert found["ours"].what == "only in x" and found["theirs"].what == "only in y"
    assert found["nan"].largest == float("inf")


def test_zeros_of_either_sign_differ_by_nothing_and_are_named():
    [found] = find_differences(side("x", {"a": torch.tensor([0.0])}), side("y", {"a": torch.tensor([-0.0])}))
    assert (found.largest, found.count) == (0.0, 1)


def test_directories(tmp_path):
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "hf" / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "hf" / "model-2.safetensors")
    found = open_saved_weights(tmp_path)
    assert found.digests.keys() == {"a", "b"} and torch.equal(found.fetch("b"), torch.ones(3))
    with pytest.raises(ValueError, match="holds no weights: expected a Hugging Face directory"):
        open_saved_weights(tmp_path / "nothing")
