"""From files to batches: what is used, in which order, and how a run goes on where it stopped."""

import json
from collections import Counter

import pytest
import torch

from coalign.config.schema import DataConfig, SourceConfig
from coalign.data.loader import build_loader
from tests.data.reading import TOKENIZER, drawn, loader, numbered, write
from tests.gsm8k import TEST, needs_gsm8k


def text(batch, i=0):
    return TOKENIZER.decode(list(batch.rows())[i]["tokens"].tolist())


def test_a_prompt_batch(tmp_path):
    rows = [{"question": "1+1?", "solution": "2", "source": "mine"}, {"question": "2+2?", "solution": "4"}]
    made = loader(
        write(tmp_path / "a.jsonl", rows),
        batch_size=2,
        shuffle=False,
        prompt_key="question",
        answer_key="solution",
        system="Be brief.",
        prompt_format="{prompt} ({solution})",
    )
    batch = made.next()
    assert set(batch.token) == {"tokens"} and set(batch.sequence) == {"group", "rows"}
    assert batch["tokens"].dtype == torch.int32 and batch["group"].tolist() == [0, 1]
    assert text(batch) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1? (2)<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1? (2)"}]
    added = {"prompt": "1+1? (2)", "messages": messages, "answer": "2", "_source": "a.jsonl", "_row": 0}
    assert batch["rows"][0] == rows[0] | added | {"data_source": "a"}
    assert made.next()["group"].tolist() == [2, 3]


def test_prompts_of_messages(tmp_path):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    reply = {"role": "assistant", "content": "d"}
    own = [{"role": "system", "content": "Mine."}, said[0]]
    rows = [{"prompt": said}, {"messages": [*said, reply]}, {"prompt": own}]
    made = loader(write(tmp_path / "a.jsonl", rows), batch_size=3, shuffle=False, system="Run's.")
    batch = made.next()
    assert text(batch, 0) == text(batch, 1)
    assert text(batch, 0).startswith("<|im_start|>system\nRun's.<|im_end|>\n<|im_start|>user\na<|im_end|>\n")
    assert text(batch, 0).endswith("user\nc<|im_end|>\n<|im_start|>assistant\n")
    assert text(batch, 2).startswith("<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user\na")
    assert [r["prompt"] for r in batch["rows"]] == ["user: a\n\nassistant: b\n\nuser: c"] * 2 + ["a"]
    system = {"role": "system", "content": "Run's."}
    assert [r["messages"] for r in batch["rows"]] == [[system, *said], [system, *said], own]
    assert [r.get("answer") for r in batch["rows"]] == [None, "d", None]


def test_bad_rows_are_counted_or_refused(tmp_path):
    rows = [{"prompt": "ok"}, {"prompt": "  "}, {"prompt": None}, {"prompt": []}, {"other": 1}, {"prompt": "x" * 90}]
    path = write(tmp_path / "a.jsonl", rows)
    made = loader(path, bad_rows="drop", max_prompt_tokens=80, batch_size=1)
    assert made.report() == "a.jsonl: 6 rows: 1 used, 1 without the key, 3 empty, 1 over 80 tokens"
    assert made.rows == 1 and len(made) == 1
    assert [r["prompt"] for _ in range(3) for r in made.next()["rows"]] == ["ok"] * 3
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"b\.jsonl:2: not valid JSON"):  # whatever the policy
        loader(str(tmp_path / "b.jsonl"), bad_rows="drop")
    with pytest.raises(ValueError, match=r"data\.eval names no file"):
        build_loader(DataConfig(), TOKENIZER, kind="prompts", split="eval", batch_size=1, seed=0)
    with pytest.raises(ValueError, match=r"a\.jsonl:5: no key 'prompt'; the row has other"):
        loader(path)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: 'prompt' is empty"):
        loader(path, on_empty="error")
    with pytest.raises(ValueError, match=r"a\.jsonl:6: 1\d\d tokens; at most 80 are allowed"):
        loader(path, bad_rows="drop", on_long="error", max_prompt_tokens=80)
    with pytest.raises(ValueError, match=r"no usable rows \(6 rows: 0 used.*; data\.max_prompt_tokens is the bound"):
        loader(path, bad_rows="drop", max_prompt_tokens=2)


def test_long_rows_are_cut_on_the_left(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "0123456789" * 9, "answer": "yes"}, {"prompt": "a", "answer": "b"}])
    made = loader(path, on_long="truncate_left", max_prompt_tokens=70, shuffle=False, batch_size=2)
    assert made.report() == "a.jsonl: 2 rows: 2 used, 1 of these cut to 70 tokens"
    batch = made.next()
    assert batch.lengths[0] == 70 and text(batch).endswith("789<|im_end|>\n<|im_start|>assistant\n")


def test_prompt_format_is_checked(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 2)
    for broken in ("{}", "{0}", "{n:x%}", "{prompt.text}"):
        with pytest.raises(ValueError, match=r"a\.jsonl:1: data\.prompt_format .* does not fit the row"):
            loader(path, prompt_format=broken)
    assert loader(path, prompt_format="{{{prompt}}} {n:03d}", shuffle=False).next()["rows"][1]["prompt"] == "{p1} 001"


def test_every_epoch_shows_each_row_once_in_another_order(tmp_path):
    made = loader(numbered(tmp_path / "a.jsonl", 10), batch_size=4)
    assert len(made) == 3 and made.steps(2) == 5
    epochs = drawn(made, 10)
    orders = [epochs[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4 and made.stats()["data/epoch"].value == 4.0
    assert drawn(loader(numbered(tmp_path / "a.jsonl", 10)), 10) == epochs
    assert drawn(loader(numbered(tmp_path / "a.jsonl", 10), seed=1), 10) != epochs
    assert drawn(loader(numbered(tmp_path / "a.jsonl", 10), batch_size=7), 3) == epochs[:21]
    assert drawn(loader(numbered(tmp_path / "a.jsonl", 10), shuffle=False), 5) == [*range(10), *range(10)]


def test_mixing_follows_the_weights_and_each_source_its_own_epochs(tmp_path):
    paths = [
        numbered(tmp_path / "a.jsonl", 30),
        numbered(tmp_path / "b.jsonl", 7, 100),
        numbered(tmp_path / "c.jsonl", 3, 200),
    ]
    made = loader(*paths, weights=[3.0, 1.0, 0.0], batch_size=8)
    assert made.rows == 37
    seen = drawn(made, 250)
    counts = Counter(n // 100 for n in seen)
    assert counts[2] == 0
    assert abs(counts[1] / 2000 - 0.25) < 0.03  # three standard deviations
    for source, size in ((0, 30), (1, 7)):
        of_source = [n for n in seen if n // 100 == source]
        for i in range(0, len(of_source) - size, size):
            assert len(set(of_source[i : i + size])) == size


def test_mixing_by_size_multiplies_weights_with_usable_rows(tmp_path):
    empty = [{"prompt": ""}] * 50
    small = write(tmp_path / "a.jsonl", [*empty, *({"prompt": "p", "n": i} for i in range(10))])
    large = numbered(tmp_path / "b.jsonl", 45, 100)
    seen = Counter(n // 100 for n in drawn(loader(small, large, weights=[2.0, 1.0], mixing="size", batch_size=8), 250))
    assert abs(seen[0] / 2000 - 20 / 65) < 0.03  # three standard deviations
    seen = Counter(n // 100 for n in drawn(loader(small, large, mixing="size", max_samples=55, batch_size=8), 250))
    assert abs(seen[0] / 2000 - 5 / 50) < 0.02


@pytest.mark.parametrize("shuffle", [True, False])
def test_resuming_anywhere_continues_the_run(tmp_path, shuffle):
    paths = numbered(tmp_path / "a.jsonl", 11), numbered(tmp_path / "b.jsonl", 5, 100)
    make = lambda size: loader(*paths, weights=[2.0, 1.0], batch_size=size, shuffle=shuffle)  # noqa: E731
    whole = drawn(make(1), 40)
    running = make(1)
    for position in range(30):
        state = json.loads(json.dumps(running.state_dict()))
        resumed = make(2)
        resumed.load_state_dict(state)
        batch = resumed.next()
        assert [r["n"] for r in batch["rows"]] == whole[position : position + 2]
        assert batch["group"].tolist() == [position, position + 1]
        running.next()
    assert len(json.dumps(running.state_dict())) < 400


def test_a_cursor_is_refused_for_other_data(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 11)
    state = loader(path).state_dict()
    loader(path).load_state_dict(state)
    for message, other in {
        "11 usable rows of a.jsonl then, 12 now": loader(numbered(tmp_path / "b.jsonl", 12)),
        "other content, tokenizer or template": loader(numbered(tmp_path / "c.jsonl", 11, 1)),
        "or template. Restore it": loader(path, system="Be brief."),
        "with 1 data sources, not 2": loader(path, path),
        "seed=0, not 1": loader(path, seed=1),
        "shuffle=True, not False": loader(path, shuffle=False),
    }.items():
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    loader(numbered(tmp_path / "renamed.jsonl", 11)).load_state_dict(state)
    answers = write(tmp_path / "d.jsonl", [{"prompt": f"p{i}", "answer": "other", "n": i} for i in range(11)])
    with pytest.raises(ValueError, match="other content"):
        loader(answers).load_state_dict(state)


def texts(path, lengths):
    """Rows of so many tokens with the byte tokenizer and no template."""
    return write(path, [{"prompt": "x" * length, "n": length} for length in lengths])


def test_a_batch_holds_its_budget_of_tokens_on_average(tmp_path):
    path = texts(tmp_path / "a.jsonl", [80, 60, 40, 35])
    made = loader(path, batch_tokens=100, shuffle=False, chat_template="none")
    # A batch ends where the sum of all tokens so far reaches 100, 200, 300 …
    assert drawn(made, 1) == [80, 60]  # 140
    assert drawn(made, 1) == [40, 35]  # 215
    assert drawn(made, 1) == [80, 60]  # 355
    assert drawn(made, 1) == [40, 35]  # 430
    assert drawn(made, 1) == [80]  # 510
    assert made.state_dict()["over"] == 10
    assert made.next()["group"].tolist() == [9, 10]


def test_a_row_longer_than_the_budget_is_a_batch_and_is_made_up_for(tmp_path):
    path = texts(tmp_path / "a.jsonl", [250, 40, 40, 40, 40, 40])
    made = loader(path, batch_tokens=100, shuffle=False, chat_template="none")
    assert [drawn(made, 1) for _ in range(5)] == [[250], [40], [40], [40, 40], [40, 250]]


@pytest.mark.parametrize("budget", [70, 5000])
def test_steps_of_a_token_budget_end_neither_early_nor_late(tmp_path, budget):
    lengths = [37 * i % 60 + 1 for i in range(40)]
    made = loader(texts(tmp_path / "a.jsonl", lengths), batch_tokens=budget, chat_template="none")
    steps = made.steps(3)
    assert steps == -(-3 * sum(lengths) // budget)
    *rest, last = [drawn(made, 1) for _ in range(steps)]
    assert sum(map(len, rest)) < 3 * 40 <= sum(map(len, rest)) + len(last)


def test_resuming_a_token_budget_anywhere(tmp_path):
    paths = texts(tmp_path / "a.jsonl", range(7, 90, 8)), texts(tmp_path / "b.jsonl", range(150, 200, 10))
    make = lambda: loader(*paths, weights=[2.0, 1.0], batch_tokens=150, chat_template="none")  # noqa: E731
    running, made = make(), make()
    whole = [drawn(made, 1) for _ in range(25)]
    for position in range(20):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
        assert [drawn(resumed, 1) for _ in range(3)] == whole[position : position + 3]
        running.next()


def test_all_goes_through_in_order_and_leaves_the_cursor(tmp_path):
    """Batches hold rows of one source each, and the limit is for each source."""
    made = loader(numbered(tmp_path / "a.jsonl", 5), numbered(tmp_path / "b.jsonl", 4, 100), split="eval")
    found = [(source, [row["n"] for row in b["rows"]], b["group"].tolist()) for source, b in made.all()]
    assert found == [("a", [0, 1, 2, 3], [0, 1, 2, 3]), ("b", [100, 101, 102, 103], [5, 6, 7, 8]), ("a", [4], [4])]
    assert [(source, len(b)) for source, b in made.all(limit=3)] == [("a", 3), ("b", 3)] and made.drawn == 0


def test_a_row_names_its_source_itself_or_has_its_files(tmp_path):
    mixed = write(tmp_path / "mixed.jsonl", [{"prompt": "a", "data_source": "openai/gsm8k"}, {"prompt": "b"}])
    other = write(
        tmp_path / "c.jsonl", [{"prompt": "c", "meta": {"from": "math"}}, {"prompt": "d", "meta": {"from": 7}}]
    )
    sources = [SourceConfig(path=mixed, name="rest"), SourceConfig(path=other, keys={"data_source": "meta.from"})]
    for cache in (None, str(tmp_path / "cache"), str(tmp_path / "cache")):  # without, filled, read
        config = DataConfig(train=sources, shuffle=False, cache=cache)
        made = build_loader(config, TOKENIZER, kind="prompts", split="train", batch_size=4, seed=0)
        assert made.sources == ["7", "math", "openai/gsm8k", "rest"] and made.is_known
    assert {row["prompt"]: row["data_source"] for _, b in made.all() for row in b["rows"]} == {
        "a": "openai/gsm8k",
        "b": "rest",
        "c": "math",
        "d": "7",
    }


@needs_gsm8k
def test_gsm8k():
    made = loader(str(TEST), split="eval", prompt_key="question", max_prompt_tokens=700)
    assert made.report() == "gsm8k_test.jsonl: 1319 rows: 1316 used, 3 over 700 tokens"
    assert sum(len(b) for _, b in made.all()) == 1316
    assert made.next()["rows"][0]["answer"].splitlines()[-1].startswith("####")


def test_source_keys_override_the_runs(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"q": "a", "s": "b"}, {"q": "c", "s": "d"}])
    config = DataConfig(train=[SourceConfig(path=path, prompt_key="q", answer_key="s", max_samples=1)])
    made = build_loader(config, TOKENIZER, kind="conversations", split="train", batch_size=1, seed=0)
    assert made.rows == 1 and text(made.next()).endswith("assistant\nb<|im_end|>\n")
