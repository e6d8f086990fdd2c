"""Indexed datasets: Megatron's bytes, documents to learn from, and builds that go on."""

import json
import multiprocessing
import shutil
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coalign.cli import app
from coalign.config.schema import DataConfig
from coalign.data.loader import build_loader
from coalign.data.shuffle import DataPhase
from coalign_megatron.indexed import IndexedDocuments, IndexedTokens
from coalign_megatron.indexed_build import BuildPlan, _run_tasks, _tokenise, build, join
from coalign_megatron.indexed_writer import IndexedWriter, choose_dtype
from tests.data.reading import texts
from tests.tiny import tiny_tokenizer


def write(prefix, *documents, dtype=np.uint16):
    with IndexedWriter(prefix, np.dtype(dtype)) as out:
        for document in documents:
            out.add(document)
    return IndexedTokens(prefix)


def test_the_bytes_of_megatrons_format(tmp_path):
    write(tmp_path / "a", [1, 2, 3], [4], [], [500, 6])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 500, 6)
    header = b"MMIDIDX\0\0" + bytes([1, 0, 0, 0, 0, 0, 0, 0]) + bytes([8]) + struct.pack("<QQ", 4, 5)
    rest = struct.pack("<4i", 3, 1, 0, 2) + struct.pack("<4q", 0, 6, 8, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert (tmp_path / "a.idx").read_bytes() == header + rest
    data = write(tmp_path / "b", [1, 2, 3], [], [70000], dtype=np.int32)
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 3], [], [70000]]
    assert data.read(0, 1, 9).tolist() == [2, 3] and data.tokens == 4
    assert (choose_dtype(65499), choose_dtype(65500)) == (np.uint16, np.int32)
    files = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(ValueError, match="token ids 1 to 70000 do not fit into uint16"):
        write(tmp_path / "c", [1, 70000])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "b", np.dtype(np.uint16)) as out:
        out.add([2])
        raise RuntimeError
    assert sorted(p.name for p in tmp_path.iterdir()) == files == ["a.bin", "a.idx", "b.bin", "b.idx"]
    assert IndexedTokens(tmp_path / "b")[0].tolist() == [1, 2, 3]  # an error leaves the old files alone


def test_documents_of_several_sequences(tmp_path):
    """As Megatron writes them with --split-sentences: the index has more sequences than documents."""
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 3)
    index = struct.pack("<3i", 2, 1, 1) + struct.pack("<3q", 0, 8, 12) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "a.idx").write_bytes(header + index)
    (tmp_path / "a.bin").write_bytes(struct.pack("<4i", 7, 8, 9, 10))
    data = IndexedTokens(tmp_path / "a")
    assert [data[i].tolist() for i in range(len(data))] == [[7, 8, 9], [10]]


def test_megatron_core_reads_what_is_written_and_what_it_writes_is_read(tmp_path):
    """The same bytes for the same documents by its own writer; its merge, and a document of two sequences."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for dtype, documents in ((np.uint16, [[1, 2, 3], [65499], [7] * 40]), (np.int32, [[70000, 1], [2], [3, 4]])):
        ours, theirs, both = (str(tmp_path / f"{name}{np.dtype(dtype)}") for name in ("ours", "theirs", "both"))
        write(Path(ours), *documents, dtype=dtype)
        builder = megatron.IndexedDatasetBuilder(f"{theirs}.bin", dtype=dtype)
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{theirs}.idx")
        for suffix in (".bin", ".idx"):
            assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
        found = megatron.IndexedDataset(ours)
        assert [found[i].tolist() for i in range(len(found))] == documents and found[0].dtype == dtype
        assert found.sequence_lengths.tolist() == [len(document) for document in documents]
        assert found.document_indices.tolist() == [0, 1, 2, 3]

        builder = megatron.IndexedDatasetBuilder(f"{theirs}2.bin", dtype=dtype)
        builder.add_document([5, 6, 7], [2, 1])
        builder.add_index(theirs)
        builder.finalize(f"{theirs}2.idx")
        split = IndexedTokens(Path(f"{theirs}2"))
        assert [split[i].tolist() for i in range(len(split))] == [[5, 6, 7], *documents]
        join([split, IndexedTokens(Path(ours))], Path(both))
        found = megatron.IndexedDataset(both)
        assert [found[i].tolist() for i in range(len(found))] == [[5, 6], [7], *documents, *documents]
        assert found.document_indices.tolist() == [0, 2, 3, 4, 5, 6, 7, 8]


DAMAGES = [
    (".bin", lambda tokens: tokens[:-2], "a.bin has 8 bytes; its index tells of 10"),
    (".idx", lambda index: index[:-1], "a.idx has 81 bytes; 82 are what its header tells of"),
    (".idx", lambda index: b"not an index", "is no index of an indexed dataset"),
    (".idx", lambda index: index[:9] + b"\2" + index[10:], "is no index of an indexed dataset"),
    (".idx", lambda index: index[:42] + struct.pack("<q", 2) + index[50:], "do not lie one after the other"),
    (".idx", lambda index: index[:-8] + struct.pack("<q", 1), "documents do not follow one another"),
]


@pytest.mark.parametrize(("suffix", "damage", "message"), DAMAGES, ids=[message for *_, message in DAMAGES])
def test_files_that_are_not_what_they_say(tmp_path, suffix, damage, message):
    write(tmp_path / "a", [1, 2, 3], [4, 5])
    file = tmp_path / f"a{suffix}"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        IndexedTokens(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"b\.idx"):
        IndexedTokens(tmp_path / "b")


def test_joined_in_order(tmp_path):
    parts = [write(tmp_path / "a", [1], [2, 3]), write(tmp_path / "b"), write(tmp_path / "c", [4])]
    join(parts, tmp_path / "all")
    data = IndexedTokens(tmp_path / "all")
    assert [data[i].tolist() for i in range(len(data))] == [[1], [2, 3], [4]]
    write(tmp_path / "whole", [1], [2, 3], [4])
    assert (tmp_path / "all.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()
    with pytest.raises(FileExistsError, match=r"all\.bin exists, and is left as it is"):
        join(parts, tmp_path / "all")
    with pytest.raises(ValueError, match="holds int32, the others uint16"):
        join([parts[0], write(tmp_path / "d", [1], dtype=np.int32)], tmp_path / "none")
    assert not (tmp_path / "none.bin").exists()


# ---- learning from them


def test_pieces_train_every_token_but_the_first_once(tmp_path):
    source = IndexedDocuments(write(tmp_path / "a", [*range(10)], [20, 21], [30], []).prefix, 100, max_tokens=4)
    found = [source[i][0] for i in range(len(source))]
    assert [example.tokens for example in found] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [20, 21]]
    assert all(example.loss_mask == [False] + [True] * (len(example.tokens) - 1) for example in found)
    assert [example.columns["index"] for example in found] == [0, 1, 2, 0]
    assert [example.row["_row"] for example in found] == [0, 0, 0, 1]
    assert source.tokens == 14
    assert source.report() == "4 documents: 2 used, in 4 pieces of up to 4 tokens, 2 of less than two tokens left out"
    source = IndexedDocuments(write(tmp_path / "a", [1, 2], [3, 99]).prefix, 99)
    assert source[0][0].tokens == [1, 2]
    with pytest.raises(ValueError, match="a, document 1: token 99, but the tokenizer has 99"):
        source[1]
    with pytest.raises(ValueError, match=r"a\.idx holds documents as token ids; this recipe reads rows of text"):
        loader(str(tmp_path / "a.idx"), kind="prompts")


def test_phases_and_max_samples_choose_documents(tmp_path):
    data = write(tmp_path / "a", *([i, i + 1] for i in range(40))).prefix
    taken = lambda source: {source[i][0].row["_row"] for i in range(len(source))}  # noqa: E731
    mine, theirs = (IndexedDocuments(data, 100, phase=DataPhase({"a": 1, "b": 3}, name)) for name in "ab")
    assert len(mine) == 10 and taken(mine) | taken(theirs) == set(range(40)) and not taken(mine) & taken(theirs)
    assert taken(IndexedDocuments(data, 100, max_samples=3)) == {0, 1, 2}
    with pytest.raises(ValueError, match="a has no usable rows"):
        IndexedDocuments(write(tmp_path / "a", [1]).prefix, 100)


def loader(path, kind="documents", **config):
    config = DataConfig.model_validate({"train": path, "chat_template": "none", **config})
    return build_loader(config, tiny_tokenizer(), kind=kind, split="train", batch_size=2, seed=0)


@pytest.mark.parametrize("keep", [False, True])
def test_the_same_batches_as_from_the_text(tmp_path, keep):
    rows = [{"text": text} for text in ("abcdefghij", "kl", "mno<|im_end|>pqrs")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_tokenizer(tmp_path / "model")
    plan = BuildPlan((str(tmp_path / "a.jsonl"),), str(tmp_path / "model"), keep_special_tokens=keep)
    counts = build(plan, tmp_path / "a", processes=1)
    text = {"path": str(tmp_path / "a.jsonl"), "keep_special_tokens": keep}
    ours, theirs = (next(loader(source).all())[1] for source in (str(tmp_path / "a.idx"), text))
    assert counts["markers"] == (not keep)
    assert texts(ours) == texts(theirs)
    assert ours["tokens"].equal(theirs["tokens"]) and ours["loss_mask"].equal(theirs["loss_mask"])


def test_a_run_resumes_only_on_the_same_tokens(tmp_path):
    write(tmp_path / "a", *([i, i + 1] for i in range(20)))
    first = loader(str(tmp_path / "a.idx"))
    first.next()
    state = json.loads(json.dumps(first.state_dict()))
    second = loader(str(tmp_path / "a.idx"))
    second.load_state_dict(state)
    assert second.next()["tokens"].equal(first.next()["tokens"])
    write(tmp_path / "a", *([i + 1, i] for i in range(20)))
    with pytest.raises(ValueError, match="is not the data that the checkpoint was made with"):
        loader(str(tmp_path / "a.idx")).load_state_dict(state)


def test_mixed_by_tokens(tmp_path):
    """Documents of 3 and of 30 tokens at equal weights: as many tokens of each, so ten times as many short ones."""
    for name, size in (("short", 3), ("long", 30)):
        write(tmp_path / name, *([1] * size for _ in range(50)))
    mixed = loader([str(tmp_path / "short.idx"), str(tmp_path / "long.idx")], mixing="tokens")
    drawn = Counter(int(n) for _ in range(1000) for n in mixed.next().lengths)
    assert 8 < drawn[3] / drawn[30] < 12.5


# ---- building them


def corpus(tmp_path, count=25):
    tiny_tokenizer(tmp_path / "model")
    rows = [{"text": f"{i} and {i * i}"} if i % 7 else {"text": " "} for i in range(count)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    return BuildPlan((str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")), str(tmp_path / "model"), chunk=4)


def test_the_result_does_not_depend_on_processes_or_chunks(tmp_path, monkeypatch):
    # Forks, because new processes would import for seconds what this one has.
    monkeypatch.setattr("coalign_megatron.indexed_build.get_context", lambda _: multiprocessing.get_context("fork"))
    plan = corpus(tmp_path)
    advanced = []
    counts = build(plan, tmp_path / "one", processes=1, advance=advanced.append)
    assert counts["rows"] == 27 == sum(advanced) and counts["used"] == 23 and counts["empty"] == 4
    data, tokenizer = IndexedTokens(tmp_path / "one"), tiny_tokenizer()
    assert data.tokens == counts["tokens"]
    read = [tokenizer.decode(data[i].tolist()) for i in range(len(data))]
    assert read[:2] == ["1 and 1<|im_end|>", "2 and 4<|im_end|>"] and read[-2:] == ["one<|im_end|>", "two<|im_end|>"]
    build(BuildPlan(plan.inputs, plan.tokenizer, chunk=1000), tmp_path / "two", processes=2)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    assert not (tmp_path / "one.parts").exists()
    with pytest.raises(FileExistsError, match=r"one\.bin exists, and is left as it is"):
        build(plan, tmp_path / "one", processes=1)


def test_a_build_goes_on_where_it_stopped(tmp_path, monkeypatch):
    plan = corpus(tmp_path)
    build(plan, tmp_path / "whole", processes=1)

    def until_the_third(pool, tasks, limit):
        for number, found in enumerate(_run_tasks(pool, tasks, limit)):
            if number == 3:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr("coalign_megatron.indexed_build._run_tasks", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        build(plan, tmp_path / "a", processes=1)
    assert not (tmp_path / "a.idx").exists() and (tmp_path / "a.parts" / "00000001.json").exists()
    monkeypatch.undo()
    write(tmp_path / "a.parts" / "00000001", [5, 6, 7])  # shows that it is taken as it is
    counts = build(plan, tmp_path / "a", processes=1)
    assert counts["rows"] == 27
    whole, again = (IndexedTokens(tmp_path / name) for name in ("whole", "a"))
    expected = [*(whole[i].tolist() for i in range(3)), [5, 6, 7], whole[6].tolist()]
    assert [again[i].tolist() for i in range(5)] == expected


def test_what_cannot_be_built_is_refused(tmp_path):
    plan = corpus(tmp_path)

    def refuse(message, *inputs):
        with pytest.raises(ValueError, match=message):
            build(BuildPlan(inputs, str(tmp_path / "model")) if inputs else plan, tmp_path / "a", processes=1)

    bad, empty = tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    bad.write_text('{"text": "a"}\n{"content": "b"}\n')
    empty.write_text('{"text": " "}\n')
    refuse(r"bad\.jsonl:2: no key 'text'; the row has content", str(bad))
    counts = build(BuildPlan((str(bad),), str(tmp_path / "model"), bad_rows="drop"), tmp_path / "b", processes=1)
    assert counts == {"rows": 2, "used": 1, "missing": 1, "tokens": 2, "data_source=bad": 1}
    shutil.rmtree(tmp_path / "a.parts", ignore_errors=True)
    refuse(r"empty\.jsonl: no document to write", str(empty))
    assert not (tmp_path / "a.parts").exists()
    (tmp_path / "a.parts").mkdir()
    (tmp_path / "a.parts" / "build.json").write_text(json.dumps({"chunk": 5, "dtype": "uint16"}))
    (tmp_path / "a.parts" / "00000000.json").write_text("{}")
    refuse(r"a\.parts holds parts of a build with other chunk; remove it")


def test_a_folder_that_no_build_made_is_moved_aside(tmp_path, caplog):
    plan = corpus(tmp_path)
    (tmp_path / "a.parts").mkdir()
    (tmp_path / "a.parts" / "mine.txt").write_text("kept")
    build(plan, tmp_path / "a", processes=1)
    assert not (tmp_path / "a.parts").exists() and "a.parts.before-1" in caplog.text
    assert (tmp_path / "a.parts.before-1" / "mine.txt").read_text() == "kept"


def test_the_commands(tmp_path):
    corpus(tmp_path)
    run = lambda *words: CliRunner().invoke(app, ["indexed", *map(str, words)])  # noqa: E731
    made = run("build", tmp_path / "b.txt", "-o", tmp_path / "b", "--tokenizer", tmp_path / "model", "--processes", 1)
    assert made.exit_code == 0, made.output
    assert run("merge", tmp_path / "b", tmp_path / "b.idx", "-o", tmp_path / "bb").exit_code == 0
    shown = run("inspect", tmp_path / "bb", "--tokenizer", tmp_path / "model")
    assert shown.exit_code == 0 and "document 0, 4 tokens: one<|im_end|>" in shown.output and "uint16" in shown.output
    assert len(IndexedTokens(tmp_path / "bb")) == 4
    assert run("build", tmp_path / "b.txt", "-o", "x", "--tokenizer", "m", "--missing", "maybe").exit_code == 2


def test_a_part_is_written_once(tmp_path):
    plan = corpus(tmp_path)
    from coalign_megatron.indexed_build import START, BuildTask

    task = BuildTask(plan, 0, START, tmp_path / "part")
    first = _tokenise(task)
    (tmp_path / "part.bin").write_bytes(b"kept")
    assert _tokenise(task) == first and (tmp_path / "part.bin").read_bytes() == b"kept"
