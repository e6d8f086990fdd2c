"""Sources read as they come: every row once an epoch, shuffled within a window, resumed at any place."""

import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.data.sources import _JsonLines, _ParquetRows
from tests.data import reading
from tests.data.reading import drawn, write


def rows(n, start=0):
    return [{"prompt": f"p{i}", "n": i} for i in range(start, start + n)]


def stored(tmp_path, form, rows):
    match form:
        case "jsonl":
            return write(tmp_path / "a.jsonl", rows)
        case "shards":
            for i in range(3):
                write(tmp_path / f"part{i}.jsonl", rows[9 * i : 9 * i + 9])
            return str(tmp_path / "part*.jsonl")
        case "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=6)
            return str(tmp_path / "a.parquet")
        case "directory":
            import datasets

            datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "a")
            return str(tmp_path / "a")


loader = partial(reading.loader, stream=True, batch_size=1, stream_window=8)
FORMS = pytest.mark.parametrize("form", ["jsonl", "shards", "parquet", "directory"])


@FORMS
def test_every_epoch_shows_each_row_once_shuffled_within_windows(tmp_path, form):
    path = stored(tmp_path, form, rows(20))
    seen = drawn(loader(path), 60)
    epochs = [seen[i : i + 20] for i in (0, 20, 40)]
    for epoch in epochs:
        for first in (0, 8, 16):
            window = list(range(first, min(first + 8, 20)))
            assert sorted(epoch[first : first + 8]) == window != epoch[first : first + 8]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [n % 8 for n in epochs[0][:8]] != [n % 8 for n in epochs[0][8:16]]  # windows differ, too
    assert drawn(loader(path), 60) == seen != drawn(loader(path, seed=1), 60)
    assert drawn(loader(path, shuffle=False), 25) == [*range(20), *range(5)]
    assert drawn(loader(path, max_samples=11, stream_window=100), 11) != list(range(11))
    assert sorted(drawn(loader(path, max_samples=11), 22)) == sorted([*range(11)] * 2)


@FORMS
def test_resuming_anywhere_continues_the_run(tmp_path, form):
    other = write(tmp_path / "other.jsonl", rows(5, 100))
    path = stored(tmp_path, form, rows(20))
    make = lambda: loader(path, other, weights=[2.0, 1.0], batch_size=1)  # noqa: E731
    whole = drawn(make(), 60)
    running = make()
    for position in range(0, 50, 3):
        state = json.loads(json.dumps(running.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.report() == running.report() and resumed.state_dict() == running.state_dict()
        assert drawn(resumed, 10) == whole[position : position + 10]
        drawn(running, 3)
    assert len(json.dumps(running.state_dict())) < 700


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["row", "row", "blank line", "empty", "missing"]), min_size=1, max_size=30),
    st.integers(1, 12),
    st.sampled_from([{}, {"phases": {"a": 1, "b": 2}, "phase": "b"}]),
    st.integers(0, 40),
)
def test_a_stream_draws_what_a_scan_finds(tmp_path_factory, lines, window, phases, stop):
    said = {"blank line": "", "empty": '{"prompt": ""}', "missing": '{"n": 1}'}
    path = tmp_path_factory.mktemp("stream") / "a.jsonl"
    path.write_text("\n".join(said.get(line, f'{{"prompt": "p", "n": {n}}}') for n, line in enumerate(lines)))
    config = {"bad_rows": "drop", **phases}
    try:
        scanned = reading.loader(str(path), **config)
    except ValueError:  # nothing can be used
        with pytest.raises(ValueError, match=r"no usable rows|holds no rows"):
            loader(str(path), stream_window=window, **config).next()
        return
    numbers = [row["n"] for _, batch in scanned.all() for row in batch["rows"]]
    made = loader(str(path), stream_window=window, **config)
    epochs = [sorted(drawn(made, len(numbers))) for _ in range(3)]
    assert epochs == [numbers] * 3
    made = loader(str(path), stream_window=window, **config)
    drawn(made, stop)
    resumed = loader(str(path), stream_window=window, **config)
    resumed.load_state_dict(made.state_dict())
    assert drawn(resumed, 20) == drawn(made, 20) and resumed.report() == made.report()


def test_bad_rows_fall_under_the_policies_as_they_come(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "n": 0}, {"prompt": ""}, {"n": 2}, {"prompt": "b", "n": 3}])
    made = loader(path, bad_rows="drop", stream_window=3, shuffle=False)
    assert drawn(made, 1) == [0]
    assert made.report() == "a.jsonl: a stream, 1 rows so far: 1 used"
    assert drawn(made, 2) == [3, 0]
    assert made.report() == "a.jsonl: a stream, 5 rows so far: 3 used, 1 without the key, 1 empty"
    assert made.stats()["data/dropped"].value == 2 and made.stats()["data/epoch"].value == 1
    made = loader(path, shuffle=False)
    drawn(made, 1)
    with pytest.raises(ValueError, match=r"a\.jsonl:3: no key 'prompt'"):
        made.next()
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "n": 0}\n\n{"prompt": \n')
    made = loader(str(tmp_path / "b.jsonl"), shuffle=False)
    assert drawn(made, 1) == [0]
    with pytest.raises(ValueError, match=r"b\.jsonl:3: not valid JSON"):
        made.next()
    empty = loader(write(tmp_path / "c.jsonl", [{"prompt": ""}] * 5), stream_window=2)
    with pytest.raises(ValueError, match=r"c\.jsonl has no usable rows \(a stream, 5 rows so far: 0 used, 5 empty\)"):
        empty.next()
    with pytest.raises(ValueError, match="holds no rows"):
        loader(write(tmp_path / "d.jsonl", []))


def test_its_length_must_be_given(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(5))
    for ask in (len, lambda made: made.steps(2), lambda made: made.rows):
        with pytest.raises(ValueError, match=r"a\.jsonl is a stream .*: set runtime\.steps or runtime\.tokens"):
            ask(loader(path))
    with pytest.raises(ValueError, match="mix sources by weight"):
        loader(path, mixing="size")


def test_a_cursor_is_refused_for_another_stream(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(5))
    state = loader(path).state_dict()
    loader(path).load_state_dict(state)
    for message, other in {
        "is not the stream that the checkpoint": loader(write(tmp_path / "b.jsonl", rows(6))),
        "the tokenizer, the template or the keys": loader(path, system="Be brief."),
        "stream_window=8, not 9": loader(path, stream_window=9),
        "shuffle=True, not False": loader(path, shuffle=False),
    }.items():
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="stream=True, not False"):
        reading.loader(path).load_state_dict(state)


def test_a_budget_of_tokens_works_without_knowing_their_number(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * (7 * i % 30), "n": i} for i in range(1, 20)])
    made = loader(path, stream_window=5, batch_tokens=200)
    lengths = [made.next().tokens_total for _ in range(30)]
    assert abs(sum(lengths) - 30 * 200) < 70 and max(lengths) < 270


def test_nothing_is_indexed_or_unpacked(tmp_path, monkeypatch):
    paths = stored(tmp_path, "jsonl", rows(20)), stored(tmp_path, "parquet", rows(20))
    refused = property(lambda self: pytest.fail("went through the whole file"))
    monkeypatch.setattr(_JsonLines, "_offsets", refused)
    monkeypatch.setattr(_ParquetRows, "_unpacked", refused)
    made = loader(*paths)
    drawn(made, 30)
    again = loader(*paths)
    again.load_state_dict(made.state_dict())
    drawn(again, 30)


def test_only_a_window_is_read_ahead(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", rows(1000))
    read = []
    plain = _JsonLines._lines
    monkeypatch.setattr(_JsonLines, "_lines", lambda self, start: (read.append(x) or x for x in plain(self, start)))
    made = loader(path, stream_window=10)
    drawn(made, 25)
    assert 30 <= len(read) <= 32
