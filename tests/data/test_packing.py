"""The order of a training batch's rows: parts that cost the same, micro-batches that are full, groups in one piece."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.examples import Example, to_batch
from coalign.data.loader import build_loader
from coalign.data.packing import Packing, tokens_of
from coalign.modules.layout import pack
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def of_lengths(lengths):
    """A row of a single sequence for each number, or of several for each tuple."""
    sizes = [n if isinstance(n, tuple) else (n,) for n in lengths]
    return [[Example([0] * n, {"n": i}) for n in size] for i, size in enumerate(sizes)]


def loader(path, rows, packing, **settings):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=[SourceConfig(path=str(path))], chat_template="none")
    return build_loader(config, TOKENIZER, split="train", seed=0, packing=packing, **settings)


def test_by_hand():
    def packed(lengths, *packing):
        return [len(example.tokens) for row in Packing(*packing).order(of_lengths(lengths)) for example in row]

    assert packed([1, 3], 1) == [3, 1]
    assert packed([2, 9, 4, 7, 6, 2], 2) == [9, 4, 2, 7, 6, 2]  # 15 and 15
    assert packed([4, 4, 6, 6], 1, 10) == [6, 4, 6, 4]  # long to short would need three micro-batches
    assert packed([(1, 3), 5, (2, 4)], 1) == [2, 4, 5, 1, 3]  # by what a row has together
    assert packed([12, 3], 1, 10) == [12, 3]  # to refuse what does not fit is up to the micro-batches


@given(
    st.lists(st.one_of(st.integers(1, 50), st.tuples(st.integers(1, 20), st.integers(1, 20))), max_size=40),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(50, 120)),
)
def test_every_row_is_there_once_and_parts_differ_by_less_than_a_row(lengths, parts, most):
    rows = of_lengths(lengths)
    ordered = Packing(parts, most).order(rows)
    assert sorted(map(id, ordered)) == sorted(map(id, rows))
    if len(rows) < parts:
        return
    split = to_batch(ordered, range(len(rows))).split(parts, keep="group")
    tokens = [part.tokens_total for part in split]
    assert max(tokens) - min(tokens) <= 2 * max(map(tokens_of, rows))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_are_alike_and_micro_batches_full(tmp_path, parts):
    lengths = [8 + int(400 * (71 * i % 97 / 97) ** 3) for i in range(192)]  # few are long
    rows = [{"prompt": "p", "answer": "a" * n, "n": i} for i, n in enumerate(lengths)]
    settings = {"kind": "conversations", "batch_size": 48}
    plain = loader(tmp_path / "a.jsonl", rows, None, **settings)
    packed = loader(tmp_path / "a.jsonl", rows, Packing(parts, 900), **settings)
    waste = Counter()
    for _ in range(16):
        before, after = plain.next(), packed.next()
        assert before["group"].tolist() == after["group"].tolist()
        assert sorted(r["n"] for r in before["rows"]) == sorted(r["n"] for r in after["rows"])
        for name, batch in (("before", before), ("after", after)):
            split = batch.split(parts, keep="group")
            tokens = [part.tokens_total for part in split]
            attention = [int((part.lengths**2).sum()) for part in split]
            waste[name, "tokens"] += parts * max(tokens) / sum(tokens) - 1
            waste[name, "attention"] += parts * max(attention) / sum(attention) - 1
            # Ranks go in step, so each has as many micro-batches as the one with the most.
            waste[name, "micros"] += parts * max(len(part.micro(900)) for part in split)
            waste[name, "calls"] += sum(len(pack(part).blocks) for part in split)
    assert waste["after", "calls"] < 0.8 * waste["before", "calls"]
    assert waste["after", "micros"] < waste["before", "micros"]
    if parts > 1:
        assert waste["after", "tokens"] < 0.3 * waste["before", "tokens"]
        assert waste["after", "attention"] < 0.3 * waste["before", "attention"]


def test_the_sequences_of_a_row_stay_together(tmp_path):
    rows = [{"prompt": "p", "chosen": "a" * (13 * i % 50 + 2), "rejected": "b", "n": i} for i in range(12)]
    batch = loader(tmp_path / "a.jsonl", rows, Packing(3, 60), kind="preferences", batch_size=12).next()
    assert batch["group"].tolist() == [g for g in range(12) for _ in range(2)]
    assert batch["index"].tolist() == [0, 1] * 12
    numbers = [row["n"] for row in batch["rows"]]
    assert numbers[::2] == numbers[1::2] and sorted(numbers[::2]) == list(range(12))
