"""Files that change while they are read, or between a checkpoint and the run that continues it."""

import json
import os

import pytest

from coalign.data.sources import open_rows
from coalign.files import hash_samples
from coalign_megatron.indexed import IndexedTokens
from coalign_megatron.indexed_writer import IndexedWriter, choose_dtype
from tests.data.reading import write
from tests.data.test_cache import loader as cached
from tests.data.test_stream import drawn, loader, rows


def stored(tmp_path, form):
    """Rows of some 200 KB each, and the file that holds them."""
    found = [{"prompt": "p" * 200_000, "n": n} for n in range(9)]
    if form == "jsonl":
        return (path := tmp_path / "a.jsonl"), write(path, found)
    if form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(found), path := tmp_path / "a.parquet", compression="none")
        return path, path
    import datasets

    datasets.Dataset.from_list(found).save_to_disk(tmp_path / "a")
    return next((tmp_path / "a").glob("*.arrow")), tmp_path / "a"


@pytest.mark.parametrize(
    ("form", "stream"),
    [("jsonl", True), ("jsonl", False), ("parquet", True), ("directory", True), ("directory", False)],
)
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, form, stream):
    file, path = stored(tmp_path, form)
    opened = open_rows(path)
    reading = opened.read()
    assert next(reading)[0].row()["n"] == opened[0]["n"] == 0
    os.truncate(file, 4096)
    with pytest.raises(ValueError, match=rf"{file.name} was changed while it is read: [\d,]+ bytes before, 4,096 now"):
        list(reading) if stream else opened[8]


def test_indices_and_caches_that_are_cut_while_they_are_read_are_named(tmp_path):
    with IndexedWriter(tmp_path / "a", choose_dtype(300)) as out:
        for _ in range(9):
            out.add([7] * 5000)
    data = IndexedTokens(tmp_path / "a")
    os.truncate(tmp_path / "a.bin", 4096)
    with pytest.raises(ValueError, match=r"a\.bin was changed while it is read"):
        data[8].tolist()
    path = write(tmp_path / "a.jsonl", [{"prompt": "p" * 900, "answer": "a"} for n in range(9)])
    made = cached(path, max_tokens=2000, cache=str(tmp_path / "cache"))
    made.next()
    [tokens] = (tmp_path / "cache").glob("*/tokens")
    os.truncate(tokens, 0)
    with pytest.raises(ValueError, match="tokens was changed while it is read"):
        made.next()


def test_a_stream_that_is_edited_while_it_is_read_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(20))
    made = loader(path, shuffle=False)
    assert drawn(made, 8) == list(range(8))
    write(tmp_path / "a.jsonl", rows(20, start=100))
    with pytest.raises(ValueError, match=r"a\.jsonl was changed while it is read: 520 bytes before, 580 now"):
        drawn(made, 1)


def test_rows_that_are_rewritten_in_place_are_refused_until_they_are_allowed(tmp_path):
    """The file has the same name and size as before."""
    path = write(tmp_path / "a.jsonl", rows(20, start=100))
    made = loader(path, shuffle=False)
    assert drawn(made, 11) == list(range(100, 111))
    state = json.loads(json.dumps(made.state_dict()))
    write(tmp_path / "a.jsonl", rows(20, start=200))
    with pytest.raises(ValueError, match=r"its files.* differ.*`runtime\.allow_changed: \[data\]`"):
        loader(path, shuffle=False).load_state_dict(state)
    allowed = loader(path, shuffle=False, allow_changed=True)
    allowed.load_state_dict(state)
    assert drawn(allowed, 9) == list(range(211, 220))
    write(tmp_path / "a.jsonl", [{"prompt": "a longer one than before", "n": n} for n in range(20)])
    allowed = loader(path, shuffle=False, allow_changed=True)
    allowed.load_state_dict(state)  # its rows begin elsewhere
    assert drawn(allowed, 9) == list(range(11, 20))


def test_a_stream_written_since_the_checkpoint_is_named(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", rows(20))
    state = loader(path).state_dict()
    loader(path).load_state_dict(state)
    assert not caplog.text
    os.utime(path, (state["sources"][0]["written"] + 5,) * 2)
    loader(path).load_state_dict(state)
    assert "a.jsonl: written since the checkpoint: a.jsonl; samples of their contents are as before" in caplog.text


def test_samples_of_a_long_file(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(bytes(100_000))
    before = hash_samples(file, blocks=3, size=1000)
    for place, seen in {0: True, 49_600: True, 99_999: True, 30_000: False}.items():
        content = bytearray(100_000)
        content[place] = 1
        file.write_bytes(content)
        assert (hash_samples(file, blocks=3, size=1000) != before) is seen
        assert hash_samples(file) != before  # read whole
