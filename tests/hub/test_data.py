"""Data by the names of the hub, and by URLs: files, commits, splits, streams, refusals."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from coalign import load_config
from coalign.config import ConfigError
from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.loader import build_loader
from coalign.data.sources import open_rows
from coalign.hub import HubError
from coalign.hub_data import describe_source, fetch_data, is_dataset, pin_data
from coalign.launch.fetch import fetch_sources, write_commits
from tests.data.reading import TOKENIZER
from tests.hub.conftest import run_in_process, settings_of_a_run

ROWS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


def parquet(rows):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=5)
    return out.getvalue()


def lines(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def add_gsm8k(hub, rows=ROWS):
    files = {
        "README.md": CARD,
        "main/train-00000-of-00002.parquet": parquet(rows[:20]),
        "main/train-00001-of-00002.parquet": parquet(rows[20:]),
        "main/test-00000-of-00001.parquet": parquet(rows[:3]),
        "socratic/train-00000-of-00001.parquet": parquet(rows[:2]),
    }
    return hub.add_dataset("openai/gsm8k", files)


def read(name, **options):
    return [entry.row() for entry, _ in open_rows(name, **options).read()]


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "org/name:train", "org/name:main:train", "org/name@v1.0:main:train", "org/a.b:2023-01:x"):
        assert is_dataset(name), name
    for name in ("data/rows.jsonl", "a/b.csv.gz", "a/b.idx", "name:train", "a/b:c:d:e", "a/b:", "a/*.jsonl", "x.jsonl"):
        assert not is_dataset(name), name
    assert describe_source(f"openai/gsm8k@{'0' * 40}:main:train") == "gsm8k:main:train"
    assert describe_source("https://a.b/c/rows.jsonl.gz?download=true#sha256=1") == "rows.jsonl.gz"


def test_a_split_is_downloaded_once_and_read_without_a_network(hub, monkeypatch):
    commit = add_gsm8k(hub)
    name = pin_data("openai/gsm8k:main:train")
    assert name == f"openai/gsm8k@{commit}:main:train"
    assert read(name) == ROWS
    downloads = [file for file in hub.downloads() if file.endswith(".parquet")]
    assert sorted(downloads) == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    asked = len(hub.requests)
    rows = open_rows(name)
    assert rows[25] == ROWS[25] and rows.where(25).endswith(f"{commit}/main/train-00001-of-00002.parquet row 5")
    assert len(hub.requests) == asked
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert read("openai/gsm8k:main:train") == ROWS


def test_what_a_dataset_does_not_have_is_named(hub):
    add_gsm8k(hub)
    for name, message in (
        ("openai/gsm8k:main:validation", r"gsm8k:main has no split 'validation'; it has train, test"),
        ("openai/gsm8k:man:train", r"gsm8k has no configuration 'man'; it has main, socratic"),
        ("openai/gsm8k:train", r"gsm8k has several configurations: main, socratic. .*`openai/gsm8k:main:SPLIT`"),
        ("openai/gsm8k@v7:main:train", r"openai/gsm8k has no revision 'v7'"),
        ("openai/gsm9k:main:train", r"no file or directory 'openai/gsm9k' here .* and no dataset of this name"),
    ):
        with pytest.raises(HubError, match=message):
            open_rows(name)


def test_a_dataset_without_configurations(hub):
    found = {"a/train": ROWS, "b/train": ROWS[:2], "a/test": ROWS[:1]}
    hub.add_dataset("org/pairs", {f"{name}.jsonl.gz": gzip.compress(lines(rows)) for name, rows in found.items()})
    assert read("org/pairs:train") == ROWS + ROWS[:2]
    with pytest.raises(HubError, match=r"has the splits train, test: name one of them, `org/pairs:train`"):
        open_rows("org/pairs")
    with pytest.raises(HubError, match=r"has no configuration 'main'; it has default"):
        open_rows("org/pairs:main:train")
    hub.add_dataset("org/one", {"rows.csv": b"question,answer\n1?,NA\n"})
    assert read("org/one") == [{"question": "1?", "answer": "NA"}]


def test_no_code_of_a_dataset_is_run(hub, tmp_path):
    hub.add_dataset("org/script", {"script.py": f"open({str(tmp_path / 'ran')!r}, 'w')".encode()})
    with pytest.raises(HubError, match=r"made by code of its own.*script\.py.*org/script@refs/convert/parquet"):
        open_rows("org/script:train")
    assert not (tmp_path / "ran").exists()
    hub.add_dataset("org/images", {"a.md": b""})
    with pytest.raises(HubError, match=r"org/images:train is of files that end in \.md; rows are read of \.jsonl"):
        open_rows("org/images:train")


@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl.gz"])
def test_a_stream_downloads_what_it_reads(hub, form, tmp_path):
    rows = [{"n": n, "text": str(n) * 20_000} for n in range(60)]
    write = {"parquet": parquet, "jsonl": lines, "jsonl.gz": lambda rows: gzip.compress(lines(rows))}[form]
    files = {f"train-{i}.{form}": write(rows[i * 20 : i * 20 + 20]) for i in range(3)}
    hub.add_dataset("org/large", files)
    found = open_rows("org/large:train", stream=True)
    reading = found.read()
    first = [next(reading) for _ in range(25)]
    assert [entry.row() for entry, _ in first] == rows[:25]
    assert not any("train-2" in path and method == "GET" for method, path, _ in hub.requests)
    rest = open_rows("org/large:train", stream=True).read(first[-1][1])
    assert [entry.row() for entry, _ in rest] == rows[25:]
    assert not list(tmp_path.rglob("train-*"))
    assert found.files[1].where(3).startswith("hf://datasets/org/large@")


def test_a_stream_whose_dataset_is_gone_is_named(hub):
    files = {f"train-{i}.jsonl": lines(ROWS) for i in range(2)}
    hub.add_dataset("org/gone", files)
    reading = open_rows("org/gone:train", stream=True).read()
    next(reading)
    hub.repositories["datasets/org/gone"].commits.clear()
    with pytest.raises(HubError, match=r"org/gone@[0-9a-f]{40}: the repository org/gone has no revision"):
        list(reading)


def test_a_dataset_that_is_gated_cut_off_or_damaged(hub, monkeypatch):
    files = {"train.parquet": parquet(ROWS)}
    hub.add_dataset("org/gated", files, gated=True)
    with pytest.raises(HubError, match=r"org/gated is gated: accept its terms on http.*/datasets/org/gated, then give"):
        open_rows("org/gated")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.damage.add("train.parquet")
    with pytest.raises(HubError, match=r"train\.parquet was damaged .* fetches it again"):
        open_rows("org/gated")
    hub.cut["train.parquet"] = [100]
    assert read("org/gated") == ROWS


def test_offline_without_the_cache(hub, monkeypatch):
    name = f"openai/gsm8k@{add_gsm8k(hub)}:main:train"
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"has for main is not in the cache .*, and HF_HUB_OFFLINE or"):
        open_rows(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"no file or directory 'openai/gsm8k' here, .* HF_HUB_OFFLINE forbids"):
        open_rows("openai/gsm8k:main:train")


def test_urls_are_downloaded_once(hub, tmp_path):
    hub.files["/rows.jsonl.gz"] = gzip.compress(lines(ROWS))
    url = f"{hub.endpoint}/rows.jsonl.gz"
    name = pin_data(url)
    assert name.startswith(f"{url}#sha256=") and pin_data(name) == name == pin_data(url)
    assert read(name) == read(url) == ROWS and len(hub.requests) == 1
    [file] = fetch_data(name)
    file.write_bytes(b"x")
    assert read(name) == ROWS and len(hub.requests) == 2
    hub.files["/rows.jsonl.gz"] = gzip.compress(lines(ROWS[:1]))
    file.unlink()
    with pytest.raises(HubError, match=r"rows\.jsonl\.gz is not the file that it was: its SHA-256 is"):
        open_rows(name)
    assert [path.name for path in file.parents[1].iterdir()] == [file.parent.name]


def test_urls_that_give_nothing(hub, monkeypatch):
    hub.files["/rows.jsonl"] = lines(ROWS)
    url = f"{hub.endpoint}/rows.jsonl"
    hub.cut["/rows.jsonl"] = [100]
    with pytest.raises(HubError, match=r"rows\.jsonl.*(100 of [\d,]+ bytes|IncompleteRead)"):
        open_rows(url)
    with pytest.raises(HubError, match="the server answers 401"):
        open_rows(f"{hub.endpoint}/other/rows.jsonl")
    with pytest.raises(HubError, match=r"127\.0\.0\.1:1/rows\.jsonl cannot be downloaded"):
        open_rows("http://127.0.0.1:1/rows.jsonl")
    monkeypatch.setattr("coalign.hub_data.shutil.disk_usage", lambda _: type("Usage", (), {"free": (1 << 30) + 99}))
    with pytest.raises(HubError, match=r"has [\d,]+ bytes or more, and .* has room for 99; COALIGN_CACHE"):
        open_rows(url)


def test_a_run_keeps_the_commit_and_the_content_that_it_began_with(hub, tmp_path):
    commit = add_gsm8k(hub)
    hub.files["/rows.jsonl"] = lines(ROWS)
    url = f"{hub.endpoint}/rows.jsonl"
    config = load_config(settings_of_a_run(tmp_path, train="openai/gsm8k:main:train", eval=url))
    assert not any(name.endswith(".parquet") for name in hub.downloads())
    fetched = fetch_sources(config, rows=False)
    assert not any(name.endswith(".parquet") for name in hub.downloads())
    (tmp_path / "run").mkdir()
    write_commits(tmp_path / "run", config, fetched)
    assert fetched.data.train[0].path == f"openai/gsm8k@{commit}:main:train"
    assert fetched.data.eval[0].path.startswith(f"{url}#sha256=")
    add_gsm8k(hub, ROWS[::-1])
    hub.files["/rows.jsonl"] = lines(ROWS[:3])
    again = fetch_sources(config)
    assert again.data == fetched.data
    assert read(again.data.train[0].path) == read(again.data.eval[0].path) == ROWS


def test_the_key_of_what_is_not_there_is_named(hub, tmp_path):
    add_gsm8k(hub)
    config = load_config(settings_of_a_run(tmp_path, train=["openai/gsm8k:main:valid"]))
    with pytest.raises(ConfigError, match=r"run\.yaml:1: data\.train: openai/gsm8k:main has no split 'valid'"):
        fetch_sources(config, rows=False)


@pytest.mark.parametrize("stream", [False, True])
def test_files_of_mixed_columns_are_read_as_far_as_they_are_known(hub, stream):
    other = [{"prompt": "1?", "answer": "2", "more": {"a": n}} for n in range(3)]
    odd = [{"title": "1?", "body": "2"}]
    files = {f"train-{i}.parquet": parquet(rows) for i, rows in enumerate((ROWS[:4], other, odd))}
    name = f"org/mixed@{hub.add_dataset('org/mixed', files)}:train"

    def loader(**options):
        config = DataConfig(train=[SourceConfig(path=name, **options)], stream=stream, shuffle=False)
        return build_loader(config, TOKENIZER, kind="conversations", split="train", batch_size=7, seed=3)

    assert [row["prompt"] for row in loader(max_samples=7).next()["rows"]][3:5] == ["3 + 1?", "1?"]
    with pytest.raises(
        ValueError, match=r"train-2\.parquet row 0: no key 'prompt'; .* body, title.* 7 rows of mixed:train have"
    ):
        made = loader()
        made.next(), made.next()


def test_a_stream_goes_on_at_its_row(hub):
    name = f"openai/gsm8k@{add_gsm8k(hub)}:main:train"

    def loader(path):
        config = DataConfig(train=[SourceConfig(path=path)], stream=True, stream_window=6)
        return build_loader(config, TOKENIZER, kind="conversations", split="train", batch_size=5, seed=3)

    def draw(loader, times):
        return [row["_row"] for _ in range(times) for row in loader.next()["rows"]]

    whole = loader(name)
    numbers = draw(whole, 8)
    assert sorted(numbers) == list(range(40)) and numbers != sorted(numbers)
    part = loader(name)
    assert draw(part, 5) == numbers[:25]
    again = loader(name)
    again.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert draw(again, 3) == numbers[25:]
    other = loader(f"openai/gsm8k@{add_gsm8k(hub, ROWS[::-1])}:main:train")
    with pytest.raises(ValueError, match=r"gsm8k:main:train is not the stream that the checkpoint was made with"):
        other.load_state_dict(part.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_run_on_a_dataset_of_the_hub(hub, tmp_path, stream):
    add_gsm8k(hub)
    path = settings_of_a_run(tmp_path, train="openai/gsm8k:main:train", eval="openai/gsm8k:main:test")
    checked = run_in_process(hub, tmp_path, "check", str(path), f"data.stream={stream}")
    assert checked.returncode == 0, checked.stdout
    first = run_in_process(hub, tmp_path, "train", str(path), f"data.stream={stream}", "runtime.steps=1")
    assert first.returncode == 0, first.stdout
    offline = {} if stream == "true" else {"HF_HUB_OFFLINE": "1"}
    again = run_in_process(hub, tmp_path, "train", str(path), f"data.stream={stream}", **offline)
    assert again.returncode == 0 and "continuing from" in again.stdout, again.stdout
    assert set(json.loads((tmp_path / "run" / "hub.json").read_text())) == {
        "openai/gsm8k:main:train",
        "openai/gsm8k:main:test",
    }
