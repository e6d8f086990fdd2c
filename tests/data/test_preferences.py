"""Pairs and rankings as groups of sequences that share their prompt."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coalign.backends.packing import pack
from tests.data.reading import TOKENIZER, assistant, batch, chatml, reader, texts, use, user
from tests.data.test_templates import GENERATION
from tests.tiny import CHATML, tiny_tokenizer

PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "five"}
ASKED = chatml(user("1+1?"), answering=True)


def test_a_pair():
    made = batch("preferences", PAIR, {**PAIR, "margin": 0.5})
    assert set(made.token) == {"tokens", "loss_mask"}
    assert set(made.sequence) == {"group", "index", "prompt_length", "preference", "margin", "rows"}
    assert texts(made)[:2] == [(f"{ASKED}2<|im_end|>", "2<|im_end|>"), (f"{ASKED}five<|im_end|>", "five<|im_end|>")]
    assert made["group"].tolist() == [0, 0, 1, 1] and made["index"].tolist() == [0, 1, 0, 1]
    assert made["preference"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert made["margin"].tolist() == [0.0, 0.0, 0.5, 0.0]  # rows without one have it too
    assert made["prompt_length"].tolist() == [len(TOKENIZER.encode(ASKED))] * 4
    dtypes = {"preference": torch.float32, "margin": torch.float32, "index": torch.int32, "group": torch.int64}
    assert {name: made[name].dtype for name in dtypes} == dtypes
    assert made["rows"][3] == {**PAIR, "margin": 0.5, "_source": "a.jsonl", "_row": 1, "data_source": "a"}


FIRST = [user("hi"), assistant("yes?")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [*FIRST, user("1+1?")], "chosen": "2", "rejected": "five"},
        {"prompt": [*FIRST, user("1+1?")], "chosen": assistant("2"), "rejected": assistant("five")},
        {"prompt": [*FIRST, user("1+1?")], "chosen": [assistant("2")], "rejected": [assistant("five")]},
        {"chosen": [*FIRST, user("1+1?"), assistant("2")], "rejected": [*FIRST, user("1+1?"), assistant("five")]},
        {  # UltraFeedback: the prompt once more under its own key
            "prompt": "1+1?",
            "chosen": [*FIRST, user("1+1?"), assistant("2")],
            "rejected": [*FIRST, user("1+1?"), assistant("five"), user("no answer follows")],
        },
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 1+1?\n\nAssistant: 2",
            "rejected": "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 1+1?\n\nAssistant: five",
        },
        {"prompt": [*FIRST, user("1+1?")], "responses": ["2", [assistant("five")]]},
    ],
)
def test_the_usual_formats_mean_the_same(row):
    made = batch("preferences", row)
    asked = chatml(*FIRST, user("1+1?"), answering=True)
    assert texts(made) == [(f"{asked}2<|im_end|>", "2<|im_end|>"), (f"{asked}five<|im_end|>", "five<|im_end|>")]
    assert made["prompt_length"].tolist() == [len(TOKENIZER.encode(asked))] * 2


def test_responses_of_several_turns_train_the_assistant_only():
    more = [user("sure?"), assistant("yes")]
    row = {"prompt": "1+1?", "chosen": [assistant("2"), *more], "rejected": [assistant("5"), *more]}
    made = batch("preferences", row, system="Be brief.")
    asked = chatml({"role": "system", "content": "Be brief."}, user("1+1?"), answering=True)
    whole, trained = texts(made)[0]
    assert whole == asked + "2<|im_end|>\n" + chatml(*more).removesuffix("\n") and trained == "2<|im_end|>yes<|im_end|>"
    assert made["prompt_length"].tolist() == [len(TOKENIZER.encode(asked))] * 2


def test_conversations_that_part_at_the_user():
    same = [user("hi"), assistant("yes?")]
    row = {
        "chosen": [*same, user("please add"), assistant("ok")],
        "rejected": [*same, user("please go"), assistant("no")],
    }
    made = batch("preferences", row)
    shared = TOKENIZER.encode(chatml(*same) + "<|im_start|>user\nplease ")
    assert made["prompt_length"].tolist() == [len(shared)] * 2
    assert [trained for _, trained in texts(made)] == ["ok<|im_end|>", "no<|im_end|>"]


def test_the_prompt_is_laid_down_once():
    made = batch("preferences", PAIR, {"prompt": "2?", "responses": ["a", "bc", "def"]})
    layout = pack(made)
    prompts = made["prompt_length"]
    saved = int(prompts[0] + 2 * prompts[2])
    assert len(layout.tokens) == made.tokens_total - saved


def test_a_prompt_whose_end_merges_with_one_response_is_shared_up_to_there():
    tokenizer = tiny_tokenizer(merges=(("Ċ", "Ċ"),))  # two line breaks are one token
    made = batch("preferences", {"prompt": "a", "chosen": "\nb", "rejected": "c"}, tokenizer=tokenizer)
    rows = list(made.rows())
    n = int(rows[0]["prompt_length"])
    assert n == int(rows[1]["prompt_length"]) == len(tokenizer.encode(chatml(user("a"), answering=True))) - 1
    assert rows[0]["tokens"][:n].tolist() == rows[1]["tokens"][:n].tolist()
    assert texts(made, tokenizer)[0][1] == "\n\nb<|im_end|>" and texts(made, tokenizer)[1][1] == "c<|im_end|>"


def test_several_responses_have_their_scores_or_their_ranks():
    ranked = {"prompt": "p", "responses": ["a", "b", "c"]}
    assert batch("preferences", ranked)["preference"].tolist() == [0.0, -1.0, -2.0]
    scored = batch("preferences", {**ranked, "scores": [0.5, 2, 0.5]}, ranked)
    assert scored["preference"].tolist() == [0.5, 2.0, 0.5, 0.0, -1.0, -2.0]
    assert scored["index"].tolist() == [0, 1, 2] * 2 and scored["margin"].tolist() == [0.0] * 6


def test_rows_with_nothing_to_choose_are_counted_or_refused():
    rows = [
        PAIR,
        {**PAIR, "rejected": "2"},
        {**PAIR, "chosen": ""},
        {**PAIR, "rejected": [assistant(" ")]},
        {**PAIR, "rejected": None},
        {"prompt": "p", "responses": ["a", "b"], "scores": [1.0, 1]},
        {"prompt": "p", "responses": ["a", "a"], "scores": [1.0, 2.0]},
        {"prompt": " ", "chosen": "a", "rejected": "b"},
        {**PAIR, "rejected": user("not the assistant")},
        {"chosen": [user("p")], "rejected": [user("p"), assistant("a")]},
    ]
    examples = reader("preferences")
    assert len(use(examples, *rows)) == 1
    assert examples.report() == "1 used, 6 empty, 3 with nothing to choose between"
    for row, key, message in [
        (rows[1], "on_identical", "a.jsonl:1: chosen, rejected are identical"),
        (rows[5], "on_identical", r"a.jsonl:1: 'scores' are all 1\.0"),
        (rows[2], "on_empty", "a.jsonl:1: 'chosen' is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            use(reader("preferences", **{key: "error"}), row)


LONG = {"prompt": "0123456789", "chosen": "abc", "rejected": "d"}
PLAIN = {"chat_template": "none"}  # tokens are bytes


def test_a_long_prompt_is_cut_alike_for_all_responses():
    made = batch("preferences", LONG, **PLAIN, on_long="truncate_left", max_tokens=9)
    assert texts(made) == [("56789abc<|im_end|>", "abc<|im_end|>"), ("56789d<|im_end|>", "d<|im_end|>")]
    assert made["prompt_length"].tolist() == [5, 5] and len(pack(made).tokens) == 5 + 4 + 2
    made = batch("preferences", LONG, **PLAIN, on_long="truncate_left", max_prompt_tokens=4)
    assert [whole for whole, _ in texts(made)] == ["6789abc<|im_end|>", "6789d<|im_end|>"]
    both = batch("preferences", LONG, **PLAIN, on_long="truncate_left", max_prompt_tokens=4, max_tokens=7)
    assert both["prompt_length"].tolist() == [3, 3]
    wide = batch("preferences", LONG, **PLAIN, on_long="truncate_left", max_prompt_tokens=4, max_tokens=12)
    assert wide["prompt_length"].tolist() == [4, 4]


def test_a_cut_prompt_keeps_its_bos():
    template = "{{ bos_token + messages[0]['content'] }}{% if messages[1:] %}{{ messages[1]['content'] }}{% endif %}"
    tokenizer = tiny_tokenizer(chat_template=template, bos_token="<|endoftext|>")
    made = batch("preferences", LONG, tokenizer=tokenizer, on_long="truncate_left", max_prompt_tokens=4)
    assert [whole for whole, _ in texts(made, tokenizer)] == [
        "<|endoftext|>789abc<|im_end|>",
        "<|endoftext|>789d<|im_end|>",
    ]
    alone = reader("preferences", tokenizer=tokenizer, on_long="truncate_left", max_prompt_tokens=1)
    assert use(alone, LONG) == []  # a BOS is no prompt


def test_a_response_is_never_cut():
    examples = reader("preferences", **PLAIN, on_long="truncate_left", max_tokens=4)
    assert use(examples, LONG, {**LONG, "chosen": "e"}) != []
    assert examples.report() == (
        "1 used, 1 over 1024 tokens of prompt or 4 in all, 1 of these cut to 1024 tokens of prompt or 4 in all"
    )
    for policy in ("drop", "error"):
        examples = reader("preferences", **PLAIN, max_prompt_tokens=9, on_long=policy)
        if policy == "drop":
            assert use(examples, LONG) == [] and examples.report() == "0 used, 1 over 9 tokens of prompt"
        else:
            with pytest.raises(ValueError, match="10 tokens of prompt, 4 of response; over 9 tokens of prompt"):
                use(examples, LONG)


def test_keys_of_the_run_and_of_the_source():
    row = {"q": "1+1?", "x": {"good": "2", "bad": {"text": "five"}}, "a.b": 2}
    keys = {"prompt": "q", "chosen": "x.good", "rejected": "x.bad.text", "margin": "a.b", "absent": "x.no.where"}
    made = batch("preferences", row, keys=keys)
    assert texts(made) == texts(batch("preferences", PAIR)) and made["margin"].tolist() == [2.0, 0.0]
    assert made["rows"][0]["chosen"] == "2" and "absent" not in made["rows"][0]
    renamed = {"prompt": "1+1?", "good": "2", "bad": "five"}
    assert texts(batch("preferences", renamed, chosen_key="good", rejected_key="bad")) == texts(made)
    with pytest.raises(ValueError, match=r"no key 'chosen' \(x\.good in this source\); the row has prompt, q, x"):
        use(reader("preferences", keys=keys), {"q": "p", "x": {}})


def test_the_prompt_format_and_tools_reach_all_responses():
    made = batch("preferences", {**PAIR, "n": 3}, prompt_format="{prompt} ({n})")
    assert all(whole.startswith(chatml(user("1+1? (3)"), answering=True)) for whole, _ in texts(made))
    tokenizer = tiny_tokenizer(chat_template="{% if tools %}{{ tools | length }} tools\n{% endif %}" + CHATML)
    tool = {"type": "function", "function": {"name": "add"}}
    made = batch("preferences", {**PAIR, "tools": [tool]}, tokenizer=tokenizer)
    assert all(whole.startswith("1 tools\n<|im_start|>") for whole, _ in texts(made))


said = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=8).filter(str.strip)


@given(said, st.lists(said, min_size=2, max_size=4, unique=True), st.sampled_from([CHATML, GENERATION]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whatever_is_said_the_prompt_is_shared_and_exactly_the_responses_are_trained(prompt, responses, jinja):
    made = batch("preferences", {"prompt": prompt, "responses": responses}, chat_template=jinja)
    asked = chatml(user(prompt), answering=True)
    assert texts(made) == [(f"{asked}{r}<|im_end|>", f"{r}<|im_end|>") for r in responses]
    n = int(made["prompt_length"][0])
    assert made["prompt_length"].tolist() == [n] * len(responses)
    assert {tuple(row["tokens"][:n].tolist()) for row in made.rows()} == {tuple(TOKENIZER.encode(asked))}
