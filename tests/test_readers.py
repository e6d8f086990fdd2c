"""Random contents for whatever reads files, rows, texts and settings of strangers: a value or the documented error.

Each target is one line of a table. Rewards, YAML, requests, answers of services and pickles have tests of their own
(`tests/fuzzing.py` is imported there).
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from coalign.checkpoint.manifest import verify_checkpoint
from coalign.companions import REWARDS
from coalign.config import ConfigError, load
from coalign.config.functions import resolve
from coalign.data.batch import Batch
from coalign.data.cache import ARRAYS, HASH, _ExampleStore
from coalign.data.kinds import KINDS
from coalign.data.messages import parse_messages, parse_response, parse_tools, parse_transcript
from coalign.data.sources import BadRow, open_rows
from coalign.data.templates import load_template
from coalign.engine.hooks.guards import _write_dump, read_dump
from coalign.files import hash_file, read_model_config
from coalign.run_files.records import read_records
from coalign_agents import games
from coalign_agents.calculator import evaluate
from coalign_agents.tools import _Toolbox
from coalign_graders import math_answer
from coalign_megatron.convert.huggingface import HuggingFaceReader
from coalign_megatron.convert.sources import find_iteration
from coalign_megatron.families import find_family
from coalign_megatron.indexed import IndexedTokens
from coalign_megatron.indexed_writer import IndexedWriter
from coalign_megatron.vocab.tokenizer import read_tokens
from coalign_serve import formats
from coalign_serve.config.pipeline_file import load_pipeline
from coalign_serve.config.stages import SelectConfig
from coalign_serve.resumable import ResumableOutput
from coalign_serve.select import KEEP, select
from coalign_serve.weights.compare import open_saved_weights
from tests.config.conftest import recipe_defaults
from tests.data.reading import reader, use
from tests.environments.helpers import episode
from tests.fuzzing import CASES, JSON, ODD, damage, try_cases
from tests.rewards.samples import sample
from tests.tiny import tiny_model_dir, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXT = st.text(max_size=60) | ODD
VALUE = JSON | st.just(10**400)


def graft(good: Any) -> st.SearchStrategy[Any]:
    """The structure ``good`` with one to three of its entries replaced by anything, or gone."""

    def change(seed: int, values: list[Any]) -> Any:
        whole, random = {"all": copy.deepcopy(good)}, Random(seed)
        for value in values:
            entries = [(whole, "all")]
            for place, key in entries:
                inner = place[key]
                if isinstance(inner, dict | list):
                    entries += [(inner, each) for each in (inner if isinstance(inner, dict) else range(len(inner)))]
            place, key = random.choice(entries)
            if random.random() < 0.2 and place is not whole:
                del place[key]
            else:
                place[key] = value
        return whole["all"]

    return st.builds(change, st.integers(0, 2**32), st.lists(VALUE, min_size=1, max_size=3))


# ---- files: how a good one is written, what spoils it, and who reads it

CHAT = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": [{"text": "2"}]}], "n": 1}
SCORED = [{"prompt": "q", "group": 0, "response": said, "score": score, "status": "ok"} for said, score in ("a1", "b2")]


def read_rows(path: Path) -> None:
    rows = open_rows(path)
    for row, _ in rows.read():
        attempt(row.row, BadRow)
        row.where()
    for number in range(len(rows)):
        attempt(lambda number=number: rows[number], BadRow)
        rows.where(number)


def attempt(call: Callable[[], Any], *errors: type[Exception]) -> None:
    try:
        call()
    except errors as problem:
        assert str(problem)


def write_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "q", "n": i} for i in range(9)]), path)


def write_arrow(path: Path) -> None:
    import pyarrow
    import pyarrow.ipc

    table = pyarrow.Table.from_pylist([{"prompt": "q" * i, "n": [i]} for i in range(9)])
    with pyarrow.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)


def write_indexed(path: Path) -> None:
    with IndexedWriter(path.with_suffix(""), "int32") as out:
        for document in ([1, 2, 3], [4], []):
            out.add(document)


def read_indexed(path: Path) -> None:
    tokens = IndexedTokens(path.with_suffix(""))
    for document in range(len(tokens)):
        tokens[document].sum()


def write_checkpoint(path: Path) -> None:
    (path.parent / "state.json").write_text("{}")
    entry = {"size": 2, "sha256": hash_file(path.parent / "state.json")}
    path.write_text(json.dumps({"files": {"state.json": entry}}))


def write_cache(path: Path) -> None:
    for name, size in (("rows", 16), ("sequences", 16), ("tokens", 0), ("loss_mask", 0), ("rest", 0)):
        (path.parent / name).write_bytes(bytes(size))
    sums = {name: hash_file(path.parent / name, HASH) for name in ARRAYS}
    path.write_text(json.dumps({"counts": {}, "hash": "x", "tokens": 0, "checksums": sums}))


def resume_output(path: Path) -> None:
    output = path.with_suffix("")
    with ResumableOutput(output, {"seed": 1}) as partial:
        partial.add([{"x": 1}])
        for _ in partial.units():
            pass
        partial.finish()


def read_weights(path: Path) -> None:
    found = HuggingFaceReader(path.parent, pickled=False)
    for name in found.names:
        found.like(name), found.tensor(name)
    open_saved_weights(path.parent)


def read_family(path: Path) -> None:
    hf = read_model_config(path.parent)
    find_family(hf).config(hf)


def select_all(path: Path) -> None:
    for keep in KEEP:
        attempt(lambda keep=keep: select(SelectConfig(data=str(path), keep=keep), path.with_name("out")), ValueError)


def write_tokenizer(path: Path) -> None:
    TOKENIZER.save_pretrained(path.parent)


def write_lines(*rows: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in rows)) and None


def put(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


BATCH = Batch(torch.tensor([2]), {"tokens": torch.tensor([1, 2])}, {"rows": [{"a": 1}]})
PIPELINE = "stages:\n- generate: {model: m, data: {train: t.jsonl}}\n- score: math\n- train: {algorithm: sft}\n"
FILES = {  # name of the file: who writes a good one, who reads it
    "rows.jsonl": (write_lines(CHAT, CHAT), read_rows),
    "rows.json": (put(json.dumps([CHAT, CHAT])), read_rows),
    "rows.txt": (put("one\n\ntwo"), read_rows),
    "rows.parquet": (write_parquet, read_rows),
    "rows.arrow": (write_arrow, read_rows),
    "rows.csv": (put('prompt,n\n"a\nb",1\nc,2\n'), read_rows),
    "rows.jsonl.gz": (lambda path: path.write_bytes(gzip.compress(json.dumps(CHAT).encode())) and None, read_rows),
    "tokens.idx": (write_indexed, read_indexed),
    "scored.jsonl": (write_lines(*SCORED), select_all),
    "out.jsonl.partial": (write_lines({"seed": 1}, [{"x": 1}]), resume_output),
    "manifest.json": (write_checkpoint, lambda path: verify_checkpoint(path.parent)),
    "meta.json": (write_cache, lambda path: _ExampleStore(path.parent)),
    "dump.pt": (lambda path: _write_dump(path, 1, BATCH, {}, ["x"]), read_dump),
    "metrics.jsonl": (write_lines({"step": 1, "loss": 1.0}), lambda path: [*read_records(path)]),
    "config.json": (lambda path: tiny_model_dir(path.parent), read_family),
    "model.safetensors": (lambda path: save_file({"a": torch.ones(2, 3)}, path), read_weights),
    "tokenizer.json": (write_tokenizer, read_tokens),
    "new.txt": (put("one\ntwo\n"), read_tokens),
    "latest_checkpointed_iteration.txt": (put("12"), lambda path: find_iteration(path.parent)),
    "pipeline.yaml": (put(PIPELINE), load_pipeline),
}


@CASES
@pytest.mark.parametrize("name", FILES)
def test_any_file_is_read_or_refused_by_its_name(tmp_path, name, cases):
    write, read = FILES[name]
    path = tmp_path / "made" / name
    path.parent.mkdir()
    write(path)
    good = path.read_bytes()
    strategy = damage(good) | st.binary(max_size=99)
    if name.endswith((".json", ".jsonl", ".partial")):
        lines = [json.loads(line) for line in ([good] if name.endswith(".json") else good.splitlines())]
        strategy |= graft(lines).map(
            lambda some: b"".join(json.dumps(x).encode() + b"\n" for x in (some if isinstance(some, list) else [some]))
        )

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read(path)
        except ConfigError as problem:  # a key that is missing has no place in the file
            assert str(problem)
        except (ValueError, OSError) as problem:
            assert path.name in str(problem) or str(path.parent) in str(problem), problem
            assert len(str(problem)) < 2000

    try_cases(strategy, check, cases)


# ---- values: of rows, of what the policy says, of the command line

ROW = CHAT | {
    "prompt": "1+1?",
    "answer": "2",
    "text": "abc",
    "chosen": "2",
    "rejected": [{"role": "assistant", "content": "3"}],
    "responses": ["a", "b"],
    "scores": [1, 2],
    "margin": 0.5,
    "label": True,
    "steps": ["a", "b"],
    "labels": [1, 0.5],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
ROWS = st.sets(st.sampled_from(sorted(ROW))).flatmap(lambda keys: graft({key: ROW[key] for key in keys}))
ENCODERS = {kind: reader(kind) for kind in KINDS}
JINJA = [b"{{ ", b" }}", b"{% ", b" %}", b"for m in messages", b"endfor", b"m.content", b"range(10**9)", b"| tojson"]
TEMPLATES = damage(b"{% for m in messages %}{{ m['content'] }}{% endfor %}", JINJA).map(
    lambda raw: "{{" + raw.decode(errors="replace")
)
CALLS = [
    b'<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>',
    b'{"name": "calculator"}',
]
SAID = (damage(CALLS[0], CALLS) | damage(CALLS[1], CALLS)).map(lambda raw: raw.decode(errors="replace")) | TEXT
ARITHMETIC = st.lists(
    st.sampled_from([*"0123456789.,+-*/%()^ exj_", "**", "//", "9" * 99, "1e308", "not ", "[1]", "x"])
)
OVERRIDES = st.tuples(
    st.sampled_from(["data", "train", "models.policy.load", "runtime.steps", "reward[0].fn", "reward", "a", "0"])
    | TEXT,
    st.sampled_from([".", "[0]", "[-1]", "[9999999999999999999999]", "=", "[", "..", "=="]),
    TEXT | st.sampled_from(["=1", "=null", "=[1]", "={a: ${b}}", "=${a.b}"]),
).map("".join)
TOOLBOX = _Toolbox.build(["calculator"], timeout=5.0, max_chars=100)


def encode_all(row: Any) -> None:
    for encoder in ENCODERS.values() if isinstance(row, dict) else ():
        attempt(lambda encoder=encoder: use(encoder, row), ValueError)


def parse_all(value: Any) -> None:
    for parse in (parse_messages, parse_response, parse_tools):
        attempt(lambda parse=parse: parse(value, "key"), BadRow)
    attempt(lambda: parse_transcript(str(value), "key"), BadRow)


def render(template: str) -> None:
    attempt(lambda: load_template(TOKENIZER, template).conversation(ROW["messages"]), ValueError)


def call_tools(text: str) -> None:
    turn, one = SimpleNamespace(raw=text, text=text), episode("x")
    for parse in (formats.hermes, formats.llama):
        said, calls = parse(turn)
        assert isinstance(said, str)
        for message in asyncio.run(TOOLBOX.answer(one, calls[:3])):
            assert len(message["content"]) < 200
            json.dumps(message, ensure_ascii=False)


def play(moves: list[str]) -> None:
    for rules in (games.Nim, games.GuessTheNumber):
        board = rules(Random(0))
        for move in moves:
            if board.turn is not None:
                attempt(lambda board=board, move=move: board.play(move), games._IllegalMove)


def override(text: str) -> None:
    attempt(lambda: load({"algorithm": "grpo"}, [text], recipe_defaults), ConfigError)


def reward_answer(answer: Any) -> None:
    """Whatever a row has as its answer: a number or the two errors that `read_truth` documents."""
    row = sample("The answer is B", answer=answer)
    for name in ("exact_match", "contains", "f1", "multiple_choice"):
        attempt(lambda name=name: float(resolve(name, REWARDS)(row)), ValueError, KeyError)
    attempt(lambda: asyncio.run(math_answer.math(row)), ValueError, KeyError)


VALUES: dict[str, tuple[Callable[[Any], None], st.SearchStrategy[Any]]] = {
    "rows": (encode_all, ROWS | VALUE),
    "messages": (parse_all, graft(ROW["messages"]) | graft(ROW["tools"]) | VALUE),
    "templates": (render, TEMPLATES),
    "tool calls": (call_tools, SAID),
    "arithmetic": (lambda text: attempt(lambda: evaluate(text), ValueError), ARITHMETIC.map("".join) | TEXT),
    "moves": (play, st.lists(TEXT | st.integers(-1, 101).map(str), max_size=5)),
    "overrides": (override, OVERRIDES),
    "answers": (reward_answer, VALUE),
}


@CASES
@pytest.mark.parametrize("name", VALUES)
def test_any_value_is_used_or_refused(name, cases):
    check, strategy = VALUES[name]
    try_cases(strategy, check, cases)
