"""Rows of every kind of file, and what is said when one is broken."""

import gzip
import json
import os
import tempfile

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from coalign.config import ConfigError, load
from coalign.data import raw_files
from coalign.data.sources import BadRow, open_rows
from coalign.hub_data import CODECS

ROWS = [{"q": "ä €", "n": 1, "messages": [{"role": "user", "content": "x"}]}, {"q": "b", "n": 2, "messages": []}]


BOM = b"\xef\xbb\xbf"


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


FORMS = ["jsonl", "jsonl without last newline", "json", "json lines", "jsonl.gz", "json.zst", "parquet", "directory"]


@pytest.fixture(params=[*FORMS, "arrow stream", "arrow file"])
def file(request, tmp_path):
    lines = "\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS)
    match request.param:
        case "jsonl":
            return write(tmp_path / "a.jsonl", lines + "\n")
        case "jsonl without last newline":
            return write(tmp_path / "a.jsonl", lines)
        case "json":
            return write(tmp_path / "a.json", json.dumps(ROWS, indent=1))
        case "json lines":
            return write(tmp_path / "a.json", "\n" + lines)
        case "jsonl.gz":  # of two members, as `cat a.gz b.gz` makes them
            first, _, second = f"{lines}\n".partition("\n")
            return write(tmp_path / "a.jsonl.gz", gzip.compress(f"{first}\n".encode()) + gzip.compress(second.encode()))
        case "json.zst":
            return write(tmp_path / "a.json.zst", pa.compress(json.dumps(ROWS).encode(), "zstd", asbytes=True))
        case "arrow stream" | "arrow file":
            table = pa.Table.from_pylist(ROWS)
            new = pa.ipc.new_stream if request.param == "arrow stream" else pa.ipc.new_file
            with new(tmp_path / "a.arrow", table.schema) as out:
                out.write_table(table, max_chunksize=1)
            return tmp_path / "a.arrow"
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=1)
            return tmp_path / "a.parquet"
        case "directory":
            import datasets

            datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a")
            return tmp_path / "a"


def test_every_format_gives_the_same_rows(file):
    rows = open_rows(file)
    assert [rows[i] for i in range(len(rows))] == ROWS
    assert rows[1] == ROWS[1]  # any order
    with pytest.raises(IndexError):
        rows[2]
    few = open_rows(file, max_samples=1)
    assert len(few) == 1 and few[0] == ROWS[0]
    with pytest.raises(IndexError):
        few[1]
    assert len(open_rows(file, max_samples=9)) == 2


def test_reading_in_turn_gives_the_same_rows_from_any_place(file):
    for most in (None, 1, 9):
        rows = open_rows(file, max_samples=most)
        found = list(rows.read())
        assert [entry.row() for entry, _ in found] == ROWS[:most]
        assert [entry.number for entry, _ in found] == [0, 1][:most]
        assert [entry.where() for entry, _ in found] == [rows.where(i) for i in range(len(rows))]
        for i, (_, place) in enumerate(found):
            rest = open_rows(file, max_samples=most).read(place)
            assert [(entry.number, entry.row()) for entry, _ in rest] == list(enumerate(ROWS[:most]))[i + 1 :]


def shards(tmp_path):
    """Seven rows in three files of two kinds; the second has none."""
    write(tmp_path / "part-0.jsonl", "".join(json.dumps({"n": n}) + "\n" for n in range(3)))
    write(tmp_path / "part-1.jsonl", "\n")
    write(tmp_path / "part-2.json", json.dumps([{"n": n} for n in range(3, 7)]))
    return tmp_path / "part-*"


@pytest.mark.parametrize("most", [None, 2, 3, 99])
def test_a_pattern_names_several_files_in_the_order_of_their_names(tmp_path, most):
    rows = open_rows(shards(tmp_path), max_samples=most)
    numbers = list(range(7))[:most]
    assert [rows[i]["n"] for i in range(len(rows))] == numbers
    places = [place for _, place in rows.read()]
    assert [entry.row()["n"] for entry, _ in rows.read()] == numbers
    for i, place in enumerate(places):
        assert [entry.row()["n"] for entry, _ in rows.read(place)] == numbers[i + 1 :]
    with pytest.raises(IndexError, match=f"has {len(numbers)} rows, so no row {len(numbers)}"):
        rows[len(rows)]
    assert rows.where(1) == f"{tmp_path}/part-0.jsonl:2"
    write(tmp_path / "a[1].jsonl", '{"n": 1}')
    assert open_rows(tmp_path / "a[1].jsonl")[0] == {"n": 1}  # a name, though it looks like a pattern
    if most is None:
        assert rows.where(4) == f"{tmp_path}/part-2.json row 1"


def test_a_configuration_may_name_a_pattern_beside_its_file(tmp_path):
    shards(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text("algorithm: sft\ndata: {train: part-*}\n")
    assert load(config).data.train[0].path == str(tmp_path / "part-*")
    config.write_text("algorithm: sft\ndata: {train: party-*}\n")
    with pytest.raises(ConfigError, match=r"there is no file 'party-\*'"):
        load(config)


def parquet(path, rows, group):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


@pytest.mark.parametrize("start", [0, 1500, 2999, 3000, 5999, 6000])
def test_parquet_is_read_from_the_middle_of_a_row_group(tmp_path, start):
    rows = open_rows(parquet(tmp_path / "a.parquet", [{"n": n} for n in range(6500)], 3000), max_samples=6000)
    found = [(entry.number, entry.row()["n"]) for entry, _ in rows.read((0, start, start))]
    assert found == [(n, n) for n in range(start, 6000)]


def test_parquet_is_read_group_by_group_and_unpacked_only_for_access_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    text = "".join(map(str, range(1000)))
    data = [{"n": n, "text": f"{n} {text}"} for n in range(4000)]
    path = parquet(tmp_path / "a.parquet", data, 100)
    before = pa.total_allocated_bytes()
    rows = open_rows(path)
    for n, (entry, _) in enumerate(rows.read()):
        assert entry.row()["n"] == n
        assert pa.total_allocated_bytes() - before < 6e6  # of 12 MB
    assert not list((tmp_path / "temporary").iterdir())
    assert [rows[n] for n in (3999, 0, 2500)] == [data[n] for n in (3999, 0, 2500)]
    assert pa.total_allocated_bytes() - before < 4e6
    assert not list((tmp_path / "temporary").iterdir())  # what is mapped needs no name


def test_jsonl_says_the_line_counting_blank_ones(tmp_path):
    rows = open_rows(write(tmp_path / "a.jsonl", '{"a": 1}\n\n  \r\n{"a": }\r\n[1]\n\n{"a": 2}\r\n'))
    assert len(rows) == 4 and rows[0] == {"a": 1} and rows[3] == {"a": 2}
    assert rows.where(1) == f"{tmp_path}/a.jsonl:4" and rows.where(3) == f"{tmp_path}/a.jsonl:7"
    with pytest.raises(BadRow, match=r"not valid JSON: Expecting value \(column 7\)"):
        rows[1]
    with pytest.raises(BadRow, match="expected an object with keys, found list"):
        rows[2]


def test_byte_order_mark_and_max_samples_that_hides_a_broken_line(tmp_path):
    rows = open_rows(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n{"a'), max_samples=2)
    assert [rows[0], rows[1], len(rows)] == [{"a": 1}, {"a": 2}, 2]


DATASET_STATE = '{"_data_files": [{"filename": %s}]}'
NO_DATA = [
    ("*.json", None, FileNotFoundError, r"no data file matches .*\*\.json"),
    ("gsm8k_trian.jsonl", None, FileNotFoundError, r"did you mean .*/gsm8k_train\.jsonl\?"),
    ("dta/x.jsonl", None, FileNotFoundError, r"did you mean .*/data\?"),
    ("zzz.parquet", None, FileNotFoundError, r"there is no zzz\.parquet in"),
    ("a.jsonl", b'{"a": "\xff"}\n', BadRow, "not valid UTF-8"),
    ("a.json", b'[\n{"a": 1},\n{"a" 2}]', ValueError, r"a\.json:3: not valid JSON"),
    ("a.json", BOM + b'[{"text": "a"},, {}]', ValueError, r"a\.json:1: not valid JSON: .*\(column \d+\)"),
    ("a.jsonl", b"", ValueError, "holds no rows"),
    ("a.json", b"\n\n", ValueError, "holds no rows"),
    ("a.md", b"a,b", ValueError, r"\.jsonl, \.ndjson, \.json, \.csv"),
    ("a.parquet.gz", b"a,b", ValueError, r"a\.parquet\.gz: expected a name that ends in"),
    ("a.parquet", b"no", ValueError, r"a\.parquet cannot be read: "),
    ("a.csv", b"a,b\n1,2\n1,2,3\n", ValueError, r"a\.csv cannot be read: .* Row #3: Expected 2 columns, got 3"),
    ("data", None, ValueError, "save_to_disk"),
    *(
        ("data", (DATASET_STATE % name).encode(), ValueError, r"state\.json names .* which is no file of its folder")
        for name in ('"../a.arrow"', '"/etc/a.arrow"', '"x/../../a.arrow"', "null", "3", '""', r'"a\u0000"')
    ),
]


@pytest.mark.parametrize(("name", "content", "error", "message"), NO_DATA)
def test_what_is_no_data_is_refused(name, content, error, message, tmp_path):
    write(tmp_path / "gsm8k_train.jsonl", "{}")
    (tmp_path / "data").mkdir()
    if content is not None:
        write(tmp_path / (f"{name}/state.json" if name == "data" else name), content)
    with pytest.raises(error, match=message):
        [entry.row() for entry, _ in open_rows(tmp_path / name).read()]


def test_a_dataset_dict_asks_for_its_split(tmp_path):
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data, test=data).save_to_disk(tmp_path / "d")
    with pytest.raises(ValueError, match=r"splits train, test: name one of them, for example .*/d/train"):
        open_rows(tmp_path / "d")
    assert len(open_rows(tmp_path / "d" / "train")) == 2


TABLE = 'prompt,answer,n\n"1 + 1,\n2?",NA,007\n\u2028,"say ""2""",\n'
TABLE_ROWS = [
    {"prompt": "1 + 1,\n2?", "answer": "NA", "n": "007"},
    {"prompt": "\u2028", "answer": 'say "2"', "n": None},
]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_values_of_a_csv_are_texts(tmp_path, name):
    text = TABLE.replace(",", "\t").replace("1 + 1\t", "1 + 1,") if name == "a.tsv" else TABLE
    content = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    rows = open_rows(write(tmp_path / name, content))
    assert [rows[1], rows[0]] == TABLE_ROWS[::-1] and len(rows) == 2
    places = [place for entry, place in rows.read() if entry.row()]
    assert [entry.row() for entry, _ in rows.read(places[0])] == TABLE_ROWS[1:]
    assert rows.where(1) == f"{tmp_path}/{name} row 1"
    assert len(open_rows(tmp_path / name, max_samples=1)) == 1


def test_compressed_lines_of_text(tmp_path):
    rows = open_rows(write(tmp_path / "a.txt.gz", gzip.compress("ä\n\nb\u2028c\n".encode())))
    assert [entry.row() for entry, _ in rows.read()] == [rows[0], rows[1]] == [{"text": "ä"}, {"text": "b\u2028c"}]
    assert rows.where(1) == f"{tmp_path}/a.txt.gz:3"


@pytest.mark.parametrize("form", ["gz", "zst"])
def test_a_compressed_file_that_is_cut_is_named(tmp_path, form):
    text = b"".join(b'{"n": %d}\n' % n for n in range(9999))
    packed = gzip.compress(text) if form == "gz" else pa.compress(text, "zstd", asbytes=True)
    rows = open_rows(write(path := tmp_path / f"a.jsonl.{form}", packed))
    assert rows[9998] == {"n": 9998}
    write(path, packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{form} cannot be read: "):
        list(open_rows(path).read())
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{form} cannot be read: "):
        len(open_rows(path))


def test_objects_that_datasets_writes_as_texts_are_objects(tmp_path):
    import datasets

    mixed = [{"x": {"a": 1}}, {"x": [1, {"b": "c"}]}]
    data = datasets.Dataset.from_list(mixed, features=datasets.Features({"x": datasets.Json()}))
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "b")
    for path in (tmp_path / "a.parquet", tmp_path / "b"):
        rows = open_rows(path)
        assert [rows[0], rows[1]] == [entry.row() for entry, _ in rows.read()] == mixed


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"text": {"type": "string"}}}}}
CALLS = [{"function": {"name": "f", "arguments": {"x": 0}}}], [{"function": {"name": "g", "arguments": {"text": ""}}}]
WIDENED = [  # tables give all objects of a column all keys
    {
        "messages": [{"role": "user", "content": "a", "name": "B"}],
        "tools": [TOOL],
        "extra": {"a": {"b": 1}},
        "n": [1, None],
    },
    {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": CALLS[0]},
            {"role": "assistant", "content": "c", "tool_calls": CALLS[1]},
            {"role": "user", "content": "d"},
        ],
        "tools": [OTHER],
        "extra": {"c": None},
        "n": [],
    },
]


@pytest.mark.parametrize("form", ["parquet", "arrow", "directory"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_table_fills_in_is_dropped_at_every_depth(form, stream, tmp_path):
    table, path = pa.Table.from_pylist(WIDENED), tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "arrow":
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table)
    else:
        import datasets

        datasets.Dataset(table).save_to_disk(path)
    rows = open_rows(path)
    first, second = [row.row() for row, _ in rows.read()] if stream else [rows[0], rows[1]]
    assert first == WIDENED[0] and second == WIDENED[1] | {"extra": {}}


def test_nulls_of_json_texts_in_tables_are_the_persons_own(tmp_path):
    import datasets

    features = datasets.Features({"a": datasets.Json(), "b": {"c": datasets.Json(), "d": datasets.Value("int64")}})
    rows = [{"a": {"x": None}, "b": {"c": {"y": None}, "d": None}}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "a")
    assert open_rows(tmp_path / "a")[0] == {"a": {"x": None}, "b": {"c": {"y": None}}}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", BOM + b'[{"text": "\xc3\xa4"}, {"text": "b"}]'),
        ("a.json", BOM + b'\n [{"text": "\xc3\xa4"},\n {"text": "b"}]'),
        ("a.json", BOM + b'{"text": "\xc3\xa4"}\n{"text": "b"}'),
        ("a.jsonl", BOM + b'{"text": "\xc3\xa4"}\n' + BOM + b'{"text": "b"}\n'),
        ("a.jsonl", BOM + b'\n{"text": "\xc3\xa4"}\n{"text": "b"}\n'),
        ("a.txt", BOM + b"\xc3\xa4\n" + BOM + b"\nb\n"),
        ("a.txt.gz", gzip.compress(BOM + b"\xc3\xa4\r\nb\r\n", mtime=0)),
        ("a.csv", BOM + b"text\n\xc3\xa4\nb\n"),
    ],
)
def test_a_byte_order_mark_is_no_text(name, content, tmp_path):
    rows = open_rows(write(tmp_path / name, content))
    wanted = [{"text": "ä"}, {"text": "b"}]
    assert [rows[i] for i in range(len(rows))] == [row.row() for row, _ in rows.read()] == wanted


def test_media_of_a_table_are_left_as_they_are(tmp_path):
    """`datasets` would open the files, URLs and programs (EPS) that a table names as its images or sounds."""
    import datasets

    picture = {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0", "path": "a.eps"}
    rows = [{"x": {"a": 1}, "image": picture, "several": [{"a": picture}]}]
    features = {"x": datasets.Json(), "image": datasets.Image(), "several": datasets.List({"a": datasets.Image()})}
    data = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "b")
    assert open_rows(tmp_path / "a.parquet")[0] == open_rows(tmp_path / "b")[0] == rows[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow", "a.txt", "a.jsonl.gz"])
def test_what_is_no_file_is_refused_and_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} cannot be read: .*is a FIFO, not a regular file"):
        open_rows(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / "*"):
        with pytest.raises(ValueError, match=f"{name} cannot be read: .*is a device, not a regular file"):
            open_rows(path)


@pytest.mark.parametrize(("name", "form"), [("a.jsonl", "gz"), ("a.json", "bz2"), ("a.txt", "zst"), ("a.csv", "gz")])
def test_a_file_that_decompresses_to_hundreds_of_times_its_size_is_refused(name, form, tmp_path, monkeypatch):
    monkeypatch.setattr(raw_files, "LEAST_UNPACKED", 2**18)
    text = b"x" * 1000
    line = {"a.jsonl": b'{"x": "%s"}\n', "a.txt": b"%s\n", "a.csv": b"%s\n", "a.json": b'{"x": "%s"},\n'}[name] % text
    content = (b"[" if name == "a.json" else b"") + line * 4000
    with pa.CompressedOutputStream(str(tmp_path / f"{name}.{form}"), CODECS[f".{form}"]) as out:
        out.write(content)
    with pytest.raises(ValueError, match=rf"{name}\.{form} cannot be read: .*decompresses to more than .* 200 times"):
        rows = open_rows(tmp_path / f"{name}.{form}")
        len(rows)
    with pytest.raises(ValueError, match="200 times"):
        list(open_rows(tmp_path / f"{name}.{form}").read())


def test_text_that_is_repeated_may_be_small(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as out:
        out.writelines('{"x": 1}\n' for _ in range(3 * 10**5))
    assert len(open_rows(tmp_path / "a.jsonl.gz")) == 3 * 10**5


@pytest.mark.parametrize(("name", "ends"), [("a.jsonl", True), ("a.txt", False), ("a.jsonl.gz", True)])
def test_a_line_that_is_too_long_is_named(name, ends, tmp_path, monkeypatch):
    monkeypatch.setattr(raw_files.open_binary, "__defaults__", (2**21,))
    good = b'{"text": "' + b"x" * 2**20 + b'"}\n'
    content = good * 3 + good.replace(b"x", b"xxxx") + good * ends
    with gzip.open(tmp_path / name, "wb") if name.endswith("gz") else open(tmp_path / name, "wb") as out:
        out.write(content if ends else content[:-1])
    rows = open_rows(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} cannot be read: it has a line of more than 2,097,152 bytes"):
        len(rows)
    with pytest.raises(ValueError, match="it has a line of more than"):
        list(rows.read())


def test_an_array_in_one_line_may_be_longer_than_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_files.open_binary, "__defaults__", (2**10,))
    write(tmp_path / "a.json", json.dumps([{"x": "y" * 100}] * 100))
    assert len(open_rows(tmp_path / "a.json")) == 100
    monkeypatch.setattr(raw_files, "MAX_ARRAY", 10**4)
    with pytest.raises(ValueError, match=r"a\.json cannot be read: it is an array of more than 10,000 bytes; write"):
        open_rows(tmp_path / "a.json")


def test_rows_of_brackets_are_refused(tmp_path):
    brackets = "[" + "[]," * 200_000 + "[]]"
    write(tmp_path / "a.jsonl", '{"x": ' + brackets + "}")
    with pytest.raises(BadRow, match=r"200,003 brackets in 600,0.. bytes"):
        open_rows(tmp_path / "a.jsonl")[0]
    write(tmp_path / "a.json", brackets)
    with pytest.raises(ValueError, match=r"a\.json cannot be read: it has 200,002 brackets"):
        open_rows(tmp_path / "a.json")
