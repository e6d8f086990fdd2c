"""Rows as other tools write them: LLaMA-Factory's, OpenAI's for fine-tuning, ms-swift's."""

import json

import pytest

from tests.data.families import CALL, FAMILIES, TOOL, answer, family_tokenizer, user
from tests.data.reading import TOKENIZER, batch, chatml, reader, texts, use
from tests.data.reading import assistant as said
from tests.tiny import tiny_tokenizer

ALPACA = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [user("Hi"), said("Hello"), user("Add.\n\n1 + 1"), said("2")]
QWEN = family_tokenizer("Qwen2.5")


def text(row, kind="conversations", **config):
    return texts(batch(kind, row, **config), config.get("tokenizer", TOKENIZER))[0]


@pytest.mark.parametrize("history", [[["Hi", "Hello"]], '[["Hi", "Hello"]]'])
def test_alpaca_with_system_and_history(history):
    row = ALPACA | {"system": "Be brief.", "history": history}
    assert text(row)[0].removesuffix("\n") == chatml(SYSTEM, *TURNS).removesuffix("\n")
    prompts = batch("prompts", row, system="Be long.")
    assert TOKENIZER.decode(prompts["tokens"]) == chatml(SYSTEM, *TURNS[:3], answering=True)
    for nothing in (None, ""):
        bare = ALPACA | {"system": nothing, "history": nothing or []}
        assert text(bare) == text(ALPACA) and text(bare, system="S")[0].startswith("<|im_start|>system\nS<")


def test_pairs_of_alpaca_and_sharegpt():
    turn = [{"from": "human", "value": "Add.\n\n1 + 1"}]
    pair = {"chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"}}
    wanted = texts(batch("preferences", {"prompt": "Add.\n\n1 + 1", "chosen": "2", "rejected": "3"}))
    assert texts(batch("preferences", {"conversations": turn} | pair)) == wanted
    alpaca = {"instruction": "Add.", "input": "1 + 1", "chosen": "2", "rejected": "3"}
    assert texts(batch("preferences", alpaca)) == wanted
    assert text(alpaca | {"system": "Be brief."}, "preferences")[0].startswith(chatml(SYSTEM))
    with pytest.raises(ValueError, match=r"keys: \{label: kto_tag\}"):
        batch("labelled", {"conversations": [*turn, pair["chosen"]], "kto_tag": True})


FUNCTION = CALL["function"]
ARGUMENTS = FUNCTION["arguments"]
RESULT = {"role": "tool", "name": "add", "content": "3.5"}
CALLED = [user("sum?"), answer("", tool_calls=[CALL]), RESULT, said("3.5")]
SHAREGPT = [
    {"from": "human", "value": "sum?"},
    {"from": "function_call", "value": json.dumps(FUNCTION)},
    {"from": "observation", "value": "3.5"},
    {"from": "gpt", "value": "3.5"},
]
LEGACY = [
    user("sum?"),
    {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": json.dumps(ARGUMENTS)}},
    {"role": "function", "name": "add", "content": "3.5"},
    said("3.5"),
]
SWIFT = [
    user("sum?"),
    {"role": "tool_call", "content": json.dumps(FUNCTION)},
    {"role": "tool_response", "content": "3.5"},
    said("3.5"),
]
TAGGED = [*LEGACY[:1], {"role": "function_call", "content": FUNCTION}, *LEGACY[2:]]


@pytest.mark.parametrize("messages", [SHAREGPT, LEGACY, SWIFT, TAGGED], ids=["sharegpt", "legacy", "swift", "tagged"])
def test_calls_of_tools_in_every_form(messages):
    wanted = text({"messages": CALLED, "tools": [TOOL]}, tokenizer=QWEN)
    assert '{"name": "add", "arguments": {"a": 1, "b": [2.5], "unit": "km"}}' in wanted[1]
    for tools in ([TOOL], json.dumps([TOOL["function"]])):
        key = "conversations" if messages is SHAREGPT else "messages"
        assert text({key: messages, "tools": tools}, tokenizer=QWEN) == wanted
    assert text({"messages": messages, "functions": [TOOL["function"]]}, tokenizer=QWEN) == wanted


def test_calls_behind_a_block_of_reasoning_and_several_at_once():
    turn = {"from": "function_call", "value": f"<think>\nto add\n</think>\n\n{json.dumps([FUNCTION, FUNCTION])}"}
    made = text({"conversations": [SHAREGPT[0], turn]}, tokenizer=family_tokenizer("Qwen3"))[1]
    assert made.startswith("<think>\nto add\n</think>") and made.count('"name": "add"') == 2
    refused = (("add(1)", "message 1: function_call' is no valid JSON"), ("[3]", "a tool call is an object"))
    for value, message in refused:
        with pytest.raises(ValueError, match=message):
            text({"conversations": [SHAREGPT[0], turn | {"value": value}]}, tokenizer=QWEN)
    both = {"role": "assistant", "content": "", "tool_calls": [CALL], "function_call": FUNCTION}
    with pytest.raises(ValueError, match="message 1 has both tool_calls and function_call"):
        text({"messages": [user("sum?"), both]}, tokenizer=QWEN)


@pytest.mark.parametrize("nothing", [None, "", " ", {}, "null", "{}"])
def test_arguments_that_are_nothing_are_an_empty_object(nothing):
    call = {"id": None, "type": "function", "function": {"name": "now", "arguments": nothing}}
    made = text({"messages": [user("?"), {"role": "assistant", "content": None, "tool_calls": [call]}]}, tokenizer=QWEN)
    assert '{"name": "now", "arguments": {}}' in made[1]
    for wrong in (3, [1], '"a"'):
        call = {"function": {"name": "now", "arguments": wrong}}
        with pytest.raises(ValueError, match=r"message 1: the arguments of 'now' are .*; expected an object"):
            text({"messages": [user("?"), {"role": "assistant", "tool_calls": [call]}]}, tokenizer=QWEN)


WEIGHTED = [user("Hi"), answer("Hello", weight=0), user("1?"), answer("2", weight=1)]
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% generation %}{{ m.content if m.role == 'assistant' }}{% endgeneration %}"
    "{{ m.content if m.role != 'assistant' }}{{ '<|im_end|>\n' }}{% endfor %}"
)


@pytest.mark.parametrize("jinja", ["auto", GENERATION, "qwen3-training", FAMILIES["Qwen3"]])
def test_answers_of_weight_0_are_not_learned(jinja):
    learned = text({"messages": WEIGHTED}, chat_template=jinja)[1]
    assert learned.endswith("2<|im_end|>") and "Hello" not in learned
    speakers = {"user": "human", "assistant": "gpt"}
    turns = [{"from": speakers[m["role"]], "value": m["content"], "weight": m.get("weight")} for m in WEIGHTED]
    assert text({"conversations": turns}, chat_template=jinja)[1] == learned


def test_weights_of_other_kinds_and_values():
    pair = {"prompt": "1?", "chosen": [answer("a", weight=0), user("?"), answer("b")], "rejected": [said("c")]}
    assert text(pair, "preferences")[1] == "b<|im_end|>"
    qwen3 = family_tokenizer("Qwen3")
    assert text({"messages": WEIGHTED}, reasoning="last", tokenizer=qwen3)[1].endswith("2<|im_end|>")
    assert text({"messages": [user("Hi") | {"weight": 0}, said("Hello")]})[1] == "Hello<|im_end|>"
    none = [user("Hi"), answer("Hello", weight=0)]
    examples = reader("conversations")
    assert use(examples, {"messages": none}) == [] and examples.counts["empty"] == 1
    for messages, config, message in (
        ([user("Hi"), answer("Hello", weight=0.5)], {}, "message 1: weight is 0.5; expected 1, or 0"),
        ([user("Hi") | {"weight": 1}, said("Hello")], {}, "weight is 1, and only what the assistant says is learned"),
        (WEIGHTED, {"train_on": "all"}, "message 1 has weight 0, and data.train_on: all"),
    ):
        with pytest.raises(ValueError, match=message):
            text({"messages": messages}, **config)


def test_nulls_that_a_person_wrote_are_absent():
    row = {"messages": [user("1?"), said("2")], "answer": None, "data_source": None, "tools": None, "system": None}
    made = batch("prompts", row)["rows"][0]
    assert made["answer"] == "2" and made["data_source"] == "a"
    for nothing in (None, "", "[]", "null"):
        assert text(row | {"tools": nothing}) == text(row)
    with pytest.raises(ValueError, match=r"no key 'context', which data\.prompt_format names"):
        batch("prompts", {"prompt": "1?", "context": None}, prompt_format="{context} {prompt}")


def test_tools_reach_episodes_in_one_form():
    tokenizer = tiny_tokenizer(chat_template=FAMILIES["Qwen2.5"])
    made = batch("prompts", {"prompt": "1?", "tools": json.dumps([TOOL["function"]])}, tokenizer=tokenizer)
    assert made["rows"][0]["tools"] == [TOOL]
