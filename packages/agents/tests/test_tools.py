"""Tools: how they are described, called, and what a policy is told when that goes wrong."""

from __future__ import annotations

import asyncio
import json
import time
from fractions import Fraction

import pytest

from coalign.config.errors import ConfigError
from coalign.environments.episode import Turn
from coalign.types import Status
from coalign_agents.calculator import calculator, evaluate
from coalign_agents.tools import _build_tool, tool_use
from coalign_serve.formats import hermes, llama
from tests.environments.helpers import TOKENIZER, chosen, episode, play

HERE = "packages.agents.tests.test_tools"
THERE = "packages.agents.tests.simple_tools"


async def meets(episode, other: str) -> dict:
    """Waits for another call of the same turn."""
    episode.met = getattr(episode, "met", asyncio.Barrier(2))
    await episode.met.wait()
    return {"other": other}


TOOLS = [
    "calculator",
    f"{HERE}:meets",
    *(f"{THERE}:{name}" for name in ("lookup", "breaks", "sleeps", "babbles", "backtracks", "exits")),
]


def test_a_signature_is_the_description():
    described = _build_tool(f"{THERE}:lookup").description
    assert described == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string"},
                    "times": {"type": "integer", "default": 1},
                    "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
                },
                "required": ["word"],
            },
        },
    }
    properties = lambda fn: _build_tool(fn).description["function"]["parameters"]["properties"]  # noqa: E731
    assert "numbers" in properties("calculator")["expression"]["description"]
    assert list(properties(f"{HERE}:meets")) == ["other"]


def test_keyword_only_parameters_are_configuration():
    assert _build_tool({"fn": f"{THERE}:lookup", "prefix": ">"}).configuration == {"prefix": ">"}
    with pytest.raises(ConfigError, match=r"rollout\.tools\[0\]\.word"):
        _build_tool({"fn": f"{THERE}:lookup", "word": "x"})
    with pytest.raises(ValueError, match=r"'calculater' is not in coalign_agents\.tools.*calculator"):
        _build_tool("calculater")


def turn(text: str) -> Turn:
    return Turn(text, f"{text}<|im_end|>", [1], Status.OK)


def test_calls_in_the_form_of_hermes():
    text = 'I ask.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
    rest, calls = hermes(turn(text + '<tool_call>{"name": "b"}</tool_call>'))
    assert [(call.name, call.arguments) for call in calls] == [("a", {"x": 1}), ("b", {})]
    assert rest == "I ask."
    assert hermes(turn("no call")) == ("no call", [])
    arguments = ("[" * 2000 + "]" * 2000, '{"a":' * 500 + "0" + "}" * 500, "9" * 5000, '"\\ud800"')
    hostile = [f'{{"name": "a", "arguments": {{"x": {one}}}}}' for one in arguments]
    for wrong in ('{"name": 3}', "{", '["a"]', '{"name": "a", "arguments": [1]}', "", *hostile):
        _, [call] = hermes(turn(f"<tool_call>{wrong}</tool_call>"))
        assert call.error.reason == "bad_json"
    shallow = hostile[0].replace("[" * 2000, "[" * 60).replace("]" * 2000, "]" * 60)
    assert hermes(turn(f"<tool_call>{shallow}</tool_call>"))[1][0].error is None
    cut = Turn('<tool_call>{"name": "a"}', '<tool_call>{"name": "a"}', [1], Status.OK)  # by a stop string
    assert hermes(cut)[1][0].name == "a"


def test_calls_in_the_form_of_llama():
    rest, [call] = llama(turn('{"name": "a", "parameters": {"x": 1}}'))
    assert (rest, call.name, call.arguments) == ("", "a", {"x": 1})
    assert llama(turn('A dict: {"name": 1}')) == ('A dict: {"name": 1}', [])
    assert llama(turn('{"name": "a", "parameters": '))[1][0].error.reason == "bad_json"


def said(*calls: dict) -> str:
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


def ask(name: str, **arguments) -> dict:
    return {"name": name, "arguments": arguments}


def with_tools(*says, max_turns=4, **arguments):
    one = episode(*says)
    running = play(tool_use, one, tools=TOOLS, max_turns=max_turns, **arguments)
    assert running.calls[0].error is None
    return one, [m["content"] for m in one.messages if m["role"] == "tool"]


def test_a_turn_with_a_call_and_one_with_the_answer():
    one, results = with_tools("Let me see." + said(ask("calculator", expression="2+3")), "5")
    assert results == ["5"]
    assert [m["role"] for m in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert one.messages[1]["content"] == "Let me see."
    assert one.messages[1]["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "2+3"}}
    text = TOKENIZER.decode(one.rows[0].tokens)
    assert text.startswith("<|im_start|>system\n[{") and '"name": "lookup"' in text
    assert chosen(one) == f"Let me see.{said(ask('calculator', expression='2+3'))}<|im_end|>5<|im_end|>"
    assert "<|im_start|>tool\n5<|im_end|>" in text
    assert one.counts["tool_calls"] == 1 and one.counts["turns"] == 2


def test_a_family_s_format_reads_reasoning_and_counts_what_it_cannot_read():
    call, broken = said(ask("calculator", expression="2+3")), said(ask("search", q="x"))[:-14]
    one, results = with_tools(f"<think>hm</think>Well.{call}", f"{call}{broken}", "5", parser="qwen3")
    assert results[0] == "5" and results[1].startswith("Error: the call is no valid JSON")
    first, second = (m for m in one.messages if m["role"] == "assistant" and "tool_calls" in m)
    assert (first["reasoning_content"], first["content"], len(first["tool_calls"])) == ("hm", "Well.", 1)
    assert second == {"role": "assistant", "content": f"{call}{broken}", "tool_calls": []}
    assert one.counts["tool_failed/bad_json"] == 1 and one.counts["tool_calls"] == 2


def test_calls_of_one_turn_run_side_by_side():
    _, results = with_tools(said(ask("meets", other="a"), ask("meets", other="b")), "done")
    assert results == ['{"other": "a"}', '{"other": "b"}']


NESTED = '<tool_call>{{"name": "lookup", "arguments": {{"word": {}{}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("call", "reason", "told"),
    [
        ("<tool_call>{oops</tool_call>", "bad_json", "no valid JSON"),
        (NESTED.format("[" * 200, "]" * 200), "bad_json", "more than 64 levels"),
        (NESTED.format('"\\ud800', '"'), "bad_json", "surrogates not allowed"),
        (said(ask("search", q="x")), "unknown_tool", "there is no tool 'search'; there are: calculator, meets, lookup"),
        (said(ask("lookup")), "bad_arguments", "argument 'word': Field required"),
        (said(ask("lookup", word="a", kind="c")), "bad_arguments", "argument 'kind'"),
        (said(ask("lookup", word="a", other=1)), "bad_arguments", "argument 'other'"),
        (said(ask("breaks", x=3)), "raised", "RuntimeError: no 3"),
        (said(ask("calculator", expression="1/0")), "raised", "division by zero"),
        (said(ask("sleeps", seconds=60)), "timeout", "no result within 1.5 s"),
        (said(ask("backtracks", text="a" * 60)), "timeout", "no result within 1.5 s"),
        (said(ask("exits")), "died", "exited with code 1"),
    ],
)
def test_what_goes_wrong_is_told_and_counted(call, reason, told):
    one, [result] = with_tools(call, "Sorry", tool_timeout=1.5)
    assert result.startswith("Error: ") and told in result
    assert one.counts[f"tool_failed/{reason}"] == 1
    assert one.status == Status.OK


@pytest.mark.parametrize(("patience", "result"), [(20.0, "here"), (0.0, None)])
def test_a_tool_whose_service_fails_is_called_again(tmp_path, patience, result):
    one = episode(said(ask("remote")), "done")
    tool = {"fn": f"{THERE}:remote", "log": str(tmp_path / "calls")}
    running = play(tool_use, one, tools=[tool], patience=patience)
    assert [m["content"] for m in one.messages if m["role"] == "tool"] == ([result] if result else [])
    assert running.calls[0].reason == ("" if result else "ServiceError")


def test_how_a_model_writes_calls_is_a_setting():
    says = '{"name": "calculator", "parameters": {"expression": "6*7"}}'
    one, results = with_tools(says, "42", parser="llama")
    assert results == ["42"] and one.messages[1]["content"] == ""


def test_long_results_are_cut():
    _, [result] = with_tools(said(ask("babbles")), "done", max_result_chars=50)
    assert result == "x" * 50 + "… (10000 characters)"


def test_turns_are_limited():
    one, results = with_tools(*[said(ask("lookup", word="a"))] * 3, max_turns=2)
    assert len(results) == 1 and one.counts["turns"] == 2 and one.counts["out_of_turns"] == 1


def test_a_turn_that_was_cut_calls_nothing():
    one, results = with_tools(said(ask("lookup", word="a")) + "." * 50, tokens_per_turn=75)
    assert results == [] and one.status == Status.TRUNCATED


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *(("2+3*4", "14"), ("(2+3)*4", "20"), ("-7 // 2", "-4"), ("7 % 3", "1"), ("1e3", "1000"), ("-(-2)**3", "8")),
        *(("2**10", "1024"), ("2^10", "1024"), ("2**-2", "0.25"), ("2**0.5", "1.414213562")),
        *(("0.1+0.2", "0.3"), ("1/3", "0.3333333333"), ("12,000 × 2 ÷ 3", "8000")),
    ],
)
def test_the_calculator_works_things_out(expression, value):
    assert calculator(expression) == value


def test_values_are_exact():
    assert evaluate("1/3 + 1/6") == Fraction(1, 2)


@pytest.mark.parametrize(
    "expression",
    [
        *("9**9**9", "10**400", "2**-5000", "1.5**99999", "1e400", pytest.param("9" * 400, id="400 digits")),
        *("9" * 2000, "+".join("1" * 300), "(" * 150 + "1" + ")" * 150 + "+" * 700),
        *("__import__('os').system('true')", "print(1)", "x", "'a'*10**9", "[1]*10", "True + 1", "1 if 1 else 2"),
        *("(-8)**0.5", "1/0", "5 % 0", "", "2 +", "1j"),
    ],
)
def test_the_calculator_refuses_everything_else_at_once(expression):
    begun = time.perf_counter()
    with pytest.raises(ValueError):
        evaluate(expression)
    assert time.perf_counter() - begun < 5
