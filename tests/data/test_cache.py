"""Tokenised sources on disk: the same batches, found by content, safe against damage and other processes."""

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data import cache as stored
from coalign.data import kinds
from coalign.data.loader import build_loader
from tests.data.reading import assert_same, write
from tests.tiny import CHATML, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ROWS = {
    "prompts": [{"prompt": f"p{i}" * i, "answer": "é", "n": {"deep": [i]}} for i in range(1, 9)] + [{"prompt": ""}],
    "conversations": [{"q": {"text": f"p{i}"}, "answer": "a" * 4 * i} for i in range(1, 9)],
    "documents": [{"text": "word " * 3 * i} for i in range(1, 9)],
    "preferences": [{"prompt": "p", "chosen": "a" * i, "rejected": "b", "margin": i / 3} for i in range(1, 9)],
    "labelled": [{"prompt": "p", "answer": "a" * i, "label": i % 2 == 0} for i in range(1, 9)],
    "steps": [{"prompt": "p", "steps": ["a" * i, "b"], "labels": [1, i / 10]} for i in range(1, 9)],
}
KEYS = {"conversations": {"prompt": "q.text"}}


def loader(path, kind="conversations", tokenizer=TOKENIZER, keys=None, weight=1.0, **config):
    source = SourceConfig(path=path, keys=keys or {}, weight=weight)
    config = {"max_tokens": 60} | config
    return build_loader(DataConfig(train=[source], **config), tokenizer, kind=kind, split="train", batch_size=3, seed=0)


def entries(cache):
    return sorted(path.name for path in Path(cache).iterdir())


@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
def test_cached_draws_are_those_without_a_cache(tmp_path, kind, monkeypatch):
    path, cache = write(tmp_path / "a.jsonl", ROWS[kind]), str(tmp_path / "cache")
    plain = loader(path, kind, keys=KEYS.get(kind))
    built = loader(path, kind, keys=KEYS.get(kind), cache=cache)
    monkeypatch.setattr(kinds.KINDS[kind], "encode", lambda *_: pytest.fail("tokenised again"))
    opened = loader(path, kind, keys=KEYS.get(kind), cache=cache)
    monkeypatch.undo()
    assert plain.report() == built.report() == opened.report()
    assert plain.state_dict() == built.state_dict() == opened.state_dict()
    assert plain.orders[0].tokens == opened.orders[0].tokens
    for _ in range(6):
        batch = plain.next()
        assert_same(batch, built.next())
        assert_same(batch, opened.next())
    for (_, a), (_, b) in zip(plain.all(), opened.all(), strict=True):
        assert_same(a, b)


def test_rows_come_from_the_source_and_only_what_was_added_is_stored(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "p" * 500, "answer": "a", "long": "x" * 5000}])
    loader(path, "prompts", cache=str(tmp_path / "cache"), chat_template="none")
    (entry,) = (tmp_path / "cache").iterdir()
    added = json.loads((entry / "rest").read_bytes())
    assert added == {"row": {"messages": [{"role": "user", "content": "p" * 500}]}, "columns": {}}


def test_what_changes_the_tokens_changes_the_entry_and_nothing_else_does(tmp_path, caplog):
    rows = ROWS["labelled"]
    path, cache = write(tmp_path / "a.jsonl", rows), str(tmp_path / "cache")
    loader(path, cache=cache)
    first = entries(cache)
    assert len(first) == 1 and first[0].startswith("a-")
    caplog.clear()
    for other in ({"shuffle": False}, {"weight": 2.0}, {"mixing": "size"}, {"tokenizer": tiny_tokenizer()}):
        loader(path, cache=cache, **other)
        assert entries(cache) == first
    assert not caplog.records
    seen = 1
    for other in (
        {"kind": "prompts"},
        {"kind": "labelled"},
        {"system": "Be brief."},
        {"max_tokens": 61},
        {"chat_template": "none"},
        {"chat_template": CHATML.replace("\n", " ")},
        {"tokenizer": tiny_tokenizer(eos_token="<|endoftext|>")},
        {"phases": {"a": 1, "b": 1}, "phase": "a"},
        {"phases": {"a": 1, "b": 1}, "phase": "b"},
    ):
        loader(path, **{"cache": cache, **other})
        seen += 1
        assert len(entries(cache)) == seen, other
    write(tmp_path / "a.jsonl", [*rows[:-1], {**rows[-1], "answer": "z" * 8}])
    made = loader(path, cache=cache)
    assert len(entries(cache)) == seen + 1
    assert "z" * 8 in [row["answer"] for _, batch in made.all() for row in batch["rows"]]


@pytest.mark.parametrize(
    ("name", "damage"),
    [("meta.json", "cut"), ("meta.json", "gone"), ("tokens", "flipped"), ("rest", "cut"), ("sequences", "gone")],
)
def test_a_damaged_entry_is_built_again(tmp_path, caplog, name, damage):
    path, cache = write(tmp_path / "a.jsonl", ROWS["labelled"]), tmp_path / "cache"
    loader(path, cache=str(cache))
    (entry,) = cache.iterdir()
    content = (entry / name).read_bytes()
    match damage:
        case "cut":
            (entry / name).write_bytes(content[: len(content) // 2])
        case "flipped":
            (entry / name).write_bytes(content.replace(content[20:21], b"!", 1))
        case "gone":
            (entry / name).unlink()
    with caplog.at_level(logging.WARNING):
        after = loader(path, cache=str(cache))
    assert "tokenising a.jsonl again" in caplog.text
    assert_same(loader(path).next(), after.next())
    assert entries(cache) == [entry.name] and (entry / "tokens").stat().st_size
    caplog.clear()
    loader(path, cache=str(cache))
    assert not caplog.records


def test_several_at_once_leave_one_entry(tmp_path, monkeypatch):
    path, cache = write(tmp_path / "a.jsonl", ROWS["labelled"]), str(tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: loader(path, cache=cache), range(4)))
    assert len(entries(cache)) == 1
    batches = [one.next() for one in made]
    for batch in batches:
        assert_same(batch, batches[0])


def test_nothing_is_left_of_a_source_that_was_refused(tmp_path):
    path, cache = write(tmp_path / "a.jsonl", [*ROWS["labelled"], {"prompt": 3}]), tmp_path / "cache"
    with pytest.raises(ValueError, match=r"a\.jsonl:9: 'prompt' is int"):
        loader(path, cache=str(cache))
    assert entries(cache) == []


def test_what_json_cannot_hold_is_refused_with_its_row(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", ROWS["prompts"][:2])
    plain = kinds.KINDS["prompts"].encode

    def odd(self, row):
        (example,) = plain(self, row)
        example.row["when"] = np.datetime64("2026-11-21")
        return [example]

    monkeypatch.setattr(kinds.KINDS["prompts"], "encode", odd)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: data\.cache cannot keep this row: .*datetime64"):
        loader(path, "prompts", cache=str(tmp_path / "cache"))


def test_arrays_are_mapped(tmp_path):
    path, cache = write(tmp_path / "a.jsonl", ROWS["labelled"]), tmp_path / "cache"
    loader(path, cache=str(cache))
    (entry,) = cache.iterdir()
    assert isinstance(stored._ExampleStore(entry)._tokens, np.memmap)


@pytest.mark.slow
def test_the_key_is_the_same_in_every_process(tmp_path):
    path, cache = write(tmp_path / "a.jsonl", ROWS["labelled"]), str(tmp_path / "cache")
    loader(path, cache=cache)
    code = f"from tests.data.test_cache import loader; loader({path!r}, cache={cache!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert len(entries(cache)) == 1
