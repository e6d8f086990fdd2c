"""Rows of a vocabulary in weights and files."""

import json
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from coalign_megatron.vocab.extend import VocabularyRows, find_token_tables, read_config, write_weights
from tests.tiny import tiny_model_dir

PIECES = [[0, 1], [2, 2, 3], []]


def test_rows_by_hand():
    old = torch.tensor([[1.0, 2.0], [3.0, 6.0], [0.0, 3.0], [3.0, 9.0], [100.0, 100.0]])
    rows = VocabularyRows.plan(5, 4, PIECES, 4)  # four tokens and a spare row; seven needed
    assert rows.new_size == 8
    expected = [[2.0, 4.0], [1.0, 5.0], [1.75, 5.0], [1.75, 5.0]]  # two means, mean of all, padding
    assert rows.extend(old).tolist() == [*old[:4].tolist(), *expected]


@pytest.mark.parametrize(
    ("before", "first", "new", "multiple", "after"),
    [(64, 60, 4, 64, 64), (64, 60, 5, 64, 128), (60, 60, 1, 1, 61), (60, 60, 1, 8, 64), (100, 10, 1, 64, 100)],
)
def test_how_many_rows(before, first, new, multiple, after):
    assert VocabularyRows.plan(before, first, [[0]] * new, multiple).new_size == after


def test_pieces_without_a_row_do_not_count():
    rows = VocabularyRows.plan(3, 5, [[0, 4], [3, 4]], 1)
    assert rows.extend(torch.tensor([0.0, 3.0, 6.0])).tolist() == [0, 3, 6, 3, 3, 0, 3]


def test_spare_rows_that_stay_spare_are_kept():
    old = torch.arange(10.0)
    new = VocabularyRows.plan(10, 6, [[0, 1]], 64).extend(old)
    assert new.tolist() == [0, 1, 2, 3, 4, 5, 0.5, 7, 8, 9]


def test_means_are_computed_in_float32():
    old = torch.full((300, 1), 1.0, dtype=torch.bfloat16)
    old[0] = 1.0078125  # the next number after 1
    rows = VocabularyRows.plan(300, 300, [[0, 0, 1], list(range(300))], 1)
    new = rows.extend(old)
    assert new.dtype == torch.bfloat16 and torch.equal(new[:300], old)
    assert new[300:, 0].tolist() == [1.0078125, 1.0]


@pytest.mark.parametrize(
    ("family", "config", "names"),
    [
        ("llama", {"tied": True}, {"model.embed_tokens.weight", "lm_head.weight"}),
        ("llama", {"tied": False}, {"model.embed_tokens.weight", "lm_head.weight"}),
        ("phi", {"tied": False}, {"model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"}),
        ("gpt2", {}, {"transformer.wte.weight", "lm_head.weight"}),
        # As many hidden units as tokens: the shape alone would not tell them apart.
        ("qwen2", {"vocab": 320, "hidden": 320}, {"model.embed_tokens.weight", "lm_head.weight"}),
    ],
)
def test_tables_are_found_without_knowing_the_family(tmp_path, family, config, names):
    tiny_model_dir(tmp_path, family=family, **config)
    assert find_token_tables(AutoConfig.from_pretrained(tmp_path)) == names


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files(tmp_path, family, sharded, dtype):
    source, target = tiny_model_dir(tmp_path / "in", family=family, tied=False), tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="20KB" if sharded else "1GB")
    target.mkdir()
    names, rows = find_token_tables(AutoConfig.from_pretrained(source)), VocabularyRows.plan(320, 318, PIECES, 64)
    write_weights(source, target, names, rows)

    files = {p.name for p in source.glob("model*")}
    assert {p.name for p in target.iterdir()} == files and (len(files) > 3) == sharded
    for file in (p for p in files if p.endswith(".safetensors")):
        old, new = load_file(source / file), load_file(target / file)
        assert old.keys() == new.keys()
        for name, tensor in old.items():
            expected = rows.extend(tensor) if name in names else tensor
            assert new[name].dtype == dtype and torch.equal(new[name], expected), name
        with safe_open(source / file, "pt") as a, safe_open(target / file, "pt") as b:
            assert a.metadata() == b.metadata()
    if sharded:
        old, new = (json.loads((d / "model.safetensors.index.json").read_text()) for d in (source, target))
        assert new["weight_map"] == old["weight_map"]
        sizes = [sum(t.nbytes for p in target.glob("*.safetensors") for t in load_file(p).values())]
        assert new["metadata"]["total_size"] == sum(sizes) > old["metadata"]["total_size"]


def test_files_without_a_table_are_copied_unread(tmp_path, monkeypatch):
    """A shard is read only if a table is in it."""
    source, target = tiny_model_dir(tmp_path / "in", tied=True), tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="50KB")
    target.mkdir()
    read = []

    @contextmanager
    def watched(path, framework):
        with safe_open(path, framework) as file:
            get_tensor = lambda name: (read.append(path.name), file.get_tensor(name))[1]  # noqa: E731
            yield SimpleNamespace(keys=file.keys, metadata=file.metadata, get_tensor=get_tensor)

    monkeypatch.setattr(import_module("coalign_megatron.vocab.extend"), "safe_open", watched)
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    write_weights(source, target, tables, VocabularyRows.plan(320, 259, [[1]], 64))
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(read) == {index["model.embed_tokens.weight"]} and len(set(index.values())) > 1


def test_weights_that_do_not_fit_the_config(tmp_path):
    source, target = tiny_model_dir(tmp_path / "in"), tmp_path / "out"
    target.mkdir()
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has 320 rows; config\.json says vocab_size 300"):
        write_weights(source, target, {"model.embed_tokens.weight"}, VocabularyRows.plan(300, 259, [[1]], 64))
    with pytest.raises(ValueError, match=r"the weights have none of \['other\.weight'\]"):
        write_weights(source, target, {"other.weight"}, VocabularyRows.plan(320, 259, [[1]], 64))


def test_directories_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"not a Hugging Face model directory \(no config\.json there\)"):
        read_config(tmp_path)
    path = tiny_model_dir(tmp_path / "model")
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"architectures": ["OurOwnModel"]}))
    with pytest.raises(ValueError, match=r"architectures \['OurOwnModel'\] is not a class of transformers"):
        read_config(path)
    (path / "config.json").write_text(json.dumps(content))
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has no weights in safetensors files"):
        read_config(path)
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "architectures": ["Gemma3Model"]}))
    with pytest.raises(ValueError, match="gemma3 holds its language model inside another model"):
        read_config(path)
