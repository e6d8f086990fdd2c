"""Formats of answers: the strings of each family, calls that cannot be read, damaged strings, vLLM's own parsers."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from coalign.environments.episode import Turn
from coalign.types import Status
from coalign_serve import formats
from coalign_serve.formats import ParsedAnswer, ToolRequest, find_format, llama
from coalign_serve.serving.response_templates import TEMPLATES
from tests.tiny import tiny_tokenizer

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["array", "null"]}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}]
OBJECT = '{"name": "f", "arguments": {"a": 1, "b": "x"}}'
LIST = f'{OBJECT}, {{"name": "g", "arguments": {{}}}}]'
HEADER = "<|channel|>commentary to=functions."


@dataclass(frozen=True)
class Family:
    """How a family writes that it thinks "hm", says "See.", and calls f(a=1, b="x") and g()."""

    first: str  # the call of f, up to its `closing`
    second: str = ""
    closing: str = ""
    begin: str = ""  # before and behind all calls
    end: str = ""
    think: tuple[str, str] = ("", "")
    says: str = "See."

    @property
    def calls(self) -> str:
        return self.begin + self.first + self.closing + self.second + self.closing

    @property
    def raw(self) -> str:
        begin, end = self.think
        return (f"{begin}hm{end}" if begin else "") + self.says + self.calls + self.end


THINK = ("<think>\n", "\n</think>\n\n")
FAMILIES = {
    "qwen3": Family(
        f"<tool_call>\n{OBJECT}",
        '\n<tool_call>{"name": "g", "arguments": {}}',
        "\n</tool_call>",
        end="<|im_end|>",
        think=THINK,
    ),
    "qwen3_coder": Family(
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n",
        "\n<tool_call>\n<function=g>\n",
        "</function>\n</tool_call>",
        end="<|im_end|>",
        think=THINK,
    ),
    "glm45": Family(
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key><arg_value>x</arg_value>\n",
        "<tool_call>g",
        "</tool_call>",
        begin="\n",
        end="<|observation|>",
        think=("<think>", "</think>"),
    ),
    "kimi_k2": Family(
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1, "b": "x"}',
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}",
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|><|im_end|>",
        think=("<think>", "</think>"),
    ),
    "deepseek_v3": Family(
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜>\n',
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",  # V3.1
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        think=THINK,
    ),
    "deepseek_v32": Family(
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>\n',
        '\n<｜DSML｜invoke name="g">',
        "</｜DSML｜invoke>",
        begin="\n\n<｜DSML｜function_calls>\n",
        end="\n</｜DSML｜function_calls><｜end▁of▁sentence｜>",
        think=THINK,
    ),
    "mistral": Family(
        '[TOOL_CALLS]f[ARGS]{"a": 1, "b": "x"}',
        "[TOOL_CALLS]g[CALL_ID]abcdefg12[ARGS]{}",
        end="</s>",
        think=("[THINK]", "[/THINK]"),
    ),
    "mistral_list": Family(f"[TOOL_CALLS] [{LIST}", end="</s>"),
    "granite": Family(f"<|tool_call|>[{LIST}", end="<|end_of_text|>"),
    "phi4": Family(f"functools[{LIST}", end="<|end|>"),
    "gpt_oss": Family(
        HEADER + 'f <|constrain|>json<|message|>{"a": 1, "b": "x"}',
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
        "<|call|>",
        begin="<|end|><|start|>assistant",
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        says="<|channel|>commentary<|message|>See.",
    ),
    "gemma4": Family(
        '<|tool_call>call:f{a:1,b:<|"|>x<|"|>}',
        "<|tool_call>call:g{}",
        "<tool_call|>",
        end="<turn|>",
        think=("<|channel>thought\n", "<channel|>"),
    ),
    "functiongemma": Family(
        "<start_function_call>call:f{a:1,b:<escape>x<escape>}",
        "<start_function_call>call:g{}",
        "<end_function_call>",
        end="<start_function_response>",
    ),
}
THINKING = [name for name, family in FAMILIES.items() if family.think[0]]
WRITES_JSON = sorted(set(FAMILIES) - {"qwen3_coder", "glm45", "deepseek_v32"})
families = pytest.mark.parametrize("name", FAMILIES)


def parse(name: str, raw: str, prompt_end: str = "", tools=TOOLS) -> ParsedAnswer:
    return find_format(name)(Turn(f"text of {raw}", raw, [1], Status.OK), tools, prompt_end)


def list_calls(answer: ParsedAnswer) -> list[tuple[str, dict]]:
    assert all(call.error is None for call in answer.calls), answer
    return [(call.name, dict(call.arguments)) for call in answer.calls]


def assert_refused(answer: ParsedAnswer, raw: str, message: str = "") -> None:
    """A call that cannot be read: the text stays, and the call is counted once."""
    [call] = answer.calls
    assert (answer.text, answer.reasoning, call.name) == (f"text of {raw}", "", "")
    assert call.error.reason == "bad_json" and message in str(call.error)


def test_every_family_is_tried():
    assert FAMILIES.keys() == TEMPLATES.keys()


@families
def test_reasoning_text_and_calls(name):
    family = FAMILIES[name]
    answer = parse(name, family.raw, *TEMPLATES[name]["start_anchor"][:1])
    assert (answer.text, answer.reasoning) == ("See.", "hm" if family.think[0] else "")
    assert list_calls(answer) == [("f", {"a": 1, "b": "x"}), ("g", {})][: None if family.second else 2]
    assert parse(name, "See.\nNo call, <b>no</b> {tool}.") == ParsedAnswer("See.\nNo call, <b>no</b> {tool}.")


@families
def test_text_behind_calls(name):
    family = FAMILIES[name]
    answer = parse(name, f"{family.calls} end.")
    if family.closing or name == "deepseek_v3":
        assert answer.text == "end." and [name for name, _ in list_calls(answer)] == ["f", "g"]
    else:  # nothing but the end of the turn ends such a call
        assert answer.calls[0].error


@families
def test_an_unfinished_call_is_refused(name):
    family = FAMILIES[name]
    cut = family.begin + family.first[: family.first.index("x", family.first.index("b")) + 1]
    assert_refused(parse(name, cut), cut)


@families
def test_the_end_of_the_turn_ends_a_call(name):
    family = FAMILIES[name]
    if family.closing:
        assert list_calls(parse(name, family.begin + family.first)) == [("f", {"a": 1, "b": "x"})]


@pytest.mark.parametrize("name", THINKING)
def test_a_call_inside_reasoning_is_reasoning(name):
    begin, end = FAMILIES[name].think
    call = "I may <call> f" if name == "gpt_oss" else FAMILIES[name].calls.strip()
    answer = parse(name, f"{begin}{call}{end}{FAMILIES[name].says}")
    assert answer == ParsedAnswer("See.", call)
    assert parse(name, f"{begin}{call}") == ParsedAnswer("", call)


@pytest.mark.parametrize("name", THINKING)
def test_the_prompt_may_begin_the_reasoning(name):
    family = FAMILIES[name]
    begin, end = family.think
    for start in TEMPLATES[name]["start_anchor"]:
        prompt = f"{begin}of an earlier turn{start}"
        answer = parse(name, f"hm{end}{family.says}{family.calls}", prompt + begin)
        assert (answer.text, answer.reasoning, len(answer.calls)) == ("See.", "hm", 2)
        assert parse(name, family.says, f"{prompt}{begin}{end}") == ParsedAnswer("See.")  # switched off


@pytest.mark.parametrize("name", WRITES_JSON)
def test_arguments_that_no_template_can_write_are_refused(name):
    family = FAMILIES[name]
    quotes = re.search(r'(<\|"\|>|<escape>|")x', family.first)[1]
    for value in ("[" * 65 + "]" * 65, "[" * 5000 + "]" * 5000, '"\\ud800"', "9" * 5000, "{", "1 1"):
        raw = (family.begin + family.first + family.closing).replace(f"{quotes}x{quotes}", value)
        assert_refused(parse(name, raw), raw)
    deep = "[" * 60 + "]" * 60
    [(_, arguments), *_] = list_calls(parse(name, family.calls.replace(f"{quotes}x{quotes}", deep)))
    assert arguments["b"] == json.loads(deep)


def test_json_of_another_form_is_the_same_call():
    raw = '<tool_call>\n\n { "arguments":{"a":1,\n"b" : "\\u0078"} , "name" :"f"}</tool_call>'
    assert list_calls(parse("qwen3", raw)) == [("f", {"a": 1, "b": "x"})]
    assert_refused(parse("qwen3", raw.replace('"f"', "3")), raw.replace('"f"', "3"), "a call is an object")
    assert_refused(parse("qwen3", '<tool_call>{"name": "f"}</tool_call>'), '<tool_call>{"name": "f"}</tool_call>')
    spaced = "  HAV\u200bING \ud7ff  two  spaces"
    assert parse("qwen3", f"{spaced}<|im_end|>").text == spaced.strip()


def test_types_of_arguments_come_from_the_schema():
    values = {"a": "7", "b": "7", "c": "[1]", "d": "7"}
    raw = "<function=f>" + "".join(f"<parameter={k}>\n{v}\n</parameter>" for k, v in values.items()) + "</function>"
    assert list_calls(parse("qwen3_coder", raw)) == [("f", {"a": 7, "b": "7", "c": [1], "d": "7"})]
    assert list_calls(parse("qwen3_coder", raw, tools=None)) == [("f", values)]
    assert list_calls(parse("qwen3_coder", raw.replace("7", "seven")))[0][1]["a"] == "seven"
    texts = '<tool_call>{"name": "f", "arguments": {"a": "7"}}</tool_call>'
    assert list_calls(parse("qwen3", texts)) == [("f", {"a": "7"})]  # JSON has its types
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"anyOf": 5}}}}}]
    assert_refused(parse("qwen3_coder", raw, tools=broken), raw)


BEGINNINGS = {  # with which no call of the family goes on
    "qwen3_coder": "<function=f",
    "glm45": "<tool_call><arg_key>a</arg_key>",
    "kimi_k2": "<|tool_call_begin|>f<|tool_call_argument_begin|>{}",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f {}",
    "deepseek_v32": "<｜DSML｜invoke f>",
    "mistral": "[TOOL_CALLS][]",
    "gpt_oss": f"{HEADER}f {{}}",
    "gemma4": "<|tool_call>f{}",
    "functiongemma": "<start_function_call>call f{}",
}


def test_bug_15_calls_are_not_dropped_silently():
    """vLLM 45167: a literal end of a call inside of a JSON string. hermes-agent 5315: a call without its form."""
    inside = '<tool_call>{"name": "f", "arguments": {"b": "</tool_call>"}}</tool_call>'
    assert_refused(parse("qwen3", inside), inside, "no valid JSON: Unterminated string")
    for name, beginning in BEGINNINGS.items():
        for raw in (f"See. {beginning}", f"See. {beginning} and more {FAMILIES[name].end}"):
            assert_refused(parse(name, raw), raw)
    fallen = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'  # the form of another family
    for name in ("qwen3_coder", "glm45", "granite"):
        assert_refused(parse(name, fallen), fallen)


def test_bug_16_special_tokens_are_there_when_calls_are_read():
    """vLLM 25281: without the special tokens these texts have no calls."""
    for name in ("kimi_k2", "deepseek_v3", "mistral", "gpt_oss", "gemma4"):
        raw = FAMILIES[name].raw
        text = re.sub(r"<[|｜][^>]*>|<\w*[|｜]>|\[[A-Z_/]+\]|</s>", "", raw)
        assert len(find_format(name)(Turn(text, raw, [1], Status.OK), TOOLS).calls) == 2


def mutate(raw: str, others: list[str], draw: random.Random) -> str:
    for _ in range(draw.randint(1, 4)):
        start, end = sorted(draw.choices(range(len(raw) + 1), k=2))
        end = min(end, start + 20)
        new = draw.choice(["", raw[start:end] * 2, draw.choice(others), draw.choice('{}[]<>"|\n\\\x01:｜é')])
        raw = raw[:start] + new + raw[end:]
    return raw


@families
def test_damaged_strings_are_answers(name, monkeypatch):
    """10,000 in all. Fed in pieces of any length, the answer is the same."""
    draw, family = random.Random(name), FAMILIES[name]
    marks = re.findall(r"<[^>]*>|\[[A-Z_/]+\]|\w+", family.raw)
    for i in range(10_000 // len(FAMILIES) + 1):
        raw = mutate(family.raw, marks, draw)
        answer = parse(name, raw, draw.choice(["", *TEMPLATES[name]["start_anchor"], raw[:40]]))
        if any(call.error for call in answer.calls):
            assert_refused(answer, raw)
        json.dumps([dict(call.arguments) for call in answer.calls], ensure_ascii=False).encode()
        if i % 20 == 0:
            whole = parse(name, raw)
            monkeypatch.setattr(formats, "_PIECE", 1)
            assert parse(name, raw) == whole or (whole.calls[0].error and parse(name, raw).calls[0].error), raw
            monkeypatch.undo()


@pytest.mark.parametrize("name", THINKING)
def test_a_long_answer_is_read_in_time_that_grows_with_its_length(name):
    """Fed at once, its square: minutes for these 100,000 characters of a policy that repeats itself."""
    assert parse(name, "".join(FAMILIES[name].think).replace("\n", "") * 5_000) == ParsedAnswer("")


def test_several_calls_of_llama():
    call = '{"name": "f", "parameters": {"b": "x; {\\"name\\""}}'
    text, calls = llama(Turn(f"{call}; {call}", f"<|python_tag|>{call}; {call}<|eom_id|>", [1], Status.OK))
    assert text == "" and [call.arguments for call in calls] == [{"b": 'x; {"name"'}] * 2


def upper(turn: Turn) -> tuple[str, list[ToolRequest]]:
    return turn.text.upper(), [ToolRequest("f", {})]


def test_formats_are_found_by_name():
    assert find_format(f"{__name__}:upper")(Turn("a", "a", [1], Status.OK)) == ParsedAnswer(
        "A", "", (ToolRequest("f"),)
    )
    text = 'A <think>b</think> <tool_call>{"name": "c"}</tool_call>'
    answer = find_format("Hermes")(Turn(text, text, [1], Status.OK))
    assert answer == ParsedAnswer("A <think>b</think>", "", (ToolRequest("c"),))
    with pytest.raises(ValueError, match=r"'qwen_coder' is no format; did you mean 'qwen3_coder'\?"):
        find_format("qwen_coder")
    with pytest.raises(ValueError, match="response_template"):
        find_format("template", SimpleNamespace(response_template=None))
    with pytest.raises(ValueError, match="unknown keys"):
        find_format("template", SimpleNamespace(response_template=TEMPLATES["qwen3"] | {"fields": {"a": {"b": 1}}}))


def test_a_tokenizer_brings_its_format():
    call = {
        "open": "<c>",
        "close": "</c>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
    fields = {"reasoning_content": {"open": "<t>", "close": "</t>"}, "tool_calls": {**call, "repeats": True}}
    template = {"start_anchor": "A:", "fields": {**fields, "content": {"close": "<e>", "repeats": True, "join": ""}}}
    parse = find_format("template", SimpleNamespace(response_template=template))
    raw = 'hm</t>See.<c>{"name": "f", "arguments": {"a": "1"}}</c><e>'
    answer = parse(Turn("", raw, [1], Status.OK), TOOLS, "A:<t>")
    assert answer == ParsedAnswer("See.", "hm", (ToolRequest("f", {"a": 1}),))


VLLM = {  # its parser, and how many of the two calls it reads as they are
    "qwen3": ("qwen3_json", 2),
    "qwen3_coder": ("qwen3_coder", 2),
    "glm45": ("glm45", 2),
    "kimi_k2": ("kimi_k2", 2),
    "deepseek_v3": ("deepseek_v3", 1),  # V3.1's form has a parser of its own
    "deepseek_v32": ("deepseek_v32", 2),
    "mistral": ("mistral", 1),  # takes the id of a call for a part of its name
    "granite": ("granite", 2),
    "phi4": ("phi4_mini_json", 2),
    "gemma4": ("gemma4", 2),
    "functiongemma": ("functiongemma", 0),  # leaves out what has no quotes
}


@pytest.mark.slow
def test_vllm_reads_the_same():
    """vLLM 0.32. Its parser of gpt-oss reads tokens, and that of Mistral's lists needs Mistral's tokenizer."""
    parsers = pytest.importorskip("vllm.tool_parsers").ToolParserManager
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tokenizer = tiny_tokenizer()
    marks = {mark for family in FAMILIES.values() for mark in re.findall(r"<[^>\s=]*>|\[[A-Z_/]+\]", family.raw)}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "-"}], model="-", tools=tools)
    for name, (parser, count) in VLLM.items():
        raw = FAMILIES[name].says + FAMILIES[name].calls
        theirs = parsers.get_tool_parser(parser)(tokenizer, request.tools).extract_tool_calls(raw, request)
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
        answer = parse(name, raw, tools=tools)
        assert calls[:count] == list_calls(answer)[:count], name
        assert (theirs.content or answer.text).strip() == answer.text == "See.", name
