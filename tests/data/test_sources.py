"""Rows of every kind of file, and what is said when one is broken."""

import json

import pytest

from coalign.data.sources import BadRow, open_rows

ROWS = [{"q": "ä €", "n": 1, "messages": [{"role": "user", "content": "x"}]}, {"q": "b", "n": 2, "messages": []}]


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture(params=["jsonl", "jsonl without last newline", "json", "json lines", "parquet", "directory"])
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
        case "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

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


def test_jsonl_says_the_line_counting_blank_ones(tmp_path):
    rows = open_rows(write(tmp_path / "a.jsonl", '{"a": 1}\n\n  \r\n{"a": }\r\n[1]\n\n{"a": 2}\r\n'))
    assert len(rows) == 4 and rows[0] == {"a": 1} and rows[3] == {"a": 2}
    assert rows.where(1) == f"{tmp_path}/a.jsonl:4" and rows.where(3) == f"{tmp_path}/a.jsonl:7"
    with pytest.raises(BadRow, match=r"not valid JSON: Expecting value \(column 7\)"):
        rows[1]
    with pytest.raises(BadRow, match="expected an object with keys, found list"):
        rows[2]


def test_bytes_that_are_not_utf8(tmp_path):
    rows = open_rows(write(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n'))
    with pytest.raises(BadRow, match="not valid UTF-8"):
        rows[1]


def test_byte_order_mark_and_max_samples_that_hides_a_broken_line(tmp_path):
    rows = open_rows(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n{"a'), max_samples=2)
    assert [rows[0], rows[1], len(rows)] == [{"a": 1}, {"a": 2}, 2]


def test_broken_json_array_says_the_line(tmp_path):
    with pytest.raises(ValueError, match=r"a\.json:3: not valid JSON"):
        open_rows(write(tmp_path / "a.json", '[\n{"a": 1},\n{"a" 2}]'))


def test_missing_files_suggest_the_nearest_name(tmp_path):
    write(tmp_path / "gsm8k_train.jsonl", "{}")
    (tmp_path / "data").mkdir()
    with pytest.raises(FileNotFoundError, match=r"did you mean .*/gsm8k_train\.jsonl\?"):
        open_rows(tmp_path / "gsm8k_trian.jsonl")
    with pytest.raises(FileNotFoundError, match=r"did you mean .*/data\?"):
        open_rows(tmp_path / "dta" / "x.jsonl")
    with pytest.raises(FileNotFoundError, match=r"there is no zzz\.parquet in"):
        open_rows(tmp_path / "zzz.parquet")


def test_what_is_no_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no rows"):
        open_rows(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ValueError, match=r"holds no rows"):
        open_rows(write(tmp_path / "blank.json", "\n\n"))
    with pytest.raises(ValueError, match=r"\.jsonl, \.json, \.parquet"):
        open_rows(write(tmp_path / "a.csv", "a,b"))
    with pytest.raises(ValueError, match="not a readable parquet file"):
        open_rows(write(tmp_path / "a.parquet", "no"))
    with pytest.raises(ValueError, match="save_to_disk"):
        open_rows(tmp_path)


def test_a_dataset_dict_asks_for_its_split(tmp_path):
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data, test=data).save_to_disk(tmp_path / "d")
    with pytest.raises(ValueError, match=r"splits train, test: name one of them, for example .*/d/train"):
        open_rows(tmp_path / "d")
    assert len(open_rows(tmp_path / "d" / "train")) == 2
