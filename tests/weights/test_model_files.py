"""Files that stand where weights or a tokenizer should be: each is named, with what gets the right one."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from coalign.weights.model_files import check_model_files, check_tokenizer_files, read_header, read_stored
from tests.tiny import tiny_model_dir

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 1234567890\n".encode()
NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("weights") / "model", layers=1)


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path / "model")
    return tmp_path / "model"


def content(change):
    return lambda folder: (folder / NAME).write_bytes(change((folder / NAME).read_bytes()))


def header(change):
    """Replace the header by what ``change`` makes of it."""

    def rewrite(data):
        length = struct.unpack("<Q", data[:8])[0]
        text = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return content(rewrite)


def first(change):
    """Change the first tensor's entry."""
    return header(lambda entries: entries | {(name := min(entries.keys() - {"__metadata__"})): change(entries[name])})


def divide(folder, *, second=None, missing=None):
    tensors = load_file(folder / NAME)
    names = sorted(tensors)
    held = dict(zip(SHARDS, (names[:3], names[3:]), strict=True))
    for shard, inside in held.items():
        save_file({name: tensors[name].clone() for name in inside}, folder / shard)
    (folder / NAME).unlink()
    places = {name: shard for shard, inside in held.items() for name in inside}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    if second is not None:
        (folder / SHARDS[1]).write_bytes(second)
    if missing is not None:
        (folder / missing).unlink()


def pickle(folder, cut=None):
    torch.save(load_file(folder / NAME), folder / "pytorch_model.bin")
    (folder / NAME).unlink()
    if cut is not None:
        data = (folder / "pytorch_model.bin").read_bytes()
        (folder / "pytorch_model.bin").write_bytes(data[:cut] if cut else LFS)


def zipped(folder):
    (folder / NAME).unlink()
    with zipfile.ZipFile(folder / NAME, "w") as file:
        file.writestr("archive/data.pkl", b"")


DAMAGES = {
    "a pointer": (content(lambda _: LFS), r"safetensors is a pointer of Git LFS.*`git lfs pull` in "),
    "a pointer as a shard": (lambda folder: divide(folder, second=LFS), r"model-00002.* is a pointer of Git LFS"),
    "a pointer as config.json": (lambda f: (f / "config.json").write_bytes(LFS), r"config\.json is a pointer of Git"),
    "a pointer as index": (lambda f: (divide(f), (f / INDEX).write_bytes(LFS)), r"index\.json is a pointer of Git LFS"),
    "a pointer as a pickle": (lambda folder: pickle(folder, cut=0), r"pytorch_model\.bin is a pointer of Git LFS"),
    "nothing": (content(lambda _: b""), r"model\.safetensors is empty"),
    "four bytes": (content(lambda data: data[:4]), r"no safetensors file, or a damaged one of 4 bytes"),
    "one byte less": (content(lambda data: data[:-1]), r"has 79,871 bytes, and 79,872 are what its header tells of"),
    "one byte more": (content(lambda data: data + b"x"), r"has 79,873 bytes, and 79,872 are"),
    "half a header": (content(lambda data: data[:100]), r"no safetensors file, or a damaged one of 100 bytes"),
    "an endless header": (content(lambda data: b"\xff" * 7 + b"\x7f" + data[8:]), r"no safetensors file, or a damaged"),
    "no JSON": (content(lambda d: struct.pack("<Q", 3) + b"{a}" + d), r"has no valid header of safetensors \(JSONDec"),
    "deep JSON": (content(lambda _: struct.pack("<Q", 50000) + b'{"a":' * 10000), r"has no valid header .*Recursion"),
    "a list": (header(lambda entries: {"a": 3}), r"has no valid header of safetensors \(TypeError"),
    "a negative shape": (first(lambda entry: entry | {"shape": [-1]}), r"has no valid header of safetensors \(ValueE"),
    "overlapping tensors": (first(lambda entry: entry | {"data_offsets": [0, 10**9]}), r"do not lie one after the oth"),
    "another shape": (first(lambda entry: entry | {"shape": [7, 7]}), r"do not lie one after the other"),
    "a web page": (content(lambda _: b"\n<!DOCTYPE html><html>404</html>"), r"is a web page; download the file itself"),
    "GGUF": (content(lambda _: b"GGUF\x03" + bytes(500)), r"is a GGUF file: give it the ending \.gguf"),
    "torch.save": (zipped, r"is a file of torch\.save; called pytorch_model\.bin it is loaded"),
    "half a pickle": (lambda folder: pickle(folder, cut=5000), r"pytorch_model\.bin is no file of torch\.save, or"),
    "no weights": (lambda folder: (folder / NAME).unlink(), r"has no weights \(model\.safetensors\); the download"),
    "no index": (lambda folder: divide(folder, missing=INDEX), r"no weights .*safetensors\.index\.json is missing"),
    "no shard": (lambda folder: divide(folder, missing=SHARDS[0]), r"names files that do not exist: \['model-00001"),
    "adapters": (lambda f: (f / NAME).rename(f / "adapter_model.safetensors"), r"no weights .*holds adapters: load"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_model_is_named(folder, damage):
    damaged, message = DAMAGES[damage]
    damaged(folder)
    with pytest.raises(ValueError, match=message):
        check_model_files(folder)


def test_what_is_a_model_is_read(folder):
    check_model_files(folder)
    expected = {name: tuple(tensor.shape) for name, tensor in load_file(folder / NAME).items()}
    assert {name: tensor.shape for name, tensor in read_header(folder / NAME).items()} == expected
    divide(folder)
    check_model_files(folder)
    assert {name: tensor.shape for name, tensor in (read_stored(folder) or {}).items()} == expected


def test_a_pickle_is_a_model_whose_tensors_are_not_read(folder):
    pickle(folder)
    check_model_files(folder)
    assert read_stored(folder) == {}


def test_all_types_of_tensors_have_their_sizes(tmp_path):
    types = [torch.bool, torch.int8, torch.uint16, torch.int64, torch.float16, torch.float8_e4m3fn, torch.complex64]
    tensors = {str(i): torch.zeros(3, 5).to(dtype) for i, dtype in enumerate(types)} | {"none": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / NAME)
    assert len(read_header(tmp_path / NAME)) == len(tensors)


def test_a_directory_without_a_tokenizer_and_one_whose_tokenizer_is_a_pointer(folder):
    check_tokenizer_files(folder)
    (folder / "tokenizer.json").write_bytes(LFS)
    with pytest.raises(ValueError, match=r"tokenizer\.json is a pointer of Git LFS"):
        check_tokenizer_files(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer \(none of .*models\.policy\.tokenizer"):
        check_tokenizer_files(folder)
