"""What a template leaves out of messages is refused by name, and what it writes is never refused."""

import json

import pytest

from coalign.data.coverage import MAX_FORMS
from coalign.data.messages import parse_messages
from coalign.data.sources import BadRow
from coalign.data.templates import TRAINING_TEMPLATES, load_template, read_template
from coalign.environments.rendering import Rendering
from coalign.http_types import HttpRefusal
from coalign_serve.dialects import ChatCompletions
from coalign_serve.serving.completion_request import tokenize
from tests.data.families import (
    CALL,
    CALLED,
    DIALOGUE,
    FAMILIES,
    PLAIN,
    RESULT,
    SYSTEM,
    TOOL,
    answer,
    family_tokenizer,
    user,
)
from tests.data.reading import TOKENIZER, batch, reader, use
from tests.data.test_templates import LLAMA3, MISTRAL
from tests.tiny import CHATML, tiny_tokenizer

GEMMA = (  # the system message is a part of the first question
    "{{ bos_token }}{% set first = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PARTS = (  # as of SmolVLM and Idefics: reads parts alone
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OTHERWISE = "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content + '\n' }}{% endfor %}"
TWICE = "{{ messages[0].content + '\n' }}" + CHATML
HAND_WRITTEN = {"Llama-3": LLAMA3, "Mistral": MISTRAL, "Gemma": GEMMA, "parts": PARTS, "ChatML": CHATML}
ALL = [*FAMILIES, *HAND_WRITTEN, *TRAINING_TEMPLATES]


def load_any(name):
    if name in FAMILIES:
        return load_template(family_tokenizer(name))
    jinja = HAND_WRITTEN.get(name) or read_template(name)
    return load_template(tiny_tokenizer(bos_token="<|endoftext|>"), jinja)


def parts(*said):
    return [{"type": "text", "text": text} for text in said]


@pytest.mark.parametrize("name", ALL)
def test_parts_of_text_are_a_text(name):
    template, asked = load_any(name), [{"role": "user", "content": parts("He", "llo")}]
    tokens = template.prompt(parse_messages(asked, "messages"))
    assert tokens == template.prompt([user("Hello")]) == template.prompt(asked)
    assert template.tokenizer.decode(tokens).count("Hello") == 1


@pytest.mark.parametrize("name", ALL)
def test_what_templates_write_is_not_refused(name):
    template = load_any(name)
    odd = [user("  <tool_response>\n5\n</tool_response>"), answer("\n 2 </s> \n"), user("/nothink")]
    blocks = [user("1"), answer("<think>\na\n</think>\n\n2"), user("3")]
    for messages in ([user("one?")], PLAIN[1:4], DIALOGUE[1:4], odd, blocks):
        assert template.prompt(messages)
    if name != "Mistral":  # whose roles alternate
        assert template.prompt(PLAIN[:4])
    if "tools" in template.jinja and "no form for a tool call" not in template.jinja:
        assert template.prompt(CALLED[:3], [TOOL]) and template.prompt([*CALLED, user("more")], [TOOL])


@pytest.mark.parametrize("name", [*FAMILIES, *TRAINING_TEMPLATES])
@pytest.mark.parametrize("role", ["developer", "bard"])
def test_roles_that_a_template_does_not_write_are_refused(name, role):
    said = {"role": role, "content": "Be brief."}
    if role == "developer" and name.startswith("gpt-oss"):
        assert load_any(name).prompt([said, user("1?")])
        return
    for messages in ([said, user("1?")], [user("1?"), answer("2"), said, user("3?")]):
        with pytest.raises(BadRow, match=rf"{role}|first"):
            load_any(name).prompt(messages)


@pytest.mark.parametrize("kind", ["prompts", "conversations", "preferences", "labelled", "steps"])
def test_rows_of_every_kind_are_refused_with_file_row_role_and_template(kind):
    said = [{"role": "developer", "content": "Be brief."}, user("1?")]
    row = {"prompt": said, "answer": "2", "label": 1, "steps": ["2"], "labels": [1]}
    row |= {"chosen": [answer("2")], "rejected": [answer("3")]} if kind == "preferences" else {}
    inline = (FAMILIES["Qwen2.5"], "the template in data.chat_template")
    for jinja, name in (inline, ("auto", "the chat template of .+")):
        message = rf"a\.jsonl:1: {name} leaves out the content of message 0 of role 'developer'"
        with pytest.raises(ValueError, match=message):
            use(reader(kind, tokenizer=family_tokenizer("Qwen2.5"), chat_template=jinja), row)


def test_a_role_that_is_written_as_another_is_refused():
    for role in ("system", "tool", "function"):
        with pytest.raises(BadRow, match=f"has no form for the role '{role}' of message 0"):
            load_template(TOKENIZER, OTHERWISE).prompt([{"role": role, "content": "x"}, user("1?")])
    assert load_template(TOKENIZER, OTHERWISE).prompt(PLAIN[1:4])
    with pytest.raises(BadRow, match=r"writes the content of message 0 of role 'system' 2 times"):
        load_template(TOKENIZER, TWICE).prompt([SYSTEM, user("1?")])


def test_a_template_of_parts_writes_the_texts_of_runs_without_images():
    template = load_template(TOKENIZER, PARTS)
    assert TOKENIZER.decode(template.prompt([user("Hi")])) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_calls_that_a_template_leaves_out():
    calls = [user("s?"), answer("", tool_calls=[CALL, CALL]), RESULT, RESULT]
    with pytest.raises(BadRow, match=r"leaves out the call 1 \(its name\) of message 1 of role 'assistant'"):
        load_any("gpt-oss").prompt(calls, [TOOL])  # writes the first alone
    with pytest.raises(BadRow, match=r"leaves out the call 0 .* of message 1"):
        load_any("ChatML").conversation([user("s?"), answer("2", tool_calls=[CALL])])
    beside = [user("s?"), answer("let me see", tool_calls=[CALL]), RESULT, answer("3.5"), user("more?")]
    assert load_any("gpt-oss").prompt(beside, [TOOL])  # drops it on purpose once it has answered
    with pytest.raises(BadRow, match="none has no place for the answer's tool calls"):
        load_template(TOKENIZER, "none").conversation([user("s?"), answer("2", tool_calls=[CALL])])


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith(("DeepSeek", "Qwen3.5-2B"))])
@pytest.mark.parametrize("beginning", ["<think>\nqux\n</think>\n\nanswered", "qux\n</think>\n\nanswered"])
def test_a_block_of_reasoning_is_written_once(name, beginning):
    template = load_any(name)
    tokens, mask = template.conversation([user("1?"), answer(beginning)], complete=True)
    learned = template.tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert learned.count("qux") == learned.count("answered") == 1
    assert learned.count("</think>") <= 1 and ("</think>" in learned) != name.startswith("gpt-oss")


def test_reasoning_said_twice_is_one_and_two_of_them_are_refused():
    both = {"role": "assistant", "content": "<think>\na\n</think>\n\nb", "reasoning_content": "a", "reasoning": "a"}
    assert parse_messages([both], "m") == [{"role": "assistant", "content": "b", "reasoning_content": "a"}]
    assert parse_messages([{**both, "reasoning_content": " ", "reasoning": ""}], "m") == [answer(both["content"])]
    for other in ({"reasoning": "c"}, {"content": "<think>c</think>b"}):
        with pytest.raises(BadRow, match="message 0 has different reasoning under reasoning_content, reasoning"):
            parse_messages([both | other], "m")
    with pytest.raises(BadRow, match=r"reasoning is '\[1\]'; expected a text"):
        parse_messages([answer("b") | {"reasoning": [1]}], "m")


def test_keys_that_nobody_reads_are_refused_by_name():
    with pytest.raises(ValueError, match=r"a\.jsonl:1: message 1 of role 'assistant' has 'refusal', which neither"):
        batch("conversations", {"messages": [user("1?"), answer("2", refusal="no")]})
    for empty in (None, "", [], {}):
        assert batch("conversations", {"messages": [user("1?"), answer("2", refusal=empty, annotations=[])]})
    jinja = CHATML.replace("message['content']", "message['content'] + message.refusal | default('')")
    assert jinja != CHATML and load_template(TOKENIZER, jinja).prompt([user("1?") | {"refusal": "no"}])
    for part in ({"type": "tool_use", "id": 1}, {"type": "refusal", "refusal": "no"}, {"type": "text", "value": "a"}):
        with pytest.raises(ValueError, match="a part of content is no text"):
            batch("prompts", {"prompt": [{"role": "user", "content": [part]}]})


def test_a_form_is_rendered_once(monkeypatch):
    template, rendered = load_any("Qwen3"), []
    monkeypatch.setattr(template, "_apply", lambda *a: rendered.append(a) or type(template)._apply(template, *a))
    for i in range(5):
        template.prompt([user(f"{i}?")])
    assert len([a for a in rendered if "qz0qz" in a[0][0]["content"]]) == 1 and len(template.coverage._verdicts) == 1
    assert MAX_FORMS > 1000


def test_servers_and_environments_refuse_the_same():
    template = load_any("Qwen3")

    def ask(*messages):
        return tokenize(ChatCompletions.read(json.dumps({"messages": messages}).encode()), template).tokens

    assert ask({"role": "user", "content": parts("He", "llo")}) == template.prompt([user("Hello")])
    assert ask({"role": "developer", "content": "a"}, user("b")) == ask({"role": "system", "content": "a"}, user("b"))
    with pytest.raises(HttpRefusal, match="leaves out the content of message 0 of role 'critic'"):
        ask({"role": "critic", "content": "a"}, user("b"))
    with pytest.raises(HttpRefusal, match="has 'prefix', which neither"):
        ask(user("b") | {"prefix": True})
    template = load_any("Qwen2.5")
    rendering, end = Rendering(template), [9999]
    said = rendering.read_messages([{"role": "user", "content": parts("He", "llo")}])
    assert "Hello" in template.tokenizer.decode(rendering.render_messages(end, said, None)[0])
    with pytest.raises(BadRow, match="leaves out the content of message 2 of role 'developer'"):
        rendering.render_messages(end, [{"role": "developer", "content": "a"}], None)
