"""What messages add to a conversation, by the templates that models come with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from coalign.data.templates import load_template
from coalign.rollout.rendering import Rendering, RenderingError
from tests.rollout.helpers import END, TOKENIZER, encode
from tests.tiny import CHATML, tiny_tokenizer

TRL = importlib.util.find_spec("trl")
TOOL = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "5"}
USER = {"role": "user", "content": "Sure?"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
ENDTEXT = encode("<|endoftext|>")


def rendering(name: str) -> Rendering:
    """By a model's own template, as TRL keeps them, with a tokenizer that knows ChatML's special tokens."""
    if TRL is None:
        pytest.skip("the templates of several models lie in TRL")
    path = Path(TRL.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    return Rendering(load_template(tiny_tokenizer(bos_token="<|endoftext|>"), str(path)))


def added(renders: Rendering, answer: list[int], *messages, tools=None) -> str:
    return TOKENIZER.decode(renders.following(answer, list(messages), tools))


QWEN_TOOL = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_USER = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_results_of_tools_for_qwen(name):
    assert added(rendering(name), [65, END], TOOL, tools=TOOLS) == QWEN_TOOL
    two = added(rendering(name), [65, END], TOOL, {**TOOL, "tool_call_id": "call00001"}, tools=TOOLS)
    assert two.count("<tool_response>") == 2 and two.count("<|im_start|>user") == 1


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_a_users_words_for_qwen(name):
    assert added(rendering(name), [65, END], USER) == QWEN_USER


def test_a_template_that_takes_reasoning_back_is_refused_where_it_would():
    with pytest.raises(RenderingError, match="renders earlier turns differently"):
        added(rendering("qwen3"), [65, END], USER)


def test_an_answer_that_was_cut_is_ended():
    assert added(rendering("qwen2_5"), [65], USER) == "<|im_end|>" + QWEN_USER
    assert added(rendering("qwen2_5"), [], USER) == "<|im_end|>" + QWEN_USER


def test_another_special_token_ends_a_turn_too():
    assert added(rendering("qwen2_5"), [65, *ENDTEXT], USER) == QWEN_USER


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "llama3_2"])
def test_llama(name):
    assert added(rendering(name), [65], USER) == "<|eot_id|>" + LLAMA.format("user", "Sure?")
    role = "tool" if name == "llama3" else "ipython"
    content = "5" if name == "llama3" else '"5"'
    tools = None if name == "llama3" else TOOLS
    assert added(rendering(name), [65], TOOL, tools=tools) == "<|eot_id|>" + LLAMA.format(role, content)


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


def test_a_template_that_forgets_is_refused():
    forgets = CHATML.replace("message['content']", "(message['content'] if loop.last else '…')")
    with pytest.raises(RenderingError, match=r"data\.chat_template"):
        added(Rendering(load_template(tiny_tokenizer(), forgets)), [65, END], USER)


def test_plain_text_has_no_second_message():
    with pytest.raises(RenderingError, match=r"data\.chat_template: none"):
        added(Rendering(load_template(tiny_tokenizer(), "none")), [65, END], USER)
