"""Masks and tokens of real-world styles of chat templates, against expectations written by hand."""

import json
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coalign.data.sources import BadRow
from coalign.data.templates import ChatTemplate, PlainText, load_template
from tests.data.reading import batch, texts
from tests.tiny import CHATML, tiny_tokenizer

LLAMA3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim"
    " + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALPACA = (  # no token ends a turn
    "{% for message in messages %}{{ '### ' + message['role'] + ':\n' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
QWEN3 = (  # drops the thoughts of all turns but the last
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM_BY_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}" + CHATML
)

ASK = [{"role": "user", "content": "1+1?"}]
ONE = [*ASK, {"role": "assistant", "content": "2"}]
TWO = [*ONE, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "end."}]


def words(*special, add_bos=False, add_eos=False):
    """A WordLevel tokenizer (words, line breaks, special tokens) with <s> and </s> that may add them itself."""
    vocabulary = ["<unk>", "<s>", "</s>", *special, "\n", " "]
    vocabulary += ["1+1?", "2", "And?", "end.", "[INST]", "[/INST]", "user", "assistant", "system"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| "), "isolated")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *special])
    template = ("<s> " if add_bos else "") + "$A" + (" </s>" if add_eos else "")
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def seen(tokenizer, tokens, mask):
    """The conversation as one string with the trained parts in brackets."""
    assert len(tokens) == len(mask)
    out = ""
    for trained, run in groupby(zip(mask, tokens, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run])
        out += f"⟦{text}⟧" if trained else text
    return out


def test_chatml():
    tokenizer = tiny_tokenizer()
    template = load_template(tokenizer)
    assert tokenizer.decode(template.prompt(ASK)) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert seen(tokenizer, *template.conversation(TWO)) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦end.<|im_end|>⟧\n"
    )


@pytest.mark.parametrize("jinja", [CHATML, SYSTEM_BY_DEFAULT, ALPACA, GENERATION])
def test_a_conversation_begins_with_the_prompt_that_is_generated_from(jinja):
    template = ChatTemplate(tiny_tokenizer(), jinja)
    prompt, (tokens, mask) = template.prompt(ASK), template.conversation(ONE)
    assert tokens[: len(prompt)] == prompt
    assert not any(mask[: len(prompt)]) and mask[len(prompt)]
    if jinja == SYSTEM_BY_DEFAULT:
        text = seen(template.tokenizer, tokens, mask)
        assert text.startswith("<|im_start|>system\nBe good.<|im_end|>\n") and text.endswith("⟦2<|im_end|>⟧\n")


words_ = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=8)


@given(st.lists(st.tuples(words_, words_), min_size=1, max_size=3), st.sampled_from([CHATML, GENERATION]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whatever_is_said_exactly_the_answers_are_trained(turns, jinja):
    roles = ("user", "assistant")
    messages = [{"role": r, "content": text} for turn in turns for r, text in zip(roles, turn, strict=True)]
    tokenizer = tiny_tokenizer()
    tokens, mask = ChatTemplate(tokenizer, jinja).conversation(messages)
    assert tokenizer.decode(tokens) == ChatTemplate(tokenizer, CHATML).render(messages)
    trained = tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert trained == "".join(answer + "<|im_end|>" for _, answer in turns)


@pytest.mark.parametrize("adds_bos_itself", [False, True])
def test_llama3_has_one_bos_and_trains_the_end_of_turn(adds_bos_itself):
    special = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = words(*special, add_bos=adds_bos_itself, add_eos=adds_bos_itself)
    template = load_template(tokenizer, LLAMA3)
    head, end, eot, line = (tokenizer.convert_tokens_to_ids(t) for t in (*special, "\n"))
    user, assistant, ask, answer = (tokenizer.convert_tokens_to_ids(t) for t in ("user", "assistant", "1+1?", "2"))
    prompt = [1, head, user, end, line, line, ask, eot, head, assistant, end, line, line]
    assert template.prompt(ASK) == prompt
    tokens, mask = template.conversation(ONE)
    assert tokens == [*prompt, answer, eot]  # ends with <|eot_id|>, which is not the tokenizer's eos: nothing is added
    assert mask == [False] * len(prompt) + [True, True]


def test_mistral_trains_eos_of_every_turn():
    tokenizer = words(add_bos=True)
    template = load_template(tokenizer, MISTRAL)
    inst, close, space = (tokenizer.convert_tokens_to_ids(t) for t in ("[INST]", "[/INST]", " "))
    ask, answer, more, last = (tokenizer.convert_tokens_to_ids(t) for t in ("1+1?", "2", "And?", "end."))
    assert template.prompt(ASK) == [1, inst, space, ask, space, close]
    tokens, mask = template.conversation(TWO)
    first = [1, inst, space, ask, space, close, space, answer, 2]
    assert tokens == [*first, inst, space, more, space, close, space, last, 2]
    assert mask == [False] * 6 + [True] * 3 + [False] * 5 + [True] * 3
    with pytest.raises(BadRow, match=r"refuses the messages \(user, user\): roles must alternate"):
        template.conversation([*ASK, *ASK])


def test_generation_blocks_decide_and_the_end_of_turn_joins_them():
    tokenizer = tiny_tokenizer()
    by_blocks = ChatTemplate(tokenizer, GENERATION).conversation(TWO)
    assert by_blocks == ChatTemplate(tokenizer, CHATML).conversation(TWO)
    only_last = GENERATION.replace("== 'assistant' %}", "== 'assistant' and loop.last %}")
    tokens, mask = ChatTemplate(tokenizer, only_last).conversation(TWO)
    assert tokens == by_blocks[0] and seen(tokenizer, tokens, mask).count("⟦") == 1


def test_a_turn_end_inside_the_generation_block_is_not_doubled():
    inside = GENERATION.replace(
        "{{ message['content'] }}{% endgen", "{{ message['content'] + '<|im_end|>\n' }}{% endgen"
    )
    inside = inside.replace("{{ '<|im_end|>\n' }}{% endfor", "{% if message['role'] == 'user' %}{{ '<|im_end|>\n' }}"
                            "{% endif %}{% endfor")  # fmt: skip
    tokenizer = tiny_tokenizer()
    assert ChatTemplate(tokenizer, inside).conversation(TWO) == ChatTemplate(tokenizer, CHATML).conversation(TWO)


def test_a_template_without_turn_ends_gets_a_trained_eos():
    tokenizer = tiny_tokenizer()
    text = seen(tokenizer, *ChatTemplate(tokenizer, ALPACA).conversation(TWO))
    assert text == ("### user:\n1+1?\n\n### assistant:\n⟦2\n\n⟧### user:\nAnd?\n\n### assistant:\n⟦end.\n\n<|im_end|>⟧")


def test_a_template_that_rewrites_earlier_turns_is_refused():
    template = ChatTemplate(tiny_tokenizer(), QWEN3)
    tokens, mask = template.conversation(ONE)
    assert seen(template.tokenizer, tokens, mask).endswith("assistant\n⟦<think>\n\n</think>\n\n2<|im_end|>⟧\n")
    with pytest.raises(BadRow, match=r"messages 0 to 1 differently .* \{% generation %\}"):
        template.conversation(TWO)
    assert seen(template.tokenizer, *template.conversation(TWO, since=3)).endswith("end.<|im_end|>⟧\n")
    with pytest.raises(BadRow, match="begins with the assistant"):
        template.conversation(ONE[1:])


def test_a_token_across_the_border_belongs_to_the_answer():
    tokenizer = tiny_tokenizer(merges=(("Ċ", "Ċ"),))  # the answer begins with a line break, which merges with another
    tokens, mask = ChatTemplate(tokenizer, CHATML).conversation([*ASK, {"role": "assistant", "content": "\n2"}])
    trained = [t for t, m in zip(tokens, mask, strict=True) if m]
    assert tokenizer.convert_ids_to_tokens(trained) == ["ĊĊ", "2", "<|im_end|>"]


@pytest.mark.parametrize("adds", [False, True])
def test_plain_text(adds):
    tokenizer = words(add_bos=adds, add_eos=adds)
    template = load_template(tokenizer, "none")
    ask, answer = tokenizer.convert_tokens_to_ids("1+1?"), tokenizer.convert_tokens_to_ids("2")
    prompt = [1, ask] if adds else [ask]
    assert template.prompt(ASK) == prompt
    assert template.conversation(ONE) == ([*prompt, answer, 2], [False] * len(prompt) + [True, True])
    with pytest.raises(BadRow, match="single user message, not user, assistant, user"):
        template.conversation(TWO)


def test_plain_text_that_brings_its_own_bos_or_eos_has_one():
    template = PlainText(words(add_bos=True), keep_special_tokens=True)
    assert template.prompt([{"role": "user", "content": "<s>1+1?"}])[:2].count(1) == 1
    answered = [*ASK, {"role": "assistant", "content": "2</s>"}]
    assert template.conversation(answered) == template.conversation(ONE)


def test_a_tokenizer_lacking_something(tmp_path):
    with pytest.raises(ValueError, match="has no eos_token"):
        load_template(tiny_tokenizer(eos_token=None))
    bare = tiny_tokenizer(chat_template=None)
    assert bare.pad_token is None
    with pytest.raises(ValueError, match=r"no chat template: set data.chat_template .* or to `none`"):
        load_template(bare)
    assert load_template(bare, "none").prompt(ASK) == bare("1+1?")["input_ids"]
    assert load_template(bare, CHATML).prompt(ASK) == load_template(tiny_tokenizer()).prompt(ASK)
    (tmp_path / "t.jinja").write_text(CHATML)
    assert load_template(bare, str(tmp_path / "t.jinja")).prompt(ASK) == load_template(tiny_tokenizer()).prompt(ASK)
    with pytest.raises(FileNotFoundError, match=r"nothing\.jinja"):
        load_template(bare, "nothing.jinja")
    with pytest.raises(BadRow, match="chat template refuses"):
        load_template(bare, "{{ messages[5]['x'] }}").prompt(ASK)


HERMES = (  # Qwen 2.5's way with tools
    "{% if tools is not none %}{{ '<|im_start|>system\n<tools>\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '</tools><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [*ASK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, ONE[-1]]
CALLED_TEXT = (
    "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    '⟦<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>⟧\n'
    "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n"
)


@pytest.mark.parametrize("tools", [[ADD], [json.dumps(ADD)], json.dumps([ADD])])
def test_tools_stand_where_the_template_puts_them(tools):
    described = f"<|im_start|>system\n<tools>\n{json.dumps(ADD)}\n</tools><|im_end|>\n"
    tokenizer = tiny_tokenizer(chat_template=HERMES)
    prompts = batch("prompts", {"prompt": ASK, "tools": tools}, tokenizer=tokenizer)
    assert tokenizer.decode(prompts["tokens"]).startswith(described + "<|im_start|>user\n1+1?")
    made = batch("conversations", {"messages": CALLED, "tools": tools}, tokenizer=tokenizer)
    assert seen(tokenizer, made["tokens"].tolist(), made["loss_mask"].tolist()) == described + CALLED_TEXT


@pytest.mark.parametrize(
    "call",
    [
        {"role": "assistant", "tool_calls": [CALL], "content": None},
        {"role": "assistant", "tool_calls": [CALL], "content": "", "name": None},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
    ],
)
def test_calls_are_trained_and_what_tools_return_is_not(call):
    tokenizer = tiny_tokenizer(chat_template=HERMES)
    rows = {"messages": [CALLED[0] | {"tool_calls": None}, call, *CALLED[2:]], "tools": None}
    for row in (rows, rows | {"tools": []}):  # tables have every column in every row
        made = batch("conversations", row, tokenizer=tokenizer)
        assert seen(tokenizer, made["tokens"].tolist(), made["loss_mask"].tolist()) == CALLED_TEXT
    pair = {"prompt": ASK, "chosen": [call], "rejected": "2"}
    made = batch("preferences", pair, tokenizer=tokenizer)
    assert texts(made, tokenizer)[0][1].startswith("<tool_call>") and texts(made, tokenizer)[1][1] == "2<|im_end|>"


def test_a_template_without_a_place_for_tools_is_refused():
    with pytest.raises(ValueError, match="the chat template has no place for them"):
        batch("prompts", {"prompt": ASK, "tools": [ADD]})
    with pytest.raises(ValueError, match=r"data\.chat_template: none has no place for the row's tools"):
        batch("prompts", {"prompt": "1+1?", "tools": [ADD]}, chat_template="none")


def test_which_turns_are_trained():
    shown = {}
    for train_on in ("assistant", "last", "all"):
        made = batch("conversations", {"messages": TWO}, train_on=train_on)
        shown[train_on] = seen(tiny_tokenizer(), made["tokens"].tolist(), made["loss_mask"].tolist())
    whole = shown["assistant"].replace("⟦", "").replace("⟧", "")
    assert shown["last"] == whole.replace("end.<|im_end|>", "⟦end.<|im_end|>⟧")
    assert shown["all"] == f"<|im_start|>⟦{whole.removeprefix('<|im_start|>')}⟧"
    by_blocks = batch("conversations", {"messages": TWO}, train_on="last", chat_template=GENERATION)
    assert seen(tiny_tokenizer(), by_blocks["tokens"].tolist(), by_blocks["loss_mask"].tolist()) == shown["last"]


def test_since_leaves_out_earlier_turns_of_every_template():
    for jinja in (CHATML, GENERATION, SYSTEM_BY_DEFAULT, ALPACA):
        template = ChatTemplate(tiny_tokenizer(), jinja)
        (tokens, whole), (same, last) = template.conversation(TWO), template.conversation(TWO, since=2)
        prompt = template.prompt(TWO[:3])
        assert tokens == same and last == [m and t >= len(prompt) for t, m in enumerate(whole)]


def test_a_template_that_loses_the_mask_is_refused_not_counted():
    nothing = GENERATION.replace("{% generation %}{{ message['content'] }}", "{{ message['content'] }}{% generation %}")
    with pytest.raises(ValueError, match=r"a.jsonl:1: the chat template marks nothing .* \{% generation %\}"):
        batch("conversations", {"messages": ONE}, chat_template=nothing)
    thinking = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")  # DeepSeek R1
    with pytest.raises(ValueError, match=r"asked to answer, the chat template writes '.*<think>\\n', but before"):
        batch("conversations", {"messages": ONE}, chat_template=thinking)


@pytest.mark.parametrize("kind", ["prompts", "conversations", "preferences", "labelled", "steps"])
@pytest.mark.parametrize(("jinja", "adds"), [("none", False), ("none", True), (MISTRAL, True), (CHATML, True)])
def test_no_kind_of_data_has_two_of_bos_or_of_the_last_eos(kind, adds, jinja):
    tokenizer = words("<|im_start|>", "<|im_end|>", "+", "-", add_bos=adds, add_eos=adds)
    row = {"prompt": "1+1?", "answer": "2", "label": True, "steps": ["2", "end."], "labels": [1, 0]}
    if kind == "preferences":
        row |= {"chosen": "2", "rejected": "end."}
    made = batch(kind, row, tokenizer=tokenizer, chat_template=jinja)
    for sequence in made.rows():
        tokens = sequence["tokens"].tolist()
        begins = jinja == MISTRAL or (jinja == "none" and adds)  # a template decides alone
        assert tokens.count(1) == begins and (tokens[0] == 1) == begins
        assert tokens.count(2) == (0 if kind == "prompts" or (jinja == CHATML and kind != "steps") else 1)


def test_the_format_is_applied_to_the_last_question():
    form = {"prompt_format": "{prompt} <rm_score>: {score:.2f} "}
    plain = [*ONE, {"role": "user", "content": "And?"}]
    asked = [*ONE, {"role": "user", "content": "And? <rm_score>: 0.50 "}]
    expected = ChatTemplate(tiny_tokenizer(), CHATML).prompt(asked)
    for row in ({"prompt": plain}, {"messages": [*plain, ONE[-1]]}):
        assert batch("prompts", {**row, "score": 0.5}, **form)["tokens"].tolist() == expected
    made = batch("conversations", {"prompt": plain, "answer": "end.", "score": 0.5}, **form)
    assert made["tokens"].tolist()[: len(expected)] == expected
