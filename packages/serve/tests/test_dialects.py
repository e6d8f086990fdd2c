"""Questions and answers in three APIs, against the types of OpenAI's and Anthropic's packages, without a server."""

from __future__ import annotations

import json

import pytest

from coalign.http_types import HttpRefusal
from coalign_serve.dialects import Answer, ChatCompletions, Messages, Question, Responses, ToolCall

CALL = ToolCall("call00001", "patch", '{"input": "*** Begin"}')
ANSWERS = [
    Answer("It is 5", "stop", tokens=3),
    Answer("It is", "length", tokens=2),
    Answer("Look", "tool_calls", "I think", (CALL, ToolCall("call00002", "add", '{"a": 1}')), tokens=9),
    Answer("", "tool_calls", "", (CALL,), tokens=4),
]


def read(dialect, **body):
    return dialect.read(json.dumps(body).encode())


def reply(dialect, **question):
    written = dialect(Question([], "policy", **question), "abc")
    written.prompt_tokens = 7
    return written


def test_whole_replies_are_those_of_the_packages():
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    for answer in ANSWERS:
        whole = reply(ChatCompletions).write([answer, answer])
        chat = openai.types.chat.ChatCompletion.model_validate(whole, strict=True)
        assert chat.choices[1].finish_reason == answer.finish and chat.usage.total_tokens == 7 + 2 * answer.tokens
        response = openai.types.responses.Response.model_validate(
            reply(Responses, custom_tools=frozenset({"patch"})).write([answer])
        )
        assert response.output_text == answer.text
        assert [item.type for item in response.output].count("custom_tool_call") == (answer.finish == "tool_calls")
        message = anthropic.types.Message.model_validate(reply(Messages).write([answer]))
        assert [block.type for block in message.content].count("tool_use") == len(answer.calls)
        assert message.usage.input_tokens == 7 and message.usage.output_tokens == answer.tokens


@pytest.mark.parametrize("answer", ANSWERS)
def test_events_of_responses_end_in_the_items_that_were_done(answer):
    """vLLM 42407, 56285: Codex reads the `done` events alone, and pairs them with the output by id."""
    written = reply(Responses, custom_tools=frozenset({"patch"}))
    events = [written.wait(), written.wait(), *written.write_events([answer])]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events) and events[0][0] == "response.created"
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    last = events[-1][1]["response"]
    assert last["output"] == done == reply(Responses, custom_tools=frozenset({"patch"})).write([answer])["output"]
    assert last["status"] == ("incomplete" if answer.finish == "length" else "completed")
    texts = [data["text"] for name, data in events if name == "response.output_text.done"]
    assert texts == ([answer.text] if answer.text else [])
    inputs = [data["input"] for name, data in events if name == "response.custom_tool_call_input.done"]
    assert inputs == (["*** Begin"] if answer.calls else [])


def test_a_failure_in_a_stream_is_an_event_of_its_api():
    assert reply(ChatCompletions).fail(400, "no")[1]["error"]["message"] == "no"
    name, data = reply(Responses).fail(400, "no")
    assert name == "response.failed" and data["response"]["status"] == "failed" and data["error"]["message"] == "no"
    assert reply(Messages).fail(400, "no") == (
        "error",
        {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}},
    )


def test_instructions_and_leading_items_are_one_system_message():
    """webai 214, gLLM 267: several system messages, or one after a user's, and templates refuse."""
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    user = {"role": "user", "content": "2+3?"}
    asked = read(Responses, instructions="You add.", input=[developer, user, developer])
    assert asked.messages == [
        {"role": "system", "content": "You add.\n\nBe brief."},
        {"role": "user", "content": "2+3?"},
        {"role": "system", "content": "Be brief."},
    ]


def test_what_an_assistant_did_is_one_message():
    items = [
        {"role": "user", "content": "2+3?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
        {"type": "custom_tool_call", "id": "fc_2", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
    ]
    _, answer, first, second = read(Responses, input=items).messages
    assert answer["content"] == "So" and answer["reasoning_content"] == "hm"
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
    assert json.loads(answer["tool_calls"][1]["function"]["arguments"]) == {"input": "*** Begin"}
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "5"} and second["content"] == "done"


def test_tools_that_are_no_functions():
    """llama.cpp 23041: Codex sends `namespace`, `web_search` and `custom` tools."""
    tools = [
        {"type": "custom", "name": "patch", "description": "Patches", "format": {"type": "grammar"}},
        {"type": "web_search"},
        {"type": "namespace", "name": "mcp", "tools": []},
    ]
    asked = read(Responses, input="x", tools=tools)
    assert asked.custom_tools == {"patch"} and asked.dropped_tools == ("web_search", "namespace")
    assert asked.tools[0]["function"]["parameters"]["required"] == ["input"]


def test_blocks_of_messages():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "5"}], "is_error": False}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}}
    asked = read(
        Messages,
        max_tokens=9,
        stop_sequences=["Stop"],
        system=[{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "Brief."}],
        messages=[
            {"role": "user", "content": [image, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "So"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on"}]},
            {"role": "system", "content": "In the middle"},
        ],
    )
    system, question, answer, tool, rest, middle = asked.messages
    assert system == {"role": "system", "content": "Brief."} and asked.limit == 9 and asked.stop == ("Stop",)
    assert question["content"][0] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    assert answer["reasoning_content"] == "hm" and answer["tool_calls"][0]["id"] == "t1"
    assert tool == {"role": "tool", "tool_call_id": "t1", "content": "5"}
    assert rest == {"role": "user", "content": "Go on"} and middle["role"] == "system"


def test_settings_are_what_a_dialect_does_not_read():
    body = {"messages": [{"role": "user", "content": "x"}], "model": "m", "temperature": 0.5, "tool_choice": "required"}
    asked = read(ChatCompletions, **body, seed=None)
    assert asked.settings == {"temperature": 0.5, "tool_choice": "required"} and asked.reads_calls
    assert not read(ChatCompletions, **(body | {"tool_choice": "none"})).reads_calls


@pytest.mark.parametrize(
    ("dialect", "body", "message"),
    [
        (ChatCompletions, {"messages": "x"}, "messages"),
        (ChatCompletions, {"messages": [1]}, "messages"),
        (ChatCompletions, {"messages": [{}], "stop": ["a"] * 17}, "stop"),
        (Responses, {"input": [{"type": "function_call", "call_id": "a"}]}, "function_call needs the key 'name'"),
        (Responses, {"input": [{"role": "user", "content": 3}]}, "content is int"),
        (Messages, {"messages": [{"role": "user", "content": [3]}]}, "a block of content needs the key 'type'"),
        (Messages, {"messages": [{"role": "user", "content": "x"}], "system": {"a": 1}}, "system"),
    ],
)
def test_nonsense_is_refused_by_name(dialect, body, message):
    with pytest.raises(HttpRefusal, match=message) as refused:
        read(dialect, **body)
    assert refused.value.status == 400
