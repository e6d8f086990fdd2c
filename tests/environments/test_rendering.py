"""What messages add to a conversation, by templates with the traits of those that models come with."""

from __future__ import annotations

import pytest

from coalign.data.templates import load_template
from coalign.environments.rendering import Rendering
from tests.environments.helpers import END, TOKENIZER, encode
from tests.tiny import tiny_tokenizer

TOOL = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "5"}
USER = {"role": "user", "content": "Sure?"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
ENDTEXT = encode("<|endoftext|>")


QWEN2_5 = (  # results of tools are a user's words, those of one turn together
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (  # thoughts stay until the user speaks again, and the last answer has some in any case
    "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
) + QWEN2_5.replace(
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}",
    "{% else %}{% set said = m.content.split('</think>') %}"
    "{% set thought = said[0].removeprefix('<think>').strip() if said[1:] else '' %}"
    "{% set thinks = m.role == 'assistant' and loop.index0 > ns.asked and (thought or loop.last) %}"
    "{{ '<|im_start|>' + m.role + '\n' + ('<think>\n' + thought + '\n</think>\n\n' if thinks else '')"
    " + said[-1].strip() }}",
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_1 = LLAMA3.replace(  # shows a call in place of the answer, and its result as JSON in a role of its own
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}",
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{{ m.tool_calls[0].function | tojson if m.tool_calls else m.content | tojson if m.role == 'tool' "
    "else m.content | trim }}"
    "{{ '<|eot_id|>' }}",
)


def rendering(template: str) -> Rendering:
    """With a tokenizer that knows ChatML's special tokens."""
    return Rendering(load_template(tiny_tokenizer(bos_token="<|endoftext|>"), template))


def added(renders: Rendering, answer: list[int], *messages, tools=None) -> str:
    return TOKENIZER.decode(renders.render_messages(answer, list(messages), tools)[0])


QWEN_TOOL = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_USER = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize("template", [QWEN2_5, QWEN3], ids=["qwen2.5", "qwen3"])
def test_results_of_tools_for_qwen(template):
    assert added(rendering(template), [65, END], TOOL, tools=TOOLS) == QWEN_TOOL
    two = added(rendering(template), [65, END], TOOL, {**TOOL, "tool_call_id": "call00001"}, tools=TOOLS)
    assert two.count("<tool_response>") == 2 and two.count("<|im_start|>user") == 1


def test_a_users_words_for_qwen():
    assert added(rendering(QWEN2_5), [65, END], USER) == QWEN_USER


def test_an_answer_that_was_cut_is_ended():
    assert added(rendering(QWEN2_5), [65], USER) == "<|im_end|>" + QWEN_USER
    assert added(rendering(QWEN2_5), [], USER) == "<|im_end|>" + QWEN_USER


def test_another_special_token_ends_a_turn_too():
    assert added(rendering(QWEN2_5), [65, *ENDTEXT], USER) == QWEN_USER


@pytest.mark.parametrize(
    ("template", "role", "content"), [(LLAMA3, "tool", "5"), (LLAMA3_1, "ipython", '"5"')], ids=["llama3", "llama3.1"]
)
def test_llama(template, role, content):
    assert added(rendering(template), [65], USER) == "<|eot_id|>" + LLAMA.format("user", "Sure?")
    assert added(rendering(template), [65], TOOL) == "<|eot_id|>" + LLAMA.format(role, content)


def test_phi_ends_every_finished_text():
    """With an end-of-text token, which is not in the way of what follows."""
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
    )
    renders = Rendering(load_template(tiny_tokenizer(), template))
    assert added(renders, [65], USER) == "<|end|>\n<|user|>\nSure?<|end|>\n<|assistant|>\n"


def test_where_the_next_header_ends_a_turn():
    """As GLM's: no token of its own ends a turn, the policy samples the next one's header."""
    template = (
        "{% for m in messages %}{{ {'user': '<|endoftext|>', 'tool': '<|im_end|>'}.get(m['role'], '<|im_start|>') + "
        "m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    renders = Rendering(load_template(tiny_tokenizer(), template))
    assert added(renders, [65, *ENDTEXT], USER) == "Sure?<|im_start|>"
    assert added(renders, [65], USER) == "<|endoftext|>Sure?<|im_start|>"
