"""Checkpoints of strangers: `.metadata`, shards and objects that would run code, take all memory or never end."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from coalign.backends import trainer_state as checkpoint
from coalign.weights.metadata import DistributedCheckpointPlanner, DistributedCheckpointReader, read_metadata
from coalign_megatron.convert import legacy, torch_dist
from tests.fuzzing import CASES, damage, try_cases

HOME = "torch.distributed.checkpoint.metadata"


class Call:
    """Is pickled as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def written(folder: Path, data: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(data)
    return folder


@pytest.fixture
def saved(tmp_path):
    """A checkpoint as torch writes it: a tensor, and numbers, which are objects."""
    state = {"weight": torch.arange(12.0).view(3, 4), "progress": {"step": 7}}
    state_dict_saver.save(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    return tmp_path / "saved"


def make_dataclass_attack(marker: Path) -> bytes:
    """The pickle that ran code while every name that torch's module shows could be imported.

    `dataclass` writes the names of a class's fields into source code that it runs. A state that is set on a class
    gives it such a field.
    """
    name = f"x:open({str(marker)!r}, 'w')"

    def put(value: object) -> bytes:
        return pickle.dumps(value, 2)[2:-1]  # without the head and the stop

    def load(name: str) -> bytes:
        return f"c{HOME}\n{name}\n".encode()

    hidden = put({"init": False, "repr": False, "compare": False})
    field = load("field") + b")RN" + hidden + b"\x86b"
    state = b"N}" + put("__annotations__") + put({name: "int"}) + b"s" + put(name) + field + b"s\x86"
    return b"\x80\x02" + load("StorageMeta") + state + b"b0" + load("dataclass") + load("StorageMeta") + b"\x85R."


def test_the_dataclass_attack_runs_nothing(tmp_path):
    marker = tmp_path / "was run"
    folder = written(tmp_path / "bad", make_dataclass_attack(marker))
    before = dict(vars(metadata.StorageMeta))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        read_metadata(folder)
    assert not marker.exists() and dict(vars(metadata.StorageMeta)) == before


def test_torchs_own_are_read_as_torch_reads_them(saved):
    own, torchs = read_metadata(saved), FileSystemReader(str(saved)).read_metadata()
    assert own.state_dict_metadata == torchs.state_dict_metadata and own.storage_data == torchs.storage_data
    loaded = {"weight": torch.zeros(3, 4), "progress": {"step": 0}}
    DistributedCheckpointReader(saved).fill(loaded, DistributedCheckpointPlanner(), alone=True)
    assert torch.equal(loaded["weight"], torch.arange(12.0).view(3, 4)) and loaded["progress"] == {"step": 7}


@pytest.mark.parametrize("entry", ["planner_data", "mcore_data"])
def test_a_call_anywhere_in_the_records_is_not_made(saved, tmp_path, entry):
    found = FileSystemReader(str(saved)).read_metadata()
    setattr(found, entry, Call(open, str(tmp_path / "was run"), "w"))
    written(saved, pickle.dumps(found))
    assert read_metadata(saved).state_dict_metadata.keys() == {"weight", "progress.step"}
    assert not (tmp_path / "was run").exists()


def resume(folder: Path) -> dict[str, int]:
    model = torch.nn.Linear(1, 1, bias=False)
    return checkpoint.load(folder, model, None, alone=True)


def test_resuming_runs_no_code_of_metadata_nor_of_objects(tmp_path):
    model, marker = torch.nn.Linear(1, 1, bias=False), tmp_path / "was run"
    checkpoint.save(tmp_path / "run", checkpoint.get_training_state(model, None), {"steps": 3}, alone=True)
    assert resume(tmp_path / "run") == {"steps": 3}
    good = (tmp_path / "run" / ".metadata").read_bytes()
    written(tmp_path / "run", pickle.dumps(Call(open, str(marker), "w")))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        resume(tmp_path / "run")
    written(tmp_path / "run", good)
    where = read_metadata(tmp_path / "run").storage_data[metadata.MetadataIndex("progress.steps")]
    attack = io.BytesIO()
    torch.save(Call(open, str(marker), "w"), attack)
    found = pickle.loads(good)
    with open(tmp_path / "run" / where.relative_path, "ab") as file:
        info = _StorageInfo(where.relative_path, file.tell(), file.write(attack.getvalue()))
    found.storage_data[metadata.MetadataIndex("progress.steps")] = info
    written(tmp_path / "run", pickle.dumps(found))
    with pytest.raises(ValueError, match="cannot be read: Weights only load failed"):
        resume(tmp_path / "run")
    assert not marker.exists()


def nest_keys(depth: int) -> bytes:
    """A dictionary under a tuple of tuples, each twice in the next: to hash it takes 2^depth steps."""
    return b"\x80\x04})" + b"2\x86" * depth + b"Ns."


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # an entry of the memo far away: C's unpickler takes 16 GB
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # bytearray(2**40)
        b"\x80\x05\x95" + (1 << 62).to_bytes(8, "little") + b".",  # a frame
        nest_keys(200),
        b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x04I" + b"9" * 100_000 + b"\n.",
        pickle.dumps(Call(eval, "1")),
        pickle.dumps(5),
        b"",
    ],
    ids=["memo", "bytearray", "frame", "keys", "deep", "digits", "call", "number", "empty"],
)
def test_a_bomb_is_refused_at_once(tmp_path, data):
    with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
        read_metadata(written(tmp_path / "bad", data))


def test_files_outside_of_the_folder_are_refused(saved):
    found = FileSystemReader(str(saved)).read_metadata()
    for name in ("../other.distcp", "/etc/passwd", "a/b.distcp", "..", ""):
        for where in found.storage_data.values():
            where.relative_path = name
        with pytest.raises(ValueError, match="not in the checkpoint's own directory"):
            read_metadata(written(saved, pickle.dumps(found)))


def test_a_compressed_record_is_refused(tmp_path):
    packed = tmp_path / "shard"
    torch.save(torch.zeros(8), tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for each in plain.infolist():
            other.writestr(each.filename, plain.read(each))
    with pytest.raises(ValueError, match=r"data\.pkl is compressed"):
        map_chunk(packed)
    with pytest.raises(ValueError, match=r"data\.pkl is compressed"):
        legacy.load_pickle(packed)


def map_chunk(file: Path) -> torch.Tensor:
    import numpy as np

    stored = torch_dist.StoredChunk(file, 0, file.stat().st_size, (8,), torch.float32)
    return torch_dist._map_chunk(stored, np.memmap(file, np.uint8, "c"))


GLOBALS = ["os\nsystem", "builtins\neval", f"{HOME}\ndataclass", f"{HOME}\nMetadata", "torch\nSize", "torch\nfloat32"]
OPCODES = [
    *(bytes([code]) for code in b"().0123NRQ]abdelostu}\x81\x85\x86\x87\x88\x8f\x90\x91\x92\x94"),
    *(b"c%b\n" % name.encode() for name in GLOBALS),
    *(b"q" + bytes([i]) for i in range(3)),
    *(b"h" + bytes([i]) for i in range(3)),
    b"\x8c\x01x",
    b"K\x05",
    b"\x93",
    b"r\xff\xff\xff\x7f",
]


@CASES
def test_any_metadata_is_read_or_refused(saved, tmp_path, cases):
    good, folder = (saved / ".metadata").read_bytes(), tmp_path / "case"
    programs = st.lists(st.sampled_from(OPCODES), max_size=60).map(lambda codes: b"\x80\x04" + b"".join(codes) + b".")

    def check(data: bytes) -> None:
        try:
            read_metadata(written(folder, data))
        except ValueError as problem:
            assert ".metadata cannot be read" in str(problem)

    try_cases(st.binary(max_size=200) | programs | damage(good, OPCODES) | damage(good), check, cases)


@CASES
def test_any_archive_is_read_or_refused(tmp_path, cases):
    torch.save(torch.arange(8.0), tmp_path / "good")
    good, file = (tmp_path / "good").read_bytes(), tmp_path / "case"

    def check(data: bytes) -> None:
        file.write_bytes(data or b"x")
        for read in (map_chunk, legacy.load_pickle):
            try:
                read(file)
            except ValueError as problem:
                assert str(file) in str(problem)

    try_cases(st.binary(max_size=200) | damage(good, OPCODES) | damage(good), check, cases)
