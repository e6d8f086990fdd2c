"""How families of models write answers: a table of response templates, which transformers' ResponseParser executes.

A template says which patterns open and close the reasoning and the tool calls of a turn; all else is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNREADABLE = "unreadable"  # field of what begins like a call and does not go on like one
# Tokens that end a turn. ResponseParser would take them for a part of a call that is not closed.
TURN_END = (
    r"(?:<\|(?:im_end|endoftext|end_of_text|end|user|observation)\|>|</s>|<eos>|\[EOS\]|<｜end▁of▁sentence｜>"
    r"|<turn\|>|<\|tool_response>|<end_of_turn>|<start_function_response>)\Z"
)


def _describe(
    starts: Sequence[str],
    opening: str,
    closing: str,
    call: dict[str, Any],
    *,
    reasoning: tuple[str, str] | None = ("<think>", "</think>"),
    separator: str = "",
    sign: str = "",
) -> dict[str, Any]:
    """Build a template from patterns.

    ``starts`` end a prompt. Without ``closing`` a call ends with the turn. ``separator`` stands between texts and is
    none. ``sign``: with what a call begins, if its ``opening`` goes on with the name.
    """
    fields = {
        "thinking": reasoning and dict(zip(("open_pattern", "close_pattern"), reasoning, strict=True)),
        "tool_calls": {"open_pattern": opening, **call} | ({"close_pattern": closing} if closing else {}),
        "content": {"close_pattern": separator} if separator else {},
        UNREADABLE: sign and {"open_pattern": sign},
    }
    return {"start_anchor": starts, "fields": {name: field for name, field in fields.items() if field or field == {}}}


def _tags(pattern: str) -> dict[str, Any]:
    """Arguments as tags, texts whose types stand in the tools' schemas: ResponseParser casts what is in `function`.

    What is no tag matches without a key, which ResponseParser refuses.
    """
    call = {"function": {"name": "{name}", "arguments": "{content}"}}
    return {"content": "xml-inline", "content_args": {"tag_pattern": rf"{pattern}|\S"}, "transform": call}


def _braces(quote: str) -> dict[str, Any]:
    """Arguments as {key:<quote>value<quote>}."""
    return _ARGUMENTS | {"content_args": {"unquoted_keys": True, "string_delims": [[quote, quote]]}}


_ARGUMENTS: dict[str, Any] = {"content": "json", "transform": {"name": "{name}", "arguments": "{content}"}}
_OBJECT = {"content": "json", "transform": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_LIST = {"content": "json", "transform": {"name": "{name}", "arguments": "{arguments}"}, "transform_each": True}
_CHATML, _INST = ["<|im_start|>assistant\n"], ["[/INST]", "[/TOOL_RESULTS]"]
_CHANNEL, _MESSAGE = r"(?:<\|start\|>assistant)?<\|channel\|>", r"\s?(?:<\|constrain\|>)?\w{0,16}<\|message\|>"
_NAME, _GAP = r"(?P<name>[\w./-]{1,128})", r"\s{0,9}"
# Turns are fed in pieces. So a pattern does not match what would be another match with more text, and it has no
# unbounded repetition, which would be tried again with every piece.
TEMPLATES = {
    "qwen3": _describe(_CHATML, "<tool_call>", "</tool_call>", _OBJECT),
    "qwen3_coder": _describe(
        _CHATML,
        rf"(?:<tool_call>{_GAP})?<function={_NAME}>",
        "</function>",
        _tags(r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=))"),
        separator="</tool_call>",
        sign="<tool_call>|<function=",
    ),
    "glm45": _describe(
        ["<|assistant|>"],
        rf"<tool_call>{_GAP}{_NAME}",
        "</tool_call>",
        _tags(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        sign="<tool_call>",
    ),
    "kimi_k2": _describe(
        ["<|im_middle|>"],
        rf"<\|tool_call_begin\|>{_GAP}(?:functions\.)?{_NAME}:\d{{1,4}}{_GAP}<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>",
        _ARGUMENTS,
        separator=r"<\|tool_calls_section_(?:begin|end)\|>",
        sign=r"<\|tool_call_begin\|>",
    ),
    "deepseek_v3": _describe(  # and R1-0528, whose arguments are a block of JSON; V3.1's are not
        ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"],
        rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>{_NAME}\n```json\n|{_NAME}<｜tool▁sep｜>(?={_GAP}\{{))",
        r"(?:\n```)?<｜tool▁call▁end｜>",
        _ARGUMENTS,
        separator=r"<｜tool▁calls▁(?:begin|end)｜>",
        sign="<｜tool▁call▁begin｜>",
    ),
    "deepseek_v32": _describe(
        ["<｜Assistant｜>", "</function_results>"],
        rf'<｜DSML｜invoke name="{_NAME}">',
        "</｜DSML｜invoke>",
        _tags(r'<｜DSML｜parameter name="(?P<key>[^"<>\n]+)"[^<>\n]*>(?P<value>.*?)</｜DSML｜parameter>'),
        separator="</?｜DSML｜function_calls>",
        sign="<｜DSML｜invoke",
    ),
    "mistral": _describe(
        _INST,
        rf"\[TOOL_CALLS\]{_GAP}{_NAME}{_GAP}(?:\[CALL_ID\][^\[]{{0,64}})?(?:\[ARGS\]|(?=\{{))",
        r"(?=\[TOOL_CALLS\])",
        _ARGUMENTS,
        reasoning=(r"\[THINK\]", r"\[/THINK\]"),
        sign=r"\[TOOL_CALLS\]",
    ),
    "mistral_list": _describe(_INST, r"\[TOOL_CALLS\]", "", _LIST, reasoning=None),
    "granite": _describe(["<|end_of_role|>"], r"<\|tool_call\|>|<tool_call>", "", _LIST, reasoning=None),
    "phi4": _describe(
        ["<|assistant|>"], r"functools(?=\[)|<\|tool_call\|>", r"<\|/tool_call\|>", _LIST, reasoning=None
    ),
    "gpt_oss": _describe(
        ["<|start|>assistant"],
        rf"{_CHANNEL}\w{{1,16}} to=(?:functions\.)?{_NAME}{_MESSAGE}"
        rf"|(?:<\|start\|>assistant)? ?to=(?:functions\.)?{_NAME}<\|channel\|>\w{{1,16}}{_MESSAGE}",
        r"<\|call\|>|<\|end\|>",
        _ARGUMENTS,
        reasoning=(rf"{_CHANNEL}analysis<\|message\|>", r"<\|end\|>"),
        separator=rf"{_CHANNEL}(?:final|commentary){_MESSAGE}|<\|start\|>assistant|<\|(?:end|return)\|>",
        sign=r"<\|channel\|>\w{1,16} to=",
    ),
    "gemma4": _describe(
        ["<|turn>model\n", "<tool_response|>"],
        rf"<\|tool_call>call:{_NAME}(?=\{{)",
        r"<tool_call\|>",
        _braces('<|"|>'),
        reasoning=(r"<\|channel>thought", r"<channel\|>"),
        sign=r"<\|tool_call>",
    ),
    "functiongemma": _describe(
        ["<start_of_turn>model\n", "<end_function_response>"],
        rf"<start_function_call>call:{_NAME}(?=\{{)",
        "<end_function_call>",
        _braces("<escape>"),
        reasoning=None,
        sign="<start_function_call>",
    ),
}
